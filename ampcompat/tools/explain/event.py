"""What the probe finds: the birth of something that is not finite, and what it reaches. Plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ampcompat.tools.core import HALF_DTYPES
from ampcompat.tools.explain.made import KEEP_ZEROS, Made
from ampcompat.tools.explain.places import Place
from ampcompat.tools.tensors import LARGEST

#: What comes into a forward from outside: an :class:`Event` of that name is not an op.
GIVEN = ("input", "parameter", "buffer")
#: And what is handed to an op from nowhere that was seen, such as the class weights of a loss.
ARGUMENT = "argument"
#: What another rank has added, and what amp works with and no op has made that was seen: the cause is elsewhere.
COLLECTIVE, UNSEEN = "collective", "unseen"


@dataclass(frozen=True)
class Beyond:
    """An op that takes or gives what half does not hold, where all before it is computed in float32."""

    op: str
    place: Place
    takes: float  # the largest magnitude of what it is given
    gives: float  # the largest magnitude of its result
    backward: bool


@dataclass(eq=False)
class Event:
    """The birth of something that is not finite: the result of an op, or what came from outside."""

    op: str  # as in "mm"; or one of GIVEN, or ARGUMENT, COLLECTIVE or UNSEEN
    place: Place
    backward: bool  # the engine ran it
    dtype: torch.dtype  # of the result, as all that follows
    value: float | None  # the largest magnitude, in float32 from the same inputs; None if that cannot be computed
    not_finite: int  # how many values are inf or NaN
    elements: int  # of how many
    scalars: tuple[float, ...] = ()  # the numbers that the op was given, an eps or the fill of a mask among them
    zeros: int | None = None  # how many the tensor has that it divides by; None where it divides by none
    denominator: Made | None = None  # how that tensor was made
    is_of_whole: bool = False  # what it divides by, or its last input, holds whole numbers alone: a count, or a mask
    is_of_forward: bool = False  # in backward: its inputs are no gradients, so that the loss scale is not in it
    is_by_number_zero: bool = False  # it divides by a number that is 0
    is_of_nothing: bool = False  # one of its inputs has no elements
    made: list[Made] = field(default_factory=list)  # how its inputs were
    comes_from: str = ""  # what its first input is, as in "buffer mean of Net"; "" for what an op has made
    unread: frozenset[int] = frozenset()  # storages of weights of the models that ran, which no op had read before
    weights: frozenset[int] = frozenset()  # and of those that it was made with
    beyond: list[Beyond] = field(default_factory=list)  # what the value reaches, and half does not hold either
    may_reach_layer: bool = False  # of torch, in the forward; no longer known once it was made finite
    at_end_of_forward: float = 0.0  # the largest magnitude of the last op that the value reaches there, in float32
    spread: Place | None = None  # where its inf became something else
    becomes: str = "NaN"  # what it became there
    is_divided_by_sum: bool = False  # that was a division by its own sum, as in exp(x) / exp(x).sum()
    node: str = ""  # in backward, of the autograd graph
    description: str = ""  # for ARGUMENT: which tensor it is
    argument: str = ""  # and the name of that argument
    holds_mask: bool = False  # for what came from outside: it holds -inf, and nothing above 0
    far_rows: str = ""  # rows of the batch that are far larger than others, and are the ones that are not finite
    alike: list[Place] = field(default_factory=list)  # where else the same happened in the same step
    rows: str = ""  # for what came from outside: which are not finite, as in ", in row 3"

    @property
    def chains(self) -> list[Made]:
        """How its inputs were made, each with the cheap ops before it."""
        return [made for source in self.made for made in source.chain()]

    @property
    def chain_of_denominator(self) -> list[Made]:
        """The same of what it divides by."""
        return [] if self.denominator is None else list(self.denominator.chain())

    @property
    def is_mask(self) -> bool:
        """Whether it is an inf that the script has written, and nothing has become NaN by it."""
        return any(map(math.isinf, self.scalars)) and not self.is_nan and self.spread is None

    @property
    def out_of_range(self) -> bool:
        """Whether float32 is known to hold the result."""
        return self.dtype in HALF_DTYPES and self.value is not None and math.isfinite(self.value)

    @property
    def is_undefined(self) -> bool:
        """Whether float32 gives no finite result either with the same inputs."""
        return self.value is not None and not self.out_of_range

    @property
    def is_nan(self) -> bool:
        """Whether it was NaN from the first."""
        return self.value is not None and math.isnan(self.value)

    @property
    def depends_on_scale(self) -> bool:
        """Whether it may be gone at a lower loss scale."""
        return self.backward and not self.is_undefined and not self.is_of_forward

    def is_too_large_without(self, scale: float) -> bool:
        """Whether half would not hold it either without the loss ``scale`` that is in it."""
        return self.out_of_range and self.value is not None and self.value / scale > LARGEST

    def fits_if_smaller(self, times: float) -> bool:
        """Whether half would hold it if it were so many ``times`` smaller."""
        return self.out_of_range and self.value is not None and self.value / times <= LARGEST

    @property
    def underflowed_at(self) -> Made | None:
        """The op in which what the event was given became 0 in half, where it was not; None where it was not so."""
        waiting, seen = list(self.made), set[int]()
        while waiting:
            one = waiting.pop(0)
            if id(one) in seen or not one.has_zeros:
                continue
            seen.add(id(one))
            if one.has_underflowed:
                return one
            if one.largest == 0 or one.op in KEEP_ZEROS:
                waiting.extend(one.inputs)
        return None

    def grown_at(self, scale: float = 1.0) -> Made | None:
        """The op in which what the event was given became too large for half; None where it was not.

        Args:
            scale: the loss scale that the values have in them.
        """
        most = LARGEST * scale
        made = max(self.made, key=lambda one: one.largest, default=None)
        if made is None or not made.largest > most:
            return None
        while made.largest_input is not None and made.largest_input.largest > most:
            made = made.largest_input
        return made

    def function_of(self, made: Made) -> str:
        """What the script has called to make it: "clamp", or "clamp in train.py:18" where that is another line."""
        function, line = made.place.function or made.op, made.place.line
        return function if line in (None, self.place.line) else f"{function} in {line.file}:{line.number}"

    @property
    def names_the_argument(self) -> bool:
        """Whether an :data:`ARGUMENT` has a name that says what it is for: a mask may be infinite on purpose."""
        return self.argument in ("weight", "bias", "target", "pos_weight")
