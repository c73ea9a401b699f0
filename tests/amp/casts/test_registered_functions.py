"""Functions that users register or decorate, in every form that legacy code has."""

import abc
import collections
import types

import pytest
import torch
import torch.nn.functional as F
from internals import reset
from torch import nn

from ampcompat import amp

pytestmark = pytest.mark.torch

HALF, FLOAT, DOUBLE = torch.float16, torch.float32, torch.float64
Pair = collections.namedtuple("Pair", "left right")


def begin(level="O1"):
    model = nn.Linear(2, 2)
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)


def ones(dtype=FLOAT):
    return torch.ones(2, 2, dtype=dtype)


def library(**functions):
    """A third-party module."""
    module = types.ModuleType("library")
    vars(module).update(functions)
    return module


# -- decorators ----------------------------------------------------
@amp.half_function
def in_half(*args, **kwargs):
    return args, kwargs


@amp.float_function
def in_float(*args, **kwargs):
    return args, kwargs


@amp.promote_function
def promoted(*args):
    return args


def test_decorators_do_nothing_while_casts_are_inactive():
    x = ones()
    assert in_half(x)[0][0] is x
    _held = begin("O2")
    assert in_half(x)[0][0] is x
    _held = begin("O1")
    assert in_half(x)[0][0].dtype == HALF
    with amp.disable_casts():
        assert in_half(x)[0][0] is x
    amp._amp_state.handle._deactivate()
    assert in_half(x)[0][0] is x


def test_a_plain_autocast_region_is_no_amp():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert in_half(ones())[0][0].dtype == FLOAT


def test_nested_arguments_keep_their_structure():
    _held = begin()
    marker = object()
    args, kwargs = in_half([ones(), (ones(), 3)], {"a": ones(), "b": "text"}, Pair(ones(), None), marker, key=[ones()])
    assert args[0][0].dtype == HALF
    assert isinstance(args[0][1], tuple)
    assert args[0][1][0].dtype == HALF
    assert args[0][1][1] == 3
    assert args[1]["a"].dtype == HALF
    assert args[1]["b"] == "text"
    assert type(args[2]) is Pair
    assert args[2].left.dtype == HALF
    assert args[3] is marker
    assert kwargs["key"][0].dtype == HALF


def test_what_is_not_cast():
    _held = begin()
    integers, doubles = torch.ones(2, dtype=torch.long), ones(DOUBLE)
    (first, second, third), _ = in_half(integers, doubles, ones())
    assert (first.dtype, second.dtype, third.dtype) == (torch.long, DOUBLE, HALF)
    assert in_float(doubles, ones(HALF))[0][0].dtype == DOUBLE


def test_promotion_is_to_the_widest():
    _held = begin()
    assert [t.dtype for t in promoted(ones(HALF), ones())] == [FLOAT, FLOAT]
    assert [t.dtype for t in promoted(ones(HALF), ones(HALF))] == [HALF, HALF]
    assert [t.dtype for t in promoted(ones(HALF), ones(torch.bfloat16))] == [FLOAT, FLOAT]


def test_inner_ops_still_follow_the_lists():
    @amp.float_function
    def product_and_softmax(x):
        return torch.mm(x, x), F.softmax(x, -1)

    _held = begin()
    product, probabilities = product_and_softmax(ones(HALF))
    assert (product.dtype, probabilities.dtype) == (HALF, FLOAT)


def test_the_half_dtype_in_force():
    _held = begin("O4")
    assert in_half(ones())[0][0].dtype == torch.bfloat16


def test_gradients_flow_through_the_cast():
    _held = begin()
    x = torch.ones(2, 2, requires_grad=True)
    (cast,), _ = in_half(x)
    cast.float().sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 2))
    assert x.grad.dtype == FLOAT


# -- what can be decorated --------------------------------------------
def test_a_c_builtin():
    logsumexp = amp.float_function(torch.logsumexp)
    _held = begin()
    assert torch.logsumexp(ones(HALF), 0).dtype == HALF
    assert logsumexp(ones(HALF), 0).dtype == FLOAT


class Twice(torch.autograd.Function):
    seen = []

    @staticmethod
    @amp.float_function
    def forward(ctx, x):
        Twice.seen.append(x.dtype)
        return x * 2

    @staticmethod
    @amp.float_function
    def backward(ctx, grad):
        Twice.seen.append(grad.dtype)
        return (grad * 2).half()


