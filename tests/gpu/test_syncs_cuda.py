"""Host syncs of a step on CUDA, by torch's own watch over them."""

import warnings

import pytest
import torch

from ampcompat import amp

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def started(level, **options):
    """A step, after the first ones, in which masters are compared by value and torch sets up its own."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(32, 64, device="cuda")

    def step():
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(12):
        step()
    torch.cuda.synchronize()
    return step


def syncs(step):
    """How often the host waits for the device in ``step()``."""
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(wait.message) for wait in waits)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_step_that_takes_found_inf_never_waits(level):
    step = started(level, fused=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_any_other_step_waits_once(level):
    step = started(level, foreach=True, capturable=True)  # capturable: torch's own counters stay on the device
    assert syncs(step) == 1


def test_the_count_sees_a_wait():
    assert syncs(lambda: torch.ones((), device="cuda").item()) == 1
