"""What is refused in half, and how that is said."""

import operator

import pytest
import torch
import torch.nn.functional as F
from o1_casts import casts_on, here
from packaging.version import Version
from python_process import run_python
from seeded import seeded
from torch.nn.functional import binary_cross_entropy as early_binary_cross_entropy

from ampcompat import _torch
from ampcompat.amp import initialize
from ampcompat.amp.casts import rules
from ampcompat.amp.lists import functional_overrides

pytestmark = [pytest.mark.device, pytest.mark.torch]

P = torch.tensor([0.2, 0.7])
T = torch.tensor([0.0, 1.0])


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("which", ["input", "target", "weight"])
def test_binary_cross_entropy_refuses_half_and_names_both_fixes(which, half):
    arguments = {"input": P, "target": T, "weight": torch.ones(2)}
    arguments[which] = arguments[which].to(half)
    with casts_on(), pytest.raises(NotImplementedError) as refused:
        F.binary_cross_entropy(**arguments)
    assert "BCEWithLogits" in str(refused.value)
    assert "register_float_function(torch, 'sigmoid')" in str(refused.value)


def test_an_early_imported_loss_refuses_half():
    """``binary_cross_entropy`` was imported from ``functional`` before the rules were registered."""
    with casts_on():
        for loss in (early_binary_cross_entropy, torch.nn.BCELoss()):
            with pytest.raises(NotImplementedError, match="BCEWithLogits"):
                loss(P.half(), T)


def test_binary_cross_entropy_runs_in_float32():
    plain = F.binary_cross_entropy(P, T)
    with casts_on():
        assert torch.equal(torch.nn.BCELoss()(P, T), plain)


def test_binary_cross_entropy_runs_in_half_where_casts_are_off():
    with casts_on(), torch.autocast(here(), enabled=False):
        assert F.binary_cross_entropy(P.half(), T.half()).dtype is torch.float16


REFUSED = sorted(name for name, rule in rules.rules_by_name().items() if rule is rules.Rule.INPLACE_BANNED)


@pytest.mark.parametrize("name", REFUSED)
def test_in_place_float_ops_refuse_half(name):
    """The message has the out-of-place form, and the tensor is unchanged."""
    arguments = {"pow_": (2,), "cumprod_": (0,), "cumsum_": (0,), "renorm_": (2, 0, 1.0)}.get(name, ())
    x = torch.full((2, 2), 0.5).half()
    with casts_on():
        with pytest.raises(NotImplementedError, match=rf"In-place {name}.*x = x\.{name[:-1]}\(") as refused:
            getattr(x, name)(*arguments)
        assert "float16" in str(refused.value)
        assert x.eq(0.5).all()
        wide = x.float()
        assert getattr(wide, name)(*arguments) is wide


def test_an_in_place_power_of_two_dtypes_keeps_float32():
    with casts_on():
        assert torch.full((2,), 3.0).pow_(torch.full((2,), 2.0).half()).tolist() == [9.0, 9.0]


HALF = torch.float16
IN_PLACE = {
    "the method": lambda x: x.pow_(2),
    "the unbound method": lambda x: torch.Tensor.pow_(x, 2),
    "the operator": lambda x: operator.ipow(x, 2),
    "a function": lambda x: torch.exp_(x),
    "a function by keyword": lambda x: torch.exp_(input=x),
    "map": lambda x: list(map(torch.Tensor.exp_, [x])),
}


@pytest.mark.parametrize("how", IN_PLACE)
def test_in_place_float_ops_by_any_name_refuse_half(how):
    """Scripts call them as methods, operators and functions."""
    x = torch.full((2,), 3.0, dtype=HALF)
    with casts_on():
        with pytest.raises(NotImplementedError, match="In-place (pow|exp)_ on a torch.float16 tensor"):
            IN_PLACE[how](x)
        assert x.tolist() == [3.0, 3.0]
        IN_PLACE[how](x.float())
        with torch.autocast(here(), enabled=False):
            IN_PLACE[how](x)


def expected(function, x):
    y = x.clone()
    function(y)
    return y


BY_TORCH = {
    "square_": lambda x: x.square_(),
    "_foreach_exp_": lambda x: torch._foreach_exp_([x]),
    "_foreach_reciprocal_": lambda x: torch._foreach_reciprocal_([x]),
    "_foreach_pow_": lambda x: torch._foreach_pow_([x], 2),
    "logsumexp": lambda x: torch.logsumexp(x, 0, out=x[0]),
    # from torch's own Python code
    "trunc_normal_": lambda x: torch.nn.init.trunc_normal_(x, 2.0, 1.0, 0.9, 1.1, seeded(0)),
}


@pytest.mark.parametrize("name", BY_TORCH)
def test_torchs_own_in_place_calls_are_not_refused(name):
    """In-place float ops on half tensors inside torch's functions compute as without casts."""
    x = torch.full((2, 2), 1.5, dtype=HALF)
    want = expected(BY_TORCH[name], x)
    with casts_on():
        assert torch.equal(expected(BY_TORCH[name], x), want)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