def test_forward_and_backward_of_a_function_under_staticmethod():
    Twice.seen.clear()
    _held = begin()
    x = torch.ones(2, 2, dtype=HALF, requires_grad=True)
    Twice.apply(x).sum().backward()
    assert Twice.seen == [FLOAT, FLOAT]
    assert torch.equal(x.grad, torch.full((2, 2), 2.0, dtype=HALF))


def test_function_apply():
    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    apply = amp.half_function(Plain.apply)
    _held = begin()
    assert apply(ones()).dtype == HALF
    assert Plain.apply(ones()).dtype == FLOAT


def test_methods_static_class_abstract_and_forward():
    class Base(abc.ABC):
        @amp.half_function
        @abc.abstractmethod
        def above(self, x): ...

        @abc.abstractmethod
        @amp.half_function
        def below(self, x): ...

    class Derived(Base, nn.Module):
        @amp.half_function
        def above(self, x):
            return self, x.dtype

        def below(self, x):
            return x.dtype

        @amp.half_function
        @staticmethod
        def static(x):
            return x.dtype

        @classmethod
        @amp.half_function
        def of_class(cls, x):
            return cls, x.dtype

        @amp.half_function
        def forward(self, x):
            return x.dtype

    with pytest.raises(TypeError, match="abstract"):
        Base()
    _held = begin()
    derived = Derived()
    assert derived.above(ones()) == (derived, HALF)
    assert derived.static(ones()) == Derived.static(ones()) == HALF
    assert derived.of_class(ones()) == (Derived, HALF)
    assert derived(ones()) == HALF


def test_a_decorated_class_keeps_its_identity():
    @amp.float_function
    class Layer(nn.Module):
        def forward(self, x):
            return x.dtype

    _held = begin()
    layer = Layer()
    assert isinstance(layer, Layer)
    assert layer(ones(HALF)) == FLOAT


# -- registration ------------------------------------------------------
def test_a_registered_function_is_put_back():
    """A function of another package is replaced in its module while casts are active, and restored afterwards."""

    def original(x):
        return x.dtype

    module = library(op=original)
    amp.register_half_function(module, "op")
    assert module.op is original
    _held = begin()
    assert module.op(ones()) == HALF
    amp._amp_state.handle._deactivate()
    assert module.op is original
    _held = begin()
    assert module.op(ones()) == HALF
    reset()
    assert module.op is original


def test_static_methods_and_autograd_functions():
    class Ops:
        @staticmethod
        def op(x):
            return x.dtype

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

    amp.register_half_function(Ops, "op")
    amp.register_float_function(library(Copy=Copy), "Copy")
    _held = begin()
    assert Ops.op(ones()) == Ops().op(ones()) == HALF
    assert Copy.apply(ones(HALF)).dtype == FLOAT
    amp._amp_state.handle._deactivate()
    assert Ops.op(ones()) == Ops().op(ones()) == FLOAT
    assert Copy.apply(ones(HALF)).dtype == HALF


def test_registering_while_casts_are_on_takes_effect_at_once():
    module = library(op=lambda x: x.dtype)
    _held = begin()
    amp.register_half_function(module, "op")
    assert module.op(ones()) == HALF


def test_the_last_registration_of_a_name_counts():
    module = library(op=lambda x: x.dtype)
    amp.register_half_function(module, "op")
    amp.register_float_function(module, "op")
    _held = begin()
    assert module.op(ones(HALF)) == FLOAT


@pytest.mark.parametrize("register", ["half", "float", "promote"])
def test_an_unknown_name(register):
    with pytest.raises(ValueError, match=r"No function named 'nowhere' in module torch - .* - check the spelling"):
        getattr(amp, f"register_{register}_function")(torch, "nowhere")


