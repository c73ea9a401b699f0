"""Runs made up for tests."""

from ampcompat.tools.parity.levels import Level
from ampcompat.tools.parity.record import Run
from ampcompat.tools.recording.events import Step


def step(number, loss, optimizer=0, scale=1.0, skipped=False, seconds=0.5, memory=2**20):
    losses = [] if loss is None else [loss]
    return Step(number, optimizer, losses, loss, scale, 1.0, skipped, seconds, memory)


def run(level, losses, dtype=None, ending="complete", message="", **kwargs):
    steps = [step(number, loss, **kwargs) for number, loss in enumerate(losses, start=1)]
    return Run(Level(level, dtype), steps, ending, message)
