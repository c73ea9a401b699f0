"""``fused_layer_norm_cuda`` as copies of apex's ``fused_layer_norm.py`` call it: by position, from their own autograd.

Megatron's forks carry such copies; older ones, from before RMS norms and ``memory_efficient``, pass fewer arguments.
"""

import inspect

import pytest
import torch
from amp_training import make_step
from torch import nn
from torch.nn import functional as F

from ampcompat import amp
from ampcompat import fused_layer_norm_cuda as extension

pytestmark = pytest.mark.device

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: Of gradients that are rounded to a half dtype, as both sides are, in different orders of operations.
ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-10}
SIGNATURES = {
    "forward_affine": "input normalized_shape gamma beta epsilon",
    "forward": "input normalized_shape epsilon",
    "backward_affine": "dout mean_ invvar input_or_output normalized_shape gamma beta epsilon memory_efficient",
    "backward": "dout mean_ invvar input_or_output normalized_shape epsilon memory_efficient",
    "forward_affine_mixed_dtypes": "input normalized_shape gamma beta epsilon",
    "rms_forward_affine": "input normalized_shape gamma epsilon",
    "rms_forward": "input normalized_shape epsilon",
    "rms_backward_affine": "dout invvar input_or_output normalized_shape gamma epsilon memory_efficient",
    "rms_backward": "dout invvar input_or_output normalized_shape epsilon memory_efficient",
    "rms_forward_affine_mixed_dtypes": "input normalized_shape gamma epsilon",
}


def test_the_functions_are_those_that_apex_bound():
    """From ``csrc/layer_norm_cuda.cpp``; all are positional."""
    assert {name: " ".join(inspect.signature(getattr(extension, name)).parameters) for name in extension.__all__} == (
        SIGNATURES
    )


class LayerNormAffine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, shape, eps, memory_efficient, mixed):
        function = extension.forward_affine_mixed_dtypes if mixed else extension.forward_affine
        output, mean, invvar = function(x, shape, weight, bias, eps)
        ctx.shape, ctx.eps, ctx.memory_efficient = shape, eps, memory_efficient
        if memory_efficient:
            ctx.save_for_backward(output, weight, bias, None, invvar)
        else:
            ctx.save_for_backward(x, weight, bias, mean, invvar)
        return output

    @staticmethod
    def backward(ctx, grad):
        saved, weight, bias, mean, invvar = ctx.saved_tensors
        found = extension.backward_affine(
            grad.contiguous(), mean, invvar, saved, ctx.shape, weight, bias, ctx.eps, ctx.memory_efficient
        )
        return *found, None, None, None, None


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shape, eps, memory_efficient):
        output, mean, invvar = extension.forward(x, shape, eps)
        ctx.shape, ctx.eps, ctx.memory_efficient = shape, eps, memory_efficient
        if memory_efficient:
            ctx.save_for_backward(output, None, invvar)
        else:
            ctx.save_for_backward(x, mean, invvar)
        return output

    @staticmethod
    def backward(ctx, grad):
        saved, mean, invvar = ctx.saved_tensors
        found = extension.backward(grad.contiguous(), mean, invvar, saved, ctx.shape, ctx.eps, ctx.memory_efficient)
        return found, None, None, None


class RMSNormAffine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, shape, eps, memory_efficient, mixed):
        function = extension.rms_forward_affine_mixed_dtypes if mixed else extension.rms_forward_affine
        output, invvar = function(x, shape, weight, eps)
        ctx.shape, ctx.eps, ctx.memory_efficient = shape, eps, memory_efficient
        ctx.save_for_backward(output if memory_efficient else x, weight, invvar)
        return output

    @staticmethod
    def backward(ctx, grad):
        saved, weight, invvar = ctx.saved_tensors
        found = extension.rms_backward_affine(
            grad.contiguous(), invvar, saved, ctx.shape, weight, ctx.eps, ctx.memory_efficient
        )
        return *found, None, None, None, None


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shape, eps, memory_efficient):
        output, invvar = extension.rms_forward(x, shape, eps)
        ctx.shape, ctx.eps, ctx.memory_efficient = shape, eps, memory_efficient
        ctx.save_for_backward(output if memory_efficient else x, invvar)
        return output

    @staticmethod
    def backward(ctx, grad):
        saved, invvar = ctx.saved_tensors
        found = extension.rms_backward(grad.contiguous(), invvar, saved, ctx.shape, ctx.eps, ctx.memory_efficient)
        return found, None, None, None


class Copied(nn.Module):
    """The module of such a copy."""

    def __init__(self, shape, eps=1e-5, affine=True, rms=False, memory_efficient=False, mixed=False):
        super().__init__()
        self.shape, self.eps, self.affine, self.rms = torch.Size(shape), eps, affine, rms
        self.memory_efficient, self.mixed = memory_efficient, mixed
        self.weight = nn.Parameter(torch.ones(shape)) if affine else None
        self.bias = nn.Parameter(torch.zeros(shape)) if affine and not rms else None

    def forward(self, x):
        if self.affine and self.rms:
            return RMSNormAffine.apply(x, self.weight, self.shape, self.eps, self.memory_efficient, self.mixed)
        if self.affine:
            return LayerNormAffine.apply(
                x, self.weight, self.bias, self.shape, self.eps, self.memory_efficient, self.mixed
            )
        if self.rms:
            return RMSNorm.apply(x, self.shape, self.eps, self.memory_efficient)
        return LayerNorm.apply(x, self.shape, self.eps, self.memory_efficient)


