"""Half convolutions on the CPU: float32's arithmetic, rounded once, at every level."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from internals import reset

from ampcompat import _torch
from ampcompat.amp.casts import cpu_convolution

pytestmark = [pytest.mark.torch, pytest.mark.on_cpu]

HALVES = [torch.float16, torch.bfloat16]
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
KINDS = [(dim, transposed) for dim in (1, 2, 3) for transposed in (False, True)]


@pytest.fixture
def installed(monkeypatch):
    # as on a processor without half-precision arithmetic, whatever this one has
    monkeypatch.setattr("ampcompat._torch.halves_without_cpu_convolution", lambda: frozenset(HALVES))
    cpu_convolution.install()


def arguments(dim, groups, dtype, layout=None):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 4, *[6] * dim), torch.randn(4, 4 // groups, *[3] * dim), torch.randn(4)
    bias = bias[: 4 // groups * groups]
    if layout is not None:
        x, weight = x.to(memory_format=layout), weight.to(memory_format=layout)
    return [t.to(dtype).requires_grad_() for t in (x, weight, bias)]


def run(dim, transposed, args, **settings):
    y = getattr(F, f"conv{'_transpose' if transposed else ''}{dim}d")(*args, **settings)
    return [y, *torch.autograd.grad(y, args, torch.ones_like(y))]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("dim", "transposed"), KINDS)
@pytest.mark.parametrize("groups", [1, 2])
def test_forward_and_backward_are_float32s_rounded_once(installed, dim, transposed, groups, dtype):
    args = arguments(dim, groups, dtype)
    if transposed:
        args[2] = args[2].detach()[: args[1].shape[1] * groups].requires_grad_()
    wide = [a.detach().float().requires_grad_() for a in args]
    settings = {"groups": groups, "padding": 1, "stride": 2}
    for got, want in zip(run(dim, transposed, args, **settings), run(dim, transposed, wide, **settings), strict=True):
        assert got.dtype is dtype
        assert torch.equal(got, want.to(dtype))


@pytest.mark.parametrize(("dtype", "backward"), [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_backward_in_float32_where_half_has_none(dtype, backward, monkeypatch):
    """oneDNN has no backward in float16 on a CPU: torch's own takes over, 100 times slower, with the same result."""
    computed, composite = [], _torch.composite

    def recorded(op):
        native = composite(op)

        def kernel(*args, **settings):
            computed.append((_torch.op_name(op).removeprefix("aten::"), args[0].dtype))
            return native(*args, **settings)

        return kernel

    monkeypatch.setattr("ampcompat._torch.dispatcher.composite", recorded)
    monkeypatch.setattr("ampcompat._torch.halves_without_cpu_convolution", frozenset)
    cpu_convolution.install()
    run(2, False, arguments(2, 1, dtype))
    assert computed == [("_convolution", dtype), ("convolution_backward", backward)]


@pytest.mark.parametrize(("dim", "transposed"), [(d, t) for d, t in KINDS if d > 1])
def test_strides_are_those_of_torchs_own_kernels(dim, transposed, monkeypatch):
    """Compiled graphs rely on them."""
    slow = _torch.halves_without_cpu_convolution()
    if dim == 2 or torch.float16 in slow:  # oneDNN's own forward keeps other strides in 3-d than torch's
        slow = frozenset(HALVES)
    monkeypatch.setattr("ampcompat._torch.halves_without_cpu_convolution", lambda: slow)
    for layout, dilation in itertools.product((None, LAYOUTS[dim + 2]), (1, 2)):
        args = arguments(dim, 1, torch.float16, layout)
        native = [t.stride() for t in run(dim, transposed, args, dilation=dilation)]
        cpu_convolution.install()
        ours = [t.stride() for t in run(dim, transposed, args, dilation=dilation)]
        cpu_convolution.uninstall()
        assert ours == native


def test_double_backward(installed):
    args = arguments(2, 1, torch.float16)
    wide = [a.detach().float().requires_grad_() for a in args]
    seconds = []
    for x, weight, bias in (args, wide):
        y = F.conv2d(x, weight, bias)
        (g,) = torch.autograd.grad(y.float().square().mean(), x, create_graph=True)
        seconds.append(torch.autograd.grad(g.float().square().sum(), weight)[0])
    assert seconds[0].dtype is torch.float16
    # y and g are rounded to half between the three convolutions
    torch.testing.assert_close(seconds[0].float(), seconds[1], rtol=2e-2, atol=2e-2 * seconds[1].abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_bitwise_torchs_own(dtype):
    args = arguments(2, 2, dtype)
    plain = run(2, False, args, groups=2)
    cpu_convolution.install()
    assert all(torch.equal(a, b) for a, b in zip(run(2, False, args, groups=2), plain, strict=True))


def test_mixed_dtypes_get_torchs_own_error(installed):
    x, weight, _ = arguments(2, 1, torch.float16)
    with pytest.raises(RuntimeError, match="type"):
        F.conv2d(x, weight.float())


def test_vmap_and_inference_mode(installed):
    x, weight, bias = (a.detach() for a in arguments(2, 1, torch.float16))
    with torch.inference_mode():
        assert F.conv2d(x, weight, bias).dtype is torch.float16
    mapped = torch.func.vmap(lambda row: F.conv2d(row[None], weight, bias)[0])(x)
    assert torch.equal(mapped, F.conv2d(x, weight, bias))


def test_a_compiled_half_net_equals_the_eager_one(installed):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3), torch.nn.ReLU(), torch.nn.ConvTranspose2d(4, 2, 3)).half()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    found = []
    for run_net in (net, compiled):
        y = run_net(torch.ones(2, 4, 6, 6).half())
        found.append([y, *torch.autograd.grad(y.float().sum(), list(net.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_release_and_reset_give_torchs_own_back():
    names = ["aten::_convolution", "aten::_convolution.deprecated", "aten::convolution_backward"]
    before = [torch._C._dispatch_dump(name) for name in names]
    cpu_convolution.install()
    cpu_convolution.install()
    assert [torch._C._dispatch_dump(name) for name in names] != before
    cpu_convolution.uninstall()
    cpu_convolution.uninstall()
    assert [torch._C._dispatch_dump(name) for name in names] == before
    cpu_convolution.install()
    reset()
    assert [torch._C._dispatch_dump(name) for name in names] == before
