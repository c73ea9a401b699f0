"""How tensors came about: the op that made each, and what that was given."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from ampcompat import _torch
from ampcompat.tools.explain.call import CAST_OPS, HALF_FUNCTIONS, Call
from ampcompat.tools.explain.places import NOWHERE, Place
from ampcompat.tools.tensors import largest, readable, storage

#: The op that makes a tensor of the numbers that a script writes, as torch.tensor(-1e9) does.
WRITTEN = "lift_fresh"
#: Ops that leave a value about as large as it was, and ops that take a part of it: what came before is kept with these.
_ALIKE = ("_to_copy", "copy_", "clone", "detach", "sqrt", "neg", "add", "rsub", "clamp", "clamp_min", "maximum")
PARTS = ("view", "expand", "unsqueeze", "squeeze", "transpose", "permute", "select", "slice", "index", "gather")
#: Ops that give whole numbers if they are given these, as a mask of inputs is 0 and 1, and its sum a count.
_WHOLE = (
    *(*PARTS, "_to_copy", "copy_", "clone", "detach", "sum", "mul", "add", "sub", "rsub", "clamp", "clamp_min"),
    *(WRITTEN, "maximum", "fill_", "zero_", "masked_fill", "masked_fill_", "triu", "tril"),
)
#: And those that make them of nothing.
_MAKE_WHOLE = ("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "arange")
_PRODUCTS = ("mul", "pow")
_SUMS = ("sum", "index_add", "scatter_add", "scatter_reduce")
#: Ops that may pass on a zero.
KEEP_ZEROS = (*PARTS, *CAST_OPS, *_PRODUCTS, *_SUMS, "mean", "sqrt", "neg", "abs")
#: Ops that make the gradient that a backward begins with.
_ROOTS = ("ones_like", "ones")


@dataclass(frozen=True)
class Made:
    """How a tensor came about: enough to say why a denominator is zero, or where a large number came from."""

    op: str
    dtype: torch.dtype
    scalars: tuple[float, ...]
    place: Place
    largest: float
    alike_to: Made | None  # what an op that leaves it alike, or takes a part of it, was given
    inputs: tuple[Made, ...] = ()  # that the op was given, as far as it is known how they came about
    hides: int | None = None  # the number of the event whose inf it was given, where it is finite, as after softmax
    is_gradient: bool = False  # or made from one
    is_of_model: bool = False  # a module made it, or something that it was made from
    has_zeros: bool = False
    has_underflowed: bool = False  # most of its zeros are of what is not 0, as of a product in half, or amp's cast
    weights: frozenset[int] = frozenset()  # the storages of the weights that it was made with
    is_whole: bool = False  # it was made of whole numbers alone, as counts and masks are

    @property
    def largest_input(self) -> Made | None:
        """The one of its inputs that is largest."""
        return max(self.inputs, key=lambda one: one.largest, default=None)

    def chain(self) -> Iterable[Made]:
        """This one and the cheap ops before it, nearest first."""
        one: Made | None = self
        while one is not None:
            yield one
            one = one.alike_to


class MadeTensors:
    """How the tensors that ops have given came about, by their storages."""

    def __init__(self) -> None:
        self._of_storages: dict[int, Made] = {}

    def of(self, tensors: Iterable[torch.Tensor]) -> list[Made]:
        """How those of ``tensors`` came about of which it is known."""
        keys = map(storage, tensors)
        return [self._of_storages[key] for key in keys if key in self._of_storages]

    def received(self, grad: torch.Tensor) -> None:
        """Note a gradient that a backward begins with."""
        made = Made("gradient", grad.dtype, (), NOWHERE, largest(grad), None, is_gradient=True)
        self._of_storages[storage(grad)] = made

    def note(
        self, call: Call, out: torch.Tensor, place: Place, is_view: bool, inf_of: int | None, weights: Collection[int]
    ) -> Made:
        """Note how ``out`` came about. Reads the device.

        Args:
            call: the op that gave it.
            out: a result.
            place: where the op ran.
            is_view: whether it is a view of what the op was given, which stays what it was.
            inf_of: the number of the event whose inf it was given, among the probe's; None where all was finite.
            weights: the storages of all weights.
        """
        sources = self.of(call.inputs)
        is_backward = _torch.current_node() is not None
        size = largest(out)
        made = Made(
            op=call.name,
            dtype=out.dtype,
            scalars=_scalars(call, out),
            place=place,
            largest=size,
            alike_to=_alike_to(call, sources, is_backward),
            inputs=tuple(sources),
            hides=inf_of if math.isfinite(size) else None,
            is_gradient=is_backward and any(source.is_gradient or source.op in _ROOTS for source in sources),
            is_of_model=not place.is_outside or any(source.is_of_model for source in sources),
            weights=_weights_of(call, sources, weights),
            has_zeros=_has_zeros(out),
            has_underflowed=_may_underflow(call, out, place) and _is_mostly_lost(call, out),
            is_whole=call.name in _MAKE_WHOLE or (call.name in _WHOLE and all(map(self.is_whole, call.inputs))),
        )
        if not is_view:
            self._of_storages[storage(out)] = made
        return made

    def is_quotient_of_sum(self, call: Call, op: str) -> bool:
        """Whether ``call`` divides what ``op`` gave by a sum of such, as exp(x) / exp(x).sum()."""
        divisor = call.denominator
        if divisor is None:
            return False
        dividend = self.of(tensor for tensor in call.inputs if tensor is not divisor)
        if not any(made.op == op for source in dividend for made in source.chain()):
            return False
        one: Made | None = next(iter(self.of([divisor])), None)
        while one is not None:
            if one.op.removesuffix("_") in _SUMS:
                return True
            has_eps = one.op in ("add", "add_") and any(abs(number) < 1e-3 for number in one.scalars)
            one = one.largest_input if has_eps or one.op in (*PARTS, *CAST_OPS, "clamp_min", "clamp") else None
        return False

    def is_whole(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` was made of whole numbers alone, or came from outside with these alone."""
        if not tensor.is_floating_point():
            return True
        for made in self.of([tensor]):
            return made.is_whole
        return readable(tensor) and bool((tensor == tensor.round()).all())


