"""Runs made up for tests."""

from ampcompat.tools.parity.levels import Level
from ampcompat.tools.parity.runs import Run
from ampcompat.tools.recording.steps import Step


def step(number, loss, skipped=False):
    return Step(number, number, skipped, losses=[] if loss is None else [loss])


def run(level, losses, dtype=None, ending="complete", message="", **kwargs):
    steps = [step(number, loss, **kwargs) for number, loss in enumerate(losses, start=1)]
    return Run(Level(level, dtype), steps, ending, message)
