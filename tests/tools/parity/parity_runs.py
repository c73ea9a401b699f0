"""Runs made up for tests."""

from ampcompat.tools.parity.levels import Level
from ampcompat.tools.parity.runs import Run
from ampcompat.tools.recording.steps import Step


def step(number, loss, optimizer=0, scale=1.0, skipped=False, seconds=0.5, memory=2**20):
    losses = [] if loss is None else [loss]
    measured = {"scale": scale, "grad_norm": 1.0, "seconds": seconds, "memory": memory}
    return Step(number, number, optimizer, skipped, losses=losses, **measured)


def run(level, losses, dtype=None, ending="complete", message="", **kwargs):
    steps = [step(number, loss, **kwargs) for number, loss in enumerate(losses, start=1)]
    return Run(Level(level, dtype), steps, ending, message)