@pytest.mark.parametrize(
    ("register", "module", "name", "call", "dtype"),
    [
        ("half", torch, "einsum", lambda x: torch.einsum("ij,jk->ik", x, x), HALF),
        ("float", torch, "einsum", lambda x: torch.einsum("ij,jk->ik", x, x), FLOAT),
        ("float", torch, "sigmoid", lambda x: torch.sigmoid(x.half()), FLOAT),
        ("float", torch, "matmul", lambda x: torch.matmul(x, x), FLOAT),
        ("float", torch, "bmm", lambda x: torch.bmm(x[None], x[None]), FLOAT),
        ("float", torch.Tensor, "matmul", lambda x: x.matmul(x), FLOAT),
        ("half", torch, "softmax", lambda x: torch.softmax(x, -1), HALF),
        ("half", F, "softmax", lambda x: F.softmax(x, -1), HALF),
        ("half", torch, "exp", lambda x: torch.exp(x), HALF),
        ("promote", torch, "mm", lambda x: torch.mm(x, x.half()), FLOAT),
        ("float", torch, "inverse", lambda x: torch.inverse(x.half() + torch.eye(2).half()), FLOAT),
    ],
)
def test_the_users_word_beats_the_list(register, module, name, call, dtype):
    getattr(amp, f"register_{register}_function")(module, name)
    _held = begin()
    assert call(ones()).dtype == dtype


def test_bce_after_a_registered_sigmoid():
    amp.register_float_function(torch, "sigmoid")
    _held = begin()
    assert F.binary_cross_entropy(torch.sigmoid(ones(HALF)), ones()).dtype == FLOAT


def test_batch_norm_registered_with_double_backward():
    amp.register_float_function(torch, "batch_norm")
    _held = begin()
    x = torch.randn(4, 2, dtype=HALF, requires_grad=True)
    norm = nn.BatchNorm1d(2)
    out = norm(x)
    assert out.dtype == FLOAT
    (slope,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
    slope.float().pow(2).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize(
    ("name", "make", "x"),
    [
        ("MaxPool2d", lambda: nn.MaxPool2d(2), torch.ones(1, 1, 2, 2)),
        ("Sigmoid", nn.Sigmoid, torch.ones(2)),
        ("Softmax", lambda: nn.Softmax(-1), torch.ones(2)),
        ("Linear", lambda: nn.Linear(2, 2), torch.ones(1, 2)),
    ],
)
def test_a_registered_class_of_torch(name, make, x):
    cls = getattr(nn, name)
    amp.register_float_function(nn, name)
    _held = begin()
    layer = make()
    assert getattr(nn, name) is cls
    assert isinstance(layer, cls)
    assert layer(x.half()).dtype == FLOAT
    amp._amp_state.handle._deactivate()
    assert "wrapper" not in cls.forward.__qualname__
    assert nn.MaxPool2d(2)(torch.ones(1, 1, 2, 2, dtype=HALF)).dtype == HALF


def test_a_class_registered_in_half_can_run():
    """The inputs of a registered ``Linear`` are half, its weights float32: the multiplication casts both."""
    amp.register_half_function(nn, "Linear")
    _held = begin()
    assert nn.Linear(2, 2)(ones()).dtype == HALF


def test_a_subclass_of_a_registered_class():
    """Its own forward is not cast; the forward of the registered class is."""

    class Mine(nn.Sigmoid):
        def forward(self, x):
            return x, super().forward(x)

    amp.register_half_function(nn, "Sigmoid")
    _held = begin()
    assert [y.dtype for y in Mine()(ones())] == [FLOAT, HALF]


def test_casts_reach_mappings_but_not_objects():
    """Tensors in mappings of any type are cast; an object with a ``.to`` of its own, such as ``self``, is not."""

    class Loss:
        """A ``.to`` of its own, and a method that is decorated."""

        def to(self, dtype):
            raise AssertionError("self is no argument")

        @amp.half_function
        def forward(self, batch):
            return batch["x"].dtype

    _held = begin()
    assert Loss().forward(collections.OrderedDict(x=ones())) == HALF
    assert in_half(types.MappingProxyType({"x": ones()}))[0][0]["x"].dtype == HALF


def test_tensors_of_devices_without_casts_pass():
    _held = begin()
    assert in_half(torch.ones(2, device="meta"), ones())[0][0].dtype == FLOAT


def test_out_is_written_to():
    amp.register_float_function(torch, "mm")
    _held = begin()
    out = torch.zeros(2, 2)
    assert torch.mm(ones(HALF), ones(HALF), out=out) is out
    assert out.eq(2).all()
