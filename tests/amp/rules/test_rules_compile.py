"""Compiled code has the dtypes, outputs and gradients of eager code, without graph breaks."""

import pytest
import torch
import torch.nn.functional as F
from o1_casts import casts_on, engine_without_casts, here
from torch import nn

from ampcompat import _torch
from ampcompat.amp.casts import installation

pytestmark = [
    pytest.mark.device,
    pytest.mark.torch,
    # dynamo itself instantiates autograd Functions
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

CAN_COMPILE_BACKWARD_WITHOUT_CASTS = _torch.setting("torch._functorch.config", "backward_pass_autocast") is not None


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        y = Scale.apply(F.gelu(self.norm(self.first(x))))
        with torch.autocast(x.device.type, enabled=False):
            y = y.float() @ y.float().t() @ y.float() / 64  # gradients fit into half
        return F.log_softmax(self.last(y), 1)


def trained(net, run, x):
    with casts_on():
        y = run(x)
        with engine_without_casts():
            gradients = torch.autograd.grad(y.float().square().sum(), list(net.parameters()))
    return [y, *gradients]


def test_compiled_gradients_are_the_eager_ones():
    """Those of a region in float32 too: it is compiled without the casts of the forward around it."""
    net, x = MLP(), torch.randn(4, 8)
    eager = trained(net, net, x)
    fast = trained(net, torch.compile(net, backend="aot_eager", fullgraph=True), x)
    for got, want in zip(fast, eager, strict=True):
        assert got.dtype is want.dtype
        # Where it is compiled with casts: half's 11 bits.
        loose = 0.0 if CAN_COMPILE_BACKWARD_WITHOUT_CASTS else 5e-2
        torch.testing.assert_close(got, want, rtol=loose, atol=loose * want.abs().max().item())
    assert torch.equal(fast[0], eager[0])


def test_wrapped_functions_compile_without_a_graph_break():
    def run(x):
        y = F.interpolate(F.local_response_norm(x, 2), 4, mode="area")
        return F.multilabel_soft_margin_loss(y[0].half(), torch.ones_like(y[0]))

    x = torch.full((1, 4, 8), 300.0).half()
    with casts_on():
        fast, eager = torch.compile(run, backend="aot_eager", fullgraph=True)(x), run(x)
    assert fast.dtype is torch.float32
    assert torch.equal(fast, eager)


def test_refusals_are_errors_in_compiled_code_too():
    def loss(p, t):
        return F.binary_cross_entropy(p, t) * 2

    with casts_on(), pytest.raises(Exception, match="BCEWithLogits"):
        torch.compile(loss, backend="aot_eager")(torch.rand(3).half(), torch.rand(3))


def test_graphs_from_before_the_rules_are_compiled_again():
    run, x = torch.compile(F.gelu, backend="aot_eager"), torch.ones(3).half()
    with torch.autocast(here(), dtype=torch.float16):
        assert run(x).dtype is torch.float16
        installation.install([here()])
        assert run(x).dtype is torch.float32
        installation.uninstall()
        assert run(x).dtype is torch.float16


def test_the_cache_tag_follows_the_rules():
    """``cache_key_tag`` begins with the user's own, which is restored."""
    config = _torch.setting("torch.compiler.config", "cache_key_tag")
    if config is None:
        pytest.skip("this torch has no cache_key_tag, and its on-disk cache needs none")
    config.cache_key_tag = "mine"
    try:
        tags = []
        for device_types in (["cpu"], ["cpu", "cuda"], ["cuda", "cpu"]):
            installation.install(device_types)
            tags.append(config.cache_key_tag)
            installation.uninstall()
            assert config.cache_key_tag == "mine"
        assert tags[0] != tags[1] == tags[2]
        assert all(tag.startswith("mine") and len(tag) > 4 for tag in tags)
    finally:
        config.cache_key_tag = ""
