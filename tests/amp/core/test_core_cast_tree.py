"""Casting nested arguments."""

import collections
import dataclasses
import types

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ampcompat.amp._initialize import applier
from ampcompat.amp.casts.trees import cast_tree, map_tree, tensors_in

Pair = collections.namedtuple("Pair", "x y")
HALF = torch.float16


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    name: str
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        self.made += 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


class Movable:
    def __init__(self, x):
        self.x = x

    def to(self, dtype):
        return Movable(self.x.to(dtype))


class MyList(list):
    pass


class Bag(collections.UserList):
    pass


def ones():
    return torch.ones(2)


def test_floating_tensors_are_cast_and_the_rest_is_not():
    x = ones()
    assert cast_tree(x, HALF).dtype == HALF
    assert cast_tree(x, torch.float32) is x
    assert cast_tree(x.double(), HALF).dtype == HALF
    for value in (torch.arange(2), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64)):
        assert cast_tree(value, HALF) is value


def test_gradients_pass_through_a_cast():
    x = ones().requires_grad_()
    cast_tree([x], HALF)[0].sum().backward()
    assert torch.equal(x.grad, ones())


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [x, 1],
        lambda x: (x, "s"),
        lambda x: {"a": x, "b": [x]},
        lambda x: Pair(x, None),
        lambda x: collections.OrderedDict(a=x),
        lambda x: collections.defaultdict(list, a=x),
        lambda x: types.MappingProxyType({"a": x}),
        lambda x: MyList([x]),
        lambda x: Batch(x, "n"),
        lambda x: Frozen(x),
        lambda x: [({"deep": (x, [Pair(x, x)])},)],
    ],
)
def test_containers_are_rebuilt_in_their_own_type(make):
    """The result has the caller's types and is a new object; the caller's containers are unchanged."""
    x = ones()
    value = make(x)
    got = cast_tree(value, HALF)
    assert type(got) is type(value)
    assert got is not value
    assert [t.dtype for t in tensors(got)] == [HALF] * len(tensors(value))
    assert all(t is x for t in tensors(value))
    assert cast_tree(value, torch.float32) is value


def test_collections_of_other_kinds_are_left_alone():
    for value in (Bag([ones()]), collections.deque([ones()]), {ones()}, {"a": ones()}.values()):
        assert cast_tree(value, HALF) is value


def test_iterators_are_not_used_up():
    value = iter([ones()])
    assert cast_tree(value, HALF) is value
    assert torch.equal(next(value), ones())


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return tensors([getattr(value, f.name) for f in dataclasses.fields(value)])
    if isinstance(value, collections.abc.Mapping):
        return tensors(list(value.values()))
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


def test_a_dataclass_is_not_constructed_again():
    got = cast_tree(Batch(ones(), "n"), HALF)
    assert (got.made, got.name, got.x.dtype) == (1, "n", HALF)


def test_a_defaultdict_keeps_its_factory():
    assert cast_tree(collections.defaultdict(list, a=ones()), HALF)["missing"] == []


@pytest.mark.on_cpu
def test_packed_sequences_and_objects_with_to():
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    got = cast_tree(packed, HALF)
    assert isinstance(got, PackedSequence)
    assert got.data.dtype == HALF
    assert torch.equal(got.batch_sizes, packed.batch_sizes)
    assert cast_tree([Movable(ones())], HALF)[0].x.dtype == HALF


@pytest.mark.parametrize(
    "value",
    [np.ones(2, np.float32), np.float32(1), "text", b"bytes", 3, 2.5, None, True, torch.float32, torch.device("cpu")]
    + [torch.nn.Linear(1, 1), Movable, Batch, [], (), {}, object(), {1, 2}, range(2**62), slice(1, 2)]
    + [collections.deque([1]), frozenset("a"), Bag(), Bag([1]), {1: 2}.keys(), memoryview(b"ab"), np.ma.zeros(2)],
    ids=lambda v: type(v).__name__,
)
def test_everything_else_is_handed_through_as_it_is(value):
    assert cast_tree(value, HALF) is value
    held = [value]
    assert cast_tree(held, HALF) is held


def test_applier_is_the_same_with_any_function():
    got = applier({"a": [ones(), "s"], "b": Pair(ones(), np.ones(1))}, lambda t: t + 1)
    assert torch.equal(got["a"][0], ones() + 1)
    assert got["a"][1] == "s"
    assert torch.equal(got["b"].x, ones() + 1)


def test_tensors_in_finds_what_cast_tree_casts():
    x, y, z, w = ones(), ones(), ones(), torch.arange(2)
    nested = [x, (Pair(y, "s"), collections.OrderedDict(a=Batch(z, "n"))), {"k": MyList([w, None, 1.5])}]
    found = tensors_in(nested)
    assert [id(t) for t in found] == [id(t) for t in (x, y, z, w)]
    assert [id(t) for t in tensors_in(nested, objects=False)] == [id(t) for t in (x, y, w)]
    assert tensors_in(Movable(x)) == tensors_in("text") == []


def test_objects_are_left_alone_where_they_may_be_self():
    value = (Batch(ones(), "n"), Movable(ones()), [ones()])
    got = map_tree(value, lambda t: t.half(), objects=False)
    assert got[:2] == value[:2]
    assert got[0] is value[0]
    assert got[2][0].dtype == HALF


@pytest.mark.parametrize(
    "make", [lambda x: (x, [x, {"a": [x]}]), lambda x: {"k": (x, None, "s")}, lambda x: {"a": [x]}]
)
def test_compiled_code_goes_through_in_one_graph(make):
    torch._dynamo.reset()
    value = make(ones())
    found = torch.compile(lambda v: (cast_tree(v, HALF), tensors_in(v)), backend="eager", fullgraph=True)(value)
    assert [t.dtype for t in tensors(found[0])] == [HALF] * len(tensors(value))
    assert len(found[1]) == len(tensors(value))
    torch._dynamo.reset()
