"""What the probe finds: the birth of something that is not finite, and how tensors came about. Plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ampcompat.tools.core import HALF_DTYPES
from ampcompat.tools.explain.places import Place

#: What comes into a forward from outside: an :class:`Event` of that name is not an op.
GIVEN = ("input", "parameter", "buffer")
#: And what is handed to an op from nowhere that was seen, such as the class weights of a loss.
ARGUMENT = "argument"
#: What another rank has added, and what amp works with and no op has made that was seen: the cause is elsewhere.
COLLECTIVE, UNSEEN = "collective", "unseen"


@dataclass(frozen=True)
class Made:
    """How a tensor came about: enough to say why a denominator is zero, or where a large number came from."""

    op: str
    scalars: tuple[float, ...]
    place: Place
    largest: float
    before: Made | None

    def chain(self) -> Iterable[Made]:
        """This one and the cheap ops before it, nearest first."""
        one: Made | None = self
        while one is not None:
            yield one
            one = one.before


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
    denominators: int = 0  # zeros in its last input
    is_by_number_zero: bool = False  # it divides by a number that is 0
    is_of_nothing: bool = False  # one of its inputs has no elements
    made: list[Made] = field(default_factory=list)  # how its inputs were
    spread: Place | None = None  # where an inf was turned into NaN
    node: str = ""  # in backward, of the autograd graph
    given: str = ""  # for ARGUMENT: which tensor it is, in words
    argument: str = ""  # and the name of that argument
    has_minus_inf: bool = False  # for what came from outside
    rows: str = ""  # for what came from outside: which are not finite, as in ", in row 3"

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
        return self.backward and not self.is_undefined

    @property
    def names_the_argument(self) -> bool:
        """Whether an :data:`ARGUMENT` has a name that says what it is for: a mask may be infinite on purpose."""
        return self.argument in ("weight", "bias", "target", "pos_weight")
