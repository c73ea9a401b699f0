import pytest
import torch

from ampcompat.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from ampcompat.normalization.fused_layer_norm import fused_layer_norm, fused_rms_norm, manual_rms_norm

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
