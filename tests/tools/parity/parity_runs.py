"""Runs made up for tests."""

from ampcompat.tools.parity.levels import Level
from ampcompat.tools.parity.runs import Run
from ampcompat.tools.recording.steps import Step


def step(number, loss, optimizer=0, scale=1.0, skipped=False):
    losses = [] if loss is None else [loss]
    return Step(number, number, optimizer, skipped, losses=losses, scale=scale)


def run(level, losses, dtype=None, ending="complete", message="", **kwargs):
    steps = [step(number, loss, **kwargs) for number, loss in enumerate(losses, start=1)]
    return Run(Level(level, dtype), steps, ending, message)
