"""Another default dtype or device of torch changes nothing in a run whose own tensors name theirs."""

import contextlib

import pytest
import torch
from seeded import seeded

from ampcompat import amp
from ampcompat.optimizers import FusedAdam, FusedLAMB

pytestmark = pytest.mark.device

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
DTYPES = [torch.float64, torch.bfloat16, torch.float16]
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": FusedAdam, "lamb": FusedLAMB}


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make(optimizer):
    """A float32 model on the CPU, and its optimizer."""
    torch.manual_seed(0)
    with default_dtype(torch.float32), torch.device("cpu"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        inputs = torch.randn(8, 4, generator=seeded(0))
    return model, OPTIMIZERS[optimizer](model.parameters(), lr=0.01), inputs


def trained(level, optimizer="sgd"):
    """What a run leaves: delayed blocks, an overflow, a clip, a save and a load."""
    model, stepped, inputs = make(optimizer)
    model, stepped = amp.initialize(model, stepped, opt_level=level, verbosity=0)
    for number in range(5):
        for delay in (True,) if number == 0 else (True, False):  # the first step ends what its block has delayed
            loss = model(inputs).float().pow(2).mean() * (
                float("inf") if number == 1 and level in ("O1", "O2") else 1.0
            )
            with amp.scale_loss(loss, stepped, delay_unscale=delay, delay_overflow_check=number == 2) as scaled:
                scaled.backward()
        if number == 3:
            saved = amp.state_dict()
            amp.load_state_dict(saved)
            model.load_state_dict(model.state_dict())
        torch.nn.utils.clip_grad_norm_(amp.master_params(stepped), 1.0)
        stepped.step()
        stepped.zero_grad()
    return [p.detach().clone() for p in amp.master_params(stepped)], amp.state_dict()


def same(left, right):
    weights, scales = left
    others, other_scales = right
    assert scales == other_scales
    for one, other in zip(weights, others, strict=True):
        assert one.dtype == other.dtype
        assert one.device == other.device
        assert torch.equal(one, other)


@pytest.mark.on_cpu
@pytest.mark.cover(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_another_default_dtype(level, optimizer, dtype):
    want = trained(level, optimizer)
    with default_dtype(dtype):
        got = trained(level, optimizer)
    same(got, want)


@pytest.mark.on_cpu
@pytest.mark.parametrize("level", LEVELS)
def test_another_default_device(level):
    """On the meta device no number can be read: what is made there by mistake fails."""
    want = trained(level)
    with torch.device("meta"):
        got = trained(level)
    same(got, want)