def test_linear_cross_entropy_in_chunks_on_half():
    """torch wrote this loss in Python, with in-place operations on half tensors."""
    x, weight, target = torch.ones(4, 8, dtype=HALF), torch.ones(3, 8, dtype=HALF), torch.arange(4) % 3
    by_chunks = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2, acc_policy="compact")
    want = F.linear_cross_entropy(x, weight, target, options=by_chunks)
    with casts_on():
        assert torch.equal(F.linear_cross_entropy(x, weight, target, options=by_chunks), want)


def test_a_users_ban_leaves_torchs_own_calls_alone(monkeypatch):
    """A banned function is refused where the script calls it, but not inside SiLU's backward or a GRU cell."""
    monkeypatch.setattr(functional_overrides, "BANNED_FUNCS", [("sigmoid", "no sigmoids here")])
    x = torch.full((2, 4), 0.5, dtype=HALF, requires_grad=True)
    cell = torch.nn.GRUCell(4, 4)
    with casts_on():
        for call in (torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid, torch.nn.Sigmoid(), torch.sigmoid_):
            if call is torch.sigmoid_:  # another name, as under apex
                call(x.detach().clone())
                continue
            with pytest.raises(NotImplementedError, match="no sigmoids here"):
                call(x)
            assert call(x.float()).dtype is torch.float32
        F.silu(x).sum().backward()
        assert cell(x).dtype is HALF
    assert x.grad is not None


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        return grad.half().exp_()


def test_the_body_of_a_custom_backward_is_the_scripts():
    _held = initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
    y = Exponential.apply(torch.ones(2, requires_grad=True)).sum()
    with pytest.raises(NotImplementedError, match="In-place exp_"):
        y.backward()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_functions_call_torchs_own_operators():
    def exponential(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        torch.exp_(y)
        return y.exp_()

    for _ in range(2):
        with casts_on():
            scripted = torch.jit.script(exponential)
        assert torch.equal(scripted(P), P.exp().exp())
    assert torch.equal(torch.jit.script(exponential)(P), P.exp().exp())


COMPILED = {
    "method": lambda x: (x * 1).exp_(),
    "operator": lambda x: operator.ipow(x * 1, 2),
    "function": lambda x: torch.exp_(x * 1),
}


@pytest.mark.skipif(Version("2.5") > _torch.TORCH, reason="torch 2.4 breaks the graph at some functions, at times")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_is_refused_too(name):
    torch._dynamo.reset()
    run = torch.compile(lambda x: COMPILED[name](x) + 1, backend="eager", fullgraph=True)
    with casts_on():
        # torch 2.4 says of what a traced function raises only that it does.
        with pytest.raises(Exception, match="In-place (pow|exp)_|Observed exception"):
            run(P.half())
        assert torch.equal(run(P), COMPILED[name](P) + 1)
    assert run(P.half()).dtype is HALF


IN_ANY_ORDER = """
import torch
from internals import reset
from ampcompat import amp

assert "torch._dynamo" not in __import__("sys").modules

def run(function, x):
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", fullgraph=True)(x.clone())

def start():
    amp.register_float_function(torch, "matmul")
    return amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)

x = torch.full((2, 2), 0.5)
for _ in range(2):
    model = start()
    run(lambda x: x + 1, x)  # the compiler makes its tables
    reset()
    assert torch.equal(run(lambda x: torch.exp_(x), x), x.exp())
    assert torch.equal(run(lambda x: torch.Tensor.exp_(x), x), x.exp())
    assert torch.equal(run(lambda x: torch.Tensor.cpu(x), x), x)
    assert torch.equal(run(lambda x: torch.matmul(x, x), x), x @ x)
model = start()
for function in (lambda x: torch.exp_(x), lambda x: torch.Tensor.exp_(x)):
    assert torch.equal(run(function, x), x.exp())
    try:
        run(function, x.half())
    except Exception as error:
        assert "In-place exp_" in str(error) or "Observed exception" in str(error), error
    else:
        raise AssertionError("not refused")
"""


@pytest.mark.skipif(Version("2.5") > _torch.TORCH, reason="torch 2.4 breaks the graph at some functions, at times")
@pytest.mark.rotate(3)
def test_functions_are_compiled_in_any_order_of_calls():
    # The compiler, not yet imported, looks torch's functions up while ours are in their places.
    run = run_python(["-c", IN_ANY_ORDER], fresh=True)
    assert run.returncode == 0, run.stderr


def test_compiled_code_runs_what_torch_makes_of_refused_ops():
    torch._dynamo.reset()
    run = torch.compile(lambda x: (x * 1).square_() + 1, backend="aot_eager", fullgraph=True)
    with casts_on():
        assert torch.equal(run(P.half()), P.half() * P.half() + 1)
