"""A step under amp launches no kernel and makes no host sync more than what it stands for."""

import pytest
import torch
from emulated_cuda import Log
from steady_steps import OPTIMIZERS, residual, warmed_up

pytestmark = [pytest.mark.device, pytest.mark.skipif(torch.version.cuda != "emulated", reason="needs --emulate-cuda")]

#: What a level does, written by hand.
STANDS_FOR = {"O0": "float32", "O1": "autocast + GradScaler", "O2": "masters by hand"}


def counts(variant, case):
    step = warmed_up(variant, case)
    with Log() as log:
        step()
    return log


@pytest.mark.parametrize("count", [10, 100])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", STANDS_FOR)
def test_a_level_costs_no_kernel_and_no_sync_more(level, optimizer, count):
    ours, theirs = (counts(variant, residual(count, optimizer)) for variant in (level, STANDS_FOR[level]))
    assert ours.kernels <= theirs.kernels
    assert ours.launches <= theirs.launches
    assert ours.syncs <= theirs.syncs


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_amp_adds_does_not_grow_with_the_parameters(level):
    few, many = (
        counts(level, residual(count)).kernels - counts(STANDS_FOR[level], residual(count)).kernels
        for count in (10, 100)
    )
    assert few == many
