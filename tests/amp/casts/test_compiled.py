"""Compiled code casts as eager code does: no graph break, no recompilation, the same dtypes, outputs and gradients."""

import gc
import pickle
import threading

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from internals import reset
from real_cuda import assert_equal_but_for_rounding
from torch import nn

from ampcompat.amp import disable_casts, initialize, register_float_function, scale_loss

#: torch's compiler trips over deprecations of its own.
pytestmark = [
    pytest.mark.device,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


class Scale(torch.autograd.Function):
    """An old custom function: its backward multiplies a gradient by a float32 factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x, factor)
        return torch.mm(x, factor)

    @staticmethod
    def backward(ctx, grad):
        x, factor = ctx.saved_tensors
        return torch.mm(grad, factor.t()), torch.mm(x.t(), grad)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.factor = nn.Parameter(torch.eye(16))

    def forward(self, x):
        x = self.norm(F.gelu(self.a(x)))
        with torch.autocast(x.device.type, enabled=False):
            x = torch.mm(x.float(), self.factor.float())
        x = Scale.apply(x, self.factor) if self.a.weight.dtype == torch.float32 else x.to(self.a.weight.dtype)
        return self.b(torch.sigmoid(x))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu(self.bn(self.conv(x.view(-1, 2, 2, 2))))
        return F.softplus(self.fc(self.norm(x).std((2, 3))))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x):
        q, k, v = self.qkv(x[None]).chunk(3, -1)
        written_out = torch.matmul(F.softmax(torch.matmul(q, k.transpose(1, 2)), -1), v)
        return F.log_softmax(self.out(written_out + F.scaled_dot_product_attention(q, k, v)), -1)


def trained(model, forward, optimizer, x):
    out = forward(x)
    with scale_loss(F.mse_loss(out.float(), torch.zeros_like(out.float())), optimizer) as scaled:
        scaled.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    return out.detach(), grads


#: cuDNN's convolutions and the fused attention sum gradients in any order, in half: a few roundings of the largest.
FLASH_AND_CUDNN = 8 * torch.finfo(torch.float16).eps


@pytest.mark.cover(1)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("kind", [MLP, ConvNet, Attention])
def test_fullgraph_equals_eager(kind, level):
    register_float_function(torch, "sigmoid")
    torch.manual_seed(0)
    eager, compiled = kind(), kind()
    compiled.load_state_dict(eager.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, compiled)]
    (eager, compiled), optimizers = initialize([eager, compiled], optimizers, opt_level=level, verbosity=0)
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast = torch.compile(compiled, backend=frames, fullgraph=True)
    for _ in range(3):
        x = torch.randn(4, 8)
        want, want_grads = trained(eager, eager, optimizers[0], x)
        got, got_grads = trained(compiled, fast, optimizers[1], x)
        assert_equal_but_for_rounding(got, want, FLASH_AND_CUDNN)
        assert len(got_grads) == len(want_grads)
        for a, b in zip(got_grads, want_grads, strict=True):
            assert_equal_but_for_rounding(a, b, FLASH_AND_CUDNN)
    assert frames.frame_count == 1, "recompiled, though only data changed"


class Counting(nn.Module):
    """A list of layers, and a number that each forward changes."""

    def __init__(self):
        super().__init__()
        self.layers, self.calls = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), 0

    def forward(self, x):
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        return x


class BuffersOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("basis", torch.eye(8))

    def forward(self, x):
        return torch.mm(x, self.basis)


class NoTensors(nn.Module):
    def forward(self, x):
        return torch.mm(x, x.t())


@pytest.mark.cover(1)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", [Counting, BuffersOnly, NoTensors])
def test_models_of_unusual_contents_compile(kind, level):
    """Models that keep a list, that have buffers only, and that have no tensors at all."""
    torch._dynamo.reset()
    model = initialize(kind(), opt_level=level, verbosity=0)
    x = torch.randn(2, 8)
    want, got = model(x), torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert got.dtype == want.dtype == torch.float32 or level == "O1"
    assert torch.equal(got, want)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_compiled_function_around_a_model_of_torchs_own_class(level):
    """torch 2.4 calls such a module from its graph, and tries it out on tensors without values first."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model, _ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    x = torch.randn(3, 4)
    fast = torch.compile(lambda x: model(x).float().sum(), backend="aot_eager", fullgraph=True)
    assert torch.equal(fast(x), model(x).float().sum())


class Generator(nn.Linear):
    """A class of a script's own: torch 2.4's compiler does not look into torch's classes."""

    def forward(self, x):
        return torch.tanh(super().forward(x))


class Generating(nn.Module):
    """Ends with its generator, as translation models do."""

    def __init__(self):
        super().__init__()
        self.body, self.generator = nn.Linear(4, 4), Generator(4, 4)

    def forward(self, x):
        return torch.log_softmax(self.generator(self.body(x)), -1)


@pytest.mark.rotate(3)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
def test_a_part_that_was_initialized_too(level):
    """As in apex, the part's outputs are float32 in the model around it too."""
    torch._dynamo.reset()
    model = Generating()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    initialize([model, model.generator], optimizer, opt_level=level, verbosity=0)
    x = torch.randn(3, 4)
    for module in (model, model.generator, lambda x: model(x) + model.generator(x).sum()):
        want = module(x)
        fast = torch.compile(module, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            got = fast(x)
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
        assert want.dtype == torch.float32 or level == "O1"


class Gelu(nn.Linear):
    def forward(self, x):
        return nn.functional.gelu(super().forward(x))


def unpickled_where_nobody_initialized():
    model = initialize(Gelu(4, 4), opt_level="O1", verbosity=0)
    want, data = model(X), pickle.dumps(model)
    reset()
    return pickle.loads(data), want


X = torch.linspace(-1, 1, 8).view(2, 4)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, which gives the forward up piece by piece
def test_an_unpickled_model_can_be_compiled_at_once():
    """The model was unpickled in a process without ``initialize`` and is compiled before its first forward."""
    model, want = unpickled_where_nobody_initialized()
    got = torch.compile(model, backend="aot_eager")(X)
    assert got.dtype == want.dtype == torch.float32  # native autocast leaves gelu in half
    assert torch.equal(got, want)


def test_fullgraph_needs_a_first_eager_forward():
    """A model unpickled in a process without ``initialize`` is refused as one graph until it has run once."""
    model, want = unpickled_where_nobody_initialized()
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    # torch 2.4 says of what a traced function raises only that it does.
    with pytest.raises(Exception, match=r"unpickled in a process without amp\.initialize|Observed exception"):
        fast(X)
    model(X)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(X), want)


def test_each_compiled_model_keeps_its_own_half():
    torch._dynamo.reset()
    (first, second), x = (MLP(), MLP()), torch.randn(2, 8)
    first = initialize(first, opt_level="O1", verbosity=0)
    second = initialize(second, opt_level="O4", verbosity=0)
    for model, half in ((first, torch.float16), (second, torch.bfloat16)):
        assert model(x).dtype == half
        assert torch.compile(model, backend="aot_eager", fullgraph=True)(x).dtype == half


@pytest.mark.divergence("tensor-cpu-compiled")
def test_compiled_tensor_cpu():
    torch._dynamo.reset()
    _held = initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    half = torch.ones(2, dtype=torch.float16)
    assert half.cpu().dtype == torch.float32
    assert torch.compile(lambda x: x.cpu(), backend="aot_eager")(half).dtype == torch.float32


class Linear(nn.Linear):
    """A model whose output says in which dtype it computed; torch 2.4 compiles no inherited forward."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def unseen_by_torch24(*parameters):
    """torch 2.4's compiler sees of autocast's state only whether casts are on."""
    return pytest.param(*parameters, marks=pytest.mark.divergence("compiled-casts-torch24"))


def compiled(level):
    torch._dynamo.reset()
    return torch.compile(initialize(Linear(4, 4), opt_level=level, verbosity=0), backend="eager", fullgraph=True)


def in_a_thread(call, *args):
    results = []
    thread = threading.Thread(target=lambda: results.append(call(*args)))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("latest", ["O0", "O1", "O2"])
def test_disabled_casts_whatever_the_latest_initialize_was(latest):
    fast = compiled("O1")
    _held = initialize(nn.Linear(2, 2), opt_level=latest, verbosity=0)
    for _ in range(2):
        assert fast(X).dtype == torch.float16
        with disable_casts():
            assert fast(X).dtype == torch.float32
            with disable_casts():
                assert fast(X).dtype == torch.float32
            assert fast(X).dtype == torch.float32


@pytest.mark.parametrize(
    ("level", "dtype", "latest"),
    [
        *(("O0", torch.float32, "O0"), ("O0", torch.float32, "O1"), unseen_by_torch24("O1", torch.float16, "O0")),
        *(unseen_by_torch24("O1", torch.float16, "O1"), unseen_by_torch24("O4", torch.bfloat16, "O1")),
    ],
)
def test_a_compiled_model_called_in_another_thread(level, dtype, latest):
    fast = compiled(level)
    _held = initialize(nn.Linear(2, 2), opt_level=latest, verbosity=0)
    for _ in range(2):
        assert fast(X).dtype == in_a_thread(fast, X).dtype == dtype


@pytest.mark.divergence("compiled-casts-torch24")
@pytest.mark.parametrize("latest", ["O0", "O1"])
def test_a_region_of_the_users_decides_in_any_thread(latest):
    fast = compiled("O1")
    _held = initialize(nn.Linear(2, 2), opt_level=latest, verbosity=0)

    def in_region(**how):
        with torch.autocast(X.device.type, **how):
            return fast(X).dtype

    for how, dtype in (({"enabled": False}, torch.float32), ({"dtype": torch.bfloat16}, torch.bfloat16)):
        assert in_region(**how) == in_a_thread(lambda how=how: in_region(**how)) == dtype
    assert fast(X).dtype == in_a_thread(fast, X).dtype == torch.float16


@pytest.mark.parametrize("latest", ["O0", "O1"])
def test_a_region_in_compiled_code_decides(latest):
    torch._dynamo.reset()
    model = initialize(Linear(4, 4), opt_level="O1", verbosity=0)
    _held = initialize(nn.Linear(2, 2), opt_level=latest, verbosity=0)

    def run(x):
        with torch.autocast(x.device.type, enabled=False):
            off = model(x)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            other = model(x)
        return model(x), off, other

    fast = torch.compile(run, backend="eager", fullgraph=True)
    for _ in range(2):
        assert [y.dtype for y in fast(X)] == [torch.float16, torch.float32, torch.bfloat16]
        assert [y.dtype for y in run(X)] == [torch.float16, torch.float32, torch.bfloat16]


@pytest.mark.divergence("compiled-casts-torch24")
@pytest.mark.parametrize("latest", ["O0", "O1"])
def test_a_compiled_model_called_by_an_uncast_one_or_by_a_hook(latest):
    """An eager forward at O2, and the autograd engine, switch casts off for their own code, not for models'."""
    fast = compiled("O1")
    seen = []

    class Outer(nn.Linear):
        def forward(self, x):
            seen.append(fast(X).dtype)
            return super().forward(x)

    outer = initialize(Outer(4, 4), opt_level="O2", verbosity=0)
    _held = initialize(nn.Linear(2, 2), opt_level=latest, verbosity=0)
    y = outer(X)
    y.register_hook(lambda grad: seen.append(fast(X).dtype))
    y.sum().backward()
    assert seen == [torch.float16] * 2


@pytest.fixture
def without_cache():
    torch.set_autocast_cache_enabled(False)
    yield
    reset()
    was_left_off = not torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    assert was_left_off


def test_a_user_who_switched_autocasts_cache_off(without_cache):
    """Autocast's cache flag says, while casts are off, whether somebody switched them off."""
    fast = compiled("O1")
    _held = initialize(nn.Linear(2, 2), opt_level="O0", verbosity=0)
    for _ in range(2):
        assert fast(X).dtype == torch.float16
        with disable_casts():
            assert fast(X).dtype == torch.float32
    assert not torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("follows", ["a forward", "a backward pass"])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_model_that_is_collected_while_another_is_traced(level, follows):
    """The collector runs when it likes: what traced code has read changes when the trace is over."""
    torch._dynamo.reset()
    held = [initialize(nn.Linear(8, 4), opt_level="O1", verbosity=0)]
    model = initialize(nn.Linear(8, 4), opt_level=level, verbosity=0)

    def collect(graph, inputs):
        held.clear()
        gc.collect()
        return graph.forward

    x = torch.randn(2, 8)
    loss = torch.compile(model, fullgraph=True, backend=collect)(x).sum()
    if follows == "a forward":
        model(x)
    else:
        loss.backward()
    assert torch.mm(x, x.t()).dtype == torch.float32  # the casts of the first have ended


@pytest.mark.slow  # the casts are in the graph, which the other backends are given too
def test_inductor():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = initialize(Attention(), opt_level="O1", verbosity=0)
    x = torch.randn(4, 8)
    want = model(x)
    got = torch.compile(model, fullgraph=True)(x)
    assert got.dtype == want.dtype == torch.float32  # of log_softmax
    # Inductor fuses pointwise half code and rounds it once where eager rounds after every op: one or two units.
    torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-3)
