"""How what a run shows is compared with the reference, and how a program that fails is told."""

import pprint

import pytest
import torch


def equal(ours, theirs):
    """Equality to the bit, but for the signs of zeros and the payloads of NaN."""
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return ours is theirs if theirs is None else ours == theirs
    return ours.dtype == theirs.dtype and bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())


def check(index, seen, expected):
    for name, value in expected.items():
        if not equal(seen[name], value):
            raise AssertionError(f"after {index} steps: {name} is {seen[name]}, should be {value}")


def error_of(run, program):
    try:
        run(program)
    except Exception as error:
        return error
    return None


def shortened(run, program):
    """``program`` without the steps that its failure does not need."""
    steps = list(program["steps"])
    for index in reversed(range(len(steps))):
        fewer = steps[:index] + steps[index + 1 :]
        if error_of(run, {**program, "steps": fewer}) is not None:
            steps = fewer
    return {**program, "steps": steps}


def assert_runs(run, program):
    """Run a program; if it fails, fail with the shortest part of it that fails too."""
    error = error_of(run, program)
    if error is None:
        return
    short = shortened(run, program)
    error = error_of(run, short) or error
    pytest.fail(f"{error!r}\nin the program\n{pprint.pformat(short, width=120, sort_dicts=False)}")