def torchs(layer, x):
    """Torch's norm of the same parameters, in float32 at least, rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = None if layer.weight is None else layer.weight.to(wide)
    bias = None if layer.bias is None else layer.bias.to(wide)
    if layer.rms:
        found = F.rms_norm(x.to(wide), layer.shape, weight, layer.eps)
    else:
        found = F.layer_norm(x.to(wide), layer.shape, weight, bias, layer.eps)
    return found.to(layer.weight.dtype if layer.mixed else x.dtype)


def filled(layer):
    """Weights about 1 and biases about 0, as they are in training, none of them exact."""
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn(p.shape).to(p.dtype) * 0.1)
    return layer


@pytest.mark.cover(2)
@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("weights", ["none", "same", "mixed"])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_values_and_gradients_are_those_of_torchs_norms(dtype, rms, weights, memory_efficient):
    affine, mixed = weights != "none", weights == "mixed"
    torch.manual_seed(0)
    layer = filled(Copied((3, 4), 1e-3, affine, rms, memory_efficient, mixed).to(torch.float32 if mixed else dtype))
    x = (torch.randn(2, 5, 3, 4) * 2 + 1).to(dtype).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    ours, theirs = layer(x), torchs(layer, twin)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=ROUNDING[ours.dtype] * theirs.abs().max().item())
    grad = torch.randn(x.shape).to(ours.dtype)
    leaves = list(layer.parameters())
    got = torch.autograd.grad(ours, [x, *leaves], grad)
    wanted = torch.autograd.grad(theirs, [twin, *leaves], grad)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        # Nothing that is computed from an output is more exact than that, whatever its own dtype.
        exact = max(ROUNDING[a.dtype], ROUNDING[ours.dtype] if memory_efficient else 0.0)
        torch.testing.assert_close(a, b, rtol=0.0, atol=exact * b.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics(dtype):
    torch.manual_seed(0)
    x = (torch.randn(2, 5, 3, 4) * 2 + 1).to(dtype)
    rows = x.float().reshape(10, 12)
    _, mean, invvar = extension.forward(x, (3, 4), 1e-3)
    _, rms = extension.rms_forward(x, (3, 4), 1e-3)
    assert {mean.dtype, invvar.dtype, rms.dtype} == {torch.float32}
    torch.testing.assert_close(mean, rows.mean(1))
    torch.testing.assert_close(invvar, (rows.var(1, unbiased=False) + 1e-3).rsqrt())
    torch.testing.assert_close(rms, (rows.square().mean(1) + 1e-3).rsqrt())


def test_the_arguments_of_before_memory_efficient():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 8), torch.randn(8), torch.randn(8)
    output, mean, invvar = extension.forward_affine(x, (8,), weight, bias, 1e-5)
    old = extension.backward_affine(output, mean, invvar, x, (8,), weight, bias, 1e-5)
    new = extension.backward_affine(output, mean, invvar, x, (8,), weight, bias, 1e-5, False)
    assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    output, mean, invvar = extension.forward(x, (8,), 1e-5)
    old = extension.backward(output, mean, invvar, x, (8,), 1e-5)
    assert torch.equal(old, extension.backward(output, mean, invvar, x, (8,), 1e-5, False))


def test_where_a_weight_is_zero_the_output_does_not_tell():
    """0 / 0 there, and right everywhere else; apex took the normalized input for 0, and the weight never moved."""
    torch.manual_seed(0)
    layer = filled(Copied((4,), memory_efficient=True))
    with torch.no_grad():
        layer.weight[1] = 0.0
    x = torch.randn(3, 4, requires_grad=True)
    ours = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight, layer.bias])
    theirs = torch.autograd.grad(torchs(layer, x).square().sum(), [x, layer.weight, layer.bias])
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        assert a[..., 1].isnan().all()
        torch.testing.assert_close(a[..., [0, 2, 3]], b[..., [0, 2, 3]], rtol=1e-4, atol=1e-5)  # float32, reconstructed
    torch.testing.assert_close(ours[2], theirs[2])


def test_what_is_refused():
    x = torch.randn(2, 4)
    output, mean, invvar = extension.forward(x, (4,), 1e-5)
    with pytest.raises(ValueError, match="mean_=None without memory_efficient"):
        extension.backward(output, None, invvar, x, (4,), 1e-5)
    for function in (extension.forward, extension.rms_forward):
        with pytest.raises(RuntimeError, match=r"normalized_shape=\[3\] and a tensor of shape \[2, 4\]"):
            function(x, (3,), 1e-5)
    with pytest.raises(RuntimeError, match=r"normalized_shape=\[\]"):
        extension.backward(output, mean, invvar, x, (), 1e-5)


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_a_model_with_the_copy_trains_as_with_torchs_norm(level, rms, memory_efficient):
    def losses(kind):
        torch.manual_seed(0)
        norm = Copied((16,), rms=rms, memory_efficient=memory_efficient)
        if kind == "torch":
            norm.forward = lambda x: torchs(norm, x)
        model = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scale = 1.0 if level == "O5" else 128.0
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
        found = []
        for step in range(8):
            torch.manual_seed(step)
            x = torch.randn(32, 8)
            loss = (model(x).float() - x.sum(1, keepdim=True)).pow(2).mean()
            make_step(optimizer, loss)
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    ours, theirs = losses("copy"), losses("torch")
    assert ours[-1] < ours[0]
    # Gradients are rounded in other places, at half's precision where the level has half weights or functions.
    rel = {"O0": 1e-4, "O5": 0.1}.get(level, 0.02)
    assert ours == pytest.approx(theirs, rel=rel)