def _scalars(call: Call, out: torch.Tensor) -> tuple[float, ...]:
    """The numbers that the op was given, or that the script has written as a tensor of one element."""
    is_written = call.name == WRITTEN and out.numel() == 1
    numbers = [float(out)] if is_written else call.numbers
    return tuple(number for number in numbers if number not in (0, 1))


def _alike_to(call: Call, sources: list[Made], is_backward: bool) -> Made | None:
    """Which of ``sources`` says why the result is as large, or as small, as it is."""
    if call.name == "mul" and is_backward:  # the backward of exp multiplies by its result
        return next((source for source in sources if source.op == "exp"), None)
    if call.name == "div" and is_backward:  # and that of a logarithm divides by what it was given
        return next((source for source in sources if not source.is_gradient), None)
    return sources[0] if sources and call.name in (*_ALIKE, *PARTS) else None


def _weights_of(call: Call, sources: list[Made], weights: Collection[int]) -> frozenset[int]:
    own = frozenset(key for key in map(storage, call.inputs) if key in weights)
    return own.union(*(one.weights for one in sources))


def _has_zeros(tensor: torch.Tensor) -> bool:
    return readable(tensor) and bool((tensor == 0).any())


def _may_underflow(call: Call, out: torch.Tensor, place: Place) -> bool:
    """Whether it is a product in half, or the cast of what a function is given."""
    is_cast = call.name == "_to_copy" and place.function in HALF_FUNCTIONS
    return out.dtype == torch.float16 and (call.name in _PRODUCTS or is_cast)


def _is_mostly_lost(call: Call, result: torch.Tensor) -> bool:
    """Whether most of the zeros in a product, or a cast, are of what is not 0."""
    zeros = result == 0
    underflowed = zeros
    for tensor in call.inputs:
        underflowed = underflowed & (tensor != 0)
    return 0.0 not in call.numbers and 2 * int(underflowed.sum()) > int(zeros.sum())
