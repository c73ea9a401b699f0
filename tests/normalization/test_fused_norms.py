"""The layers of ``apex.normalization`` beside torch's own."""

import pytest
import torch
from amp_training import make_step
from internals import reset
from torch import nn

from ampcompat import amp
from ampcompat.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from ampcompat.normalization.fused_layer_norm import (
    FusedLayerNormAffineFunction,
    fused_layer_norm,
    fused_rms_norm,
    manual_rms_norm,
)

pytestmark = [pytest.mark.device, pytest.mark.torch]

HALVES = [torch.float16, torch.bfloat16]


def reference(x, dims, eps, center):
    x = x.double()
    if center:
        x = x - x.mean(dims, keepdim=True)
    return x / (x.pow(2).mean(dims, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize(("cls", "center"), [(FusedLayerNorm, True), (FusedRMSNorm, False)])
@pytest.mark.parametrize("shape", [5, (5,), (3, 5)])
def test_float32_follows_the_definition(cls, center, shape):
    torch.manual_seed(0)
    x, layer = torch.randn(4, 3, 5), cls(shape)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 2)
    dims = (-1,) if shape != (3, 5) else (-2, -1)
    expected = reference(x, dims, 1e-5, center) * layer.weight.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)  # float32 rounding


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("cls", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_result_dtype_and_gradients(cls, half):
    x = torch.randn(2, 8).to(half).requires_grad_()
    layer = cls(8)
    y = layer(x)
    assert y.dtype is (torch.float32 if cls.__name__.startswith("Mixed") else half)
    y.float().pow(3).sum().backward()
    assert x.grad.dtype is half
    assert layer.weight.grad.dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype is y.dtype


@pytest.mark.parametrize("function", [fused_layer_norm, fused_rms_norm])
def test_half_statistics_do_not_overflow(function):
    x = torch.tensor([[300.0, -300.0, 300.0, -300.0]], dtype=torch.float16)  # squares exceed 65504
    assert torch.equal(function(x, 4).abs(), torch.ones(1, 4, dtype=torch.float16))


def test_state_dict_keys_and_torch_classes():
    assert list(FusedLayerNorm(4).state_dict()) == ["weight", "bias"]
    assert list(FusedRMSNorm(4).state_dict()) == ["weight"]
    assert not FusedLayerNorm(4, elementwise_affine=False).state_dict()
    assert isinstance(FusedLayerNorm(4), torch.nn.LayerNorm)
    assert isinstance(FusedRMSNorm(4), torch.nn.RMSNorm)


@pytest.mark.parametrize("cls", [MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_mixed_layers_are_always_affine(cls):
    cls(4, elementwise_affine=True)
    with pytest.raises(RuntimeError, match="elementwise_affine=False"):
        cls(4, elementwise_affine=False)
    with pytest.raises(TypeError, match="bais"):
        cls(4, bais=True)


def test_manual_rms_norm_answers_in_the_weights_dtype():
    x = torch.randn(2, 4).half()
    assert manual_rms_norm(x, 4, None, 1e-5).dtype is torch.float32
    assert manual_rms_norm(x, 4, torch.ones(4).bfloat16(), 1e-5).dtype is torch.bfloat16


def trained(make, level):
    """Losses of a small net with the layer in it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), make(16, eps=1e-5), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    losses = []
    for step in range(12):
        torch.manual_seed(step)
        x = torch.randn(32, 8)
        loss = (model(x).float() - x.sum(1, keepdim=True)).pow(2).mean()
        make_step(optimizer, loss)
        optimizer.zero_grad()
        losses.append(loss.item())
    half = level in ("O2", "O3")
    assert model[1].weight.dtype == (torch.float16 if half else torch.float32)
    reset()
    return losses


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch's layer, at O1
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize(
    ("cls", "plain"),
    [
        (FusedLayerNorm, nn.LayerNorm),
        (MixedFusedLayerNorm, nn.LayerNorm),
        (FusedRMSNorm, nn.RMSNorm),
        (MixedFusedRMSNorm, nn.RMSNorm),
    ],
)
def test_they_train_as_torchs_layers_at_every_level(cls, plain, level):
    ours, torchs = trained(cls, level), trained(plain, level)
    assert ours[-1] < ours[0]
    # The same kernel, hence the same bits; but torch's RMS norm of half inputs rounds its mean square, depending on its
    # version, and ours does not.
    exact = plain is nn.LayerNorm or level == "O0"
    assert ours == (torchs if exact else pytest.approx(torchs, rel=0.03))


def test_the_layer_answers_in_its_inputs_dtype_under_o1():
    """apex's kernel was on none of the lists: no cast to float32, as torch's layer gets, for the layer that follows."""
    model = amp.initialize(nn.Sequential(nn.Linear(4, 4), FusedLayerNorm(4)), opt_level="O1", verbosity=0)
    assert model(torch.randn(2, 4)).dtype is torch.float16


def test_the_layer_norm_function():
    x, weight, bias = torch.randn(2, 3), torch.randn(3), torch.randn(3)
    out = FusedLayerNormAffineFunction.apply(x, weight, bias, (3,), 1e-5)
    assert torch.equal(out, torch.nn.functional.layer_norm(x, (3,), weight, bias, 1e-5))
