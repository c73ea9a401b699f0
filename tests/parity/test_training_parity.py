"""Every recorded training run of apex, run here."""

import pytest
import scenarios
import torch
import torch.nn.functional as F
from replay_training import NOISE, RECORDED, norm_differences, off_by, run

from ampcompat import amp

pytestmark = pytest.mark.torch

KEYS = [scenarios.key(name, kwargs) for name, kwargs in scenarios.RUNS]

#: Half arithmetic of another CPU rounds differently, and masters start here from the float32 weights.
TOLERANCE = 2e-3
#: For the one norm that is rounding noise, divided by its own size by AdamW: see the control test below.
NOISE_TOLERANCE = 5e-2


def test_every_recorded_run_is_run():
    assert sorted(KEYS) == sorted(RECORDED)
    assert len(KEYS) == 32


@pytest.mark.parametrize(("name", "kwargs"), scenarios.RUNS, ids=KEYS)
def test_run_reproduces_the_recording(name, kwargs):
    want = RECORDED[scenarios.key(name, kwargs)]
    got = run(name, kwargs)
    assert {field: got[field] for field in got if field in ("scale", "skipped")} == {
        field: want[field] for field in want if field in ("scale", "skipped")
    }
    assert got.keys() == want.keys()
    assert max(off_by(got["loss"], want["loss"])) <= TOLERANCE
    norms, noise = norm_differences(name, got, want)
    assert max(norms) <= TOLERANCE
    assert max(noise, default=0.0) <= NOISE_TOLERANCE


def test_the_noisy_norm_has_a_gradient_of_exactly_zero():
    # A key bias adds the same number to a whole row of attention scores, which softmax ignores. What is left is
    # rounding: it shrinks with the precision, and the other two thirds of the bias's gradient do not.
    assert {("block", 1)} == NOISE
    sizes = {}
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = scenarios.Block().to(dtype)
        assert model.get_parameter("qkv.bias") is list(model.parameters())[1]
        (x, y), *_ = scenarios._data(1, (8, 6, 16))
        F.cross_entropy(model(x.to(dtype)), y).backward()
        sizes[dtype] = model.qkv.bias.grad.abs().reshape(3, 16).amax(1).tolist()
    (query, key, value), (_, key64, _) = sizes[torch.float32], sizes[torch.float64]
    assert min(query, value) > 1e-3
    assert key < 1e-8
    assert key64 < 1e-16


@pytest.mark.parametrize("name", ["mlp", "convbn", "gan"])
def test_o2_differs_from_apex_by_where_masters_start(name, monkeypatch):
    # apex copied masters from weights already rounded to half. Round them first and what is left is summation order.
    initialize = amp.initialize

    def from_rounded_weights(models, optimizers, **kwargs):
        with torch.no_grad():
            for model in models if isinstance(models, list) else [models]:
                for module in model.modules():
                    if not isinstance(module, torch.nn.BatchNorm2d):
                        for param in module.parameters(recurse=False):
                            param.copy_(param.half())
        return initialize(models, optimizers, **kwargs)

    monkeypatch.setattr(amp, "initialize", from_rounded_weights)
    want = RECORDED[scenarios.key(name, {"opt_level": "O2"})]
    got = run(name, {"opt_level": "O2"})
    assert max(off_by(got["loss"], want["loss"])) <= 2e-5
    assert max(off_by(got["norms"], want["norms"])) <= 2e-5
