"""The probe: sees every op, and follows what is not finite from where it was born to where it ends up.

An inf that softmax turns into a zero is not a fault (masks do that on purpose); the one to name is the one that reaches
an output or a gradient. So every non-finite tensor carries its origin, the op that made it from finite inputs.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompat import _torch
from ampcompat.tools.core import HALF_DTYPES, Args, Kwargs, map_tree, master_of, tensors_in
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.places import Place, Places
from ampcompat.tools.frames import is_called_by_amp
from ampcompat.tools.tensors import count_not_finite, covers_storage, is_finite, largest, readable, storage

_CHEAP = ("_to_copy", "sqrt", "add", "clamp", "view", "expand", "unsqueeze", "clamp_min", "detach", "maximum", "copy_")


#: What comes into a forward from outside: an :class:`Event` of that name is not an op.
GIVEN = ("input", "parameter", "buffer")
#: And what is handed to an op from nowhere that was seen, such as the class weights of a loss.
ARGUMENT = "argument"
#: What another rank has added, and what amp works with and no op has made that was seen: the cause is elsewhere.
COLLECTIVE, UNSEEN = "collective", "unseen"
#: Ops that change the dtype.
CASTS = ("_to_copy", "copy_", "to")
_COLLECTIVES = ("c10d", "_c10d_functional")

#: Rows that are written out.
SHOWN_ROWS = 8
#: Names of arguments that say more than "self" and "other" do.
_TELLING = ("weight", "bias", "target", "mask", "attn_mask", "pos_weight", "running_mean", "running_var")


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
    """The birth of something non-finite.

    Attributes:
        op: The op's name, as in "mm"; or one of :data:`GIVEN`, or ARGUMENT, COLLECTIVE or UNSEEN.
        backward: Whether the engine ran it.
        dtype: Dtype of its result.
        value: The largest magnitude of its result, computed again in float32 from the same inputs; inf or NaN if it is
            so there too, None if it cannot be computed there.
        not_finite: How many values of its result are inf or NaN.
        elements: How many values the result has.
        scalars: Its numbers, an eps or the fill of a mask among them.
        denominators: Zeros in its inputs.
        made: How its inputs were made.
        spread: Where an inf was turned into NaN.
        node: Name of the autograd node, in backward.
        given: For :data:`ARGUMENT`: which tensor it is.
        rows: For what came from outside: which rows are not finite, as in ", in row 3".
        largest_gradient: The largest gradient of its backward pass without the loss scale; None where it is not known.
    """

    op: str
    place: Place
    backward: bool
    dtype: torch.dtype
    value: float | None
    not_finite: int
    elements: int
    scalars: tuple[float, ...] = ()
    denominators: int = 0
    made: list[Made] = field(default_factory=list)
    spread: Place | None = None
    node: str = ""
    given: str = ""
    rows: str = ""
    largest_gradient: float | None = None

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
        return self.given.partition(" ")[0] in ("weight", "bias", "target", "pos_weight")


@dataclass
class Call:
    """An op that ran, and what it was given."""

    func: OpOverload
    args: Args
    kwargs: Kwargs
    #: By id, float32 copies of the half tensors that it writes in place, as they were before.
    before: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def is_collective(self) -> bool:
        """Whether it brings values of other ranks."""
        return self.func.namespace in _COLLECTIVES

    def __post_init__(self) -> None:
        for argument in self.func._schema.arguments:
            value = self.by_name.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES and readable(value):
                self.before[id(value)] = value.float()

    @property
    def name(self) -> str:
        """As in "mm"."""
        return str(self.func.overloadpacket.__name__)

    @property
    def numbers(self) -> list[float]:
        """The numbers among its arguments."""
        given = (*self.args, *self.kwargs.values())
        return [float(one) for one in given if isinstance(one, (int, float)) and not isinstance(one, bool)]

    @functools.cached_property
    def by_name(self) -> dict[str, object]:
        """Its arguments by the names of its schema."""
        names = [argument.name for argument in self.func._schema.arguments]
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    @functools.cached_property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors that it read, as far as they can be looked at."""
        unread = self._unread_statistics()
        return [t for t in tensors_in((self.args, self.kwargs)) if readable(t) and id(t) not in unread]

    def _unread_statistics(self) -> set[int]:
        """The ids of running statistics that a batch norm is given and does not read: one that trains only writes them.

        When a batch is run again, they hold what its first run has written: not what made it overflow.
        """
        if "batch_norm" not in self.name or "no_training" in self.name or "no_update" in self.name:
            return set()
        if not self.by_name.get("training", self.by_name.get("train", True)):
            return set()
        return {id(self.by_name.get(statistic)) for statistic in ("running_mean", "running_var")}

    def describe(self, tensor: torch.Tensor, function: str) -> str:
        """Describe an argument, as in "weight given to cross_entropy (float32 of shape (3,))"."""
        name = next((name for name, value in self.by_name.items() if value is tensor), "")
        shown = name if name in _TELLING else "a tensor"
        return f"{shown} given to {function or self.name} ({dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)})"

    def largest_in_float32(self, out: torch.Tensor) -> float | None:
        """The largest magnitude of the same op in float32, from the same inputs; of its input for a cast.

        Returns:
            That of ``out`` where it is no half tensor; None where the op does not take float32.
        """
        if out.dtype not in HALF_DTYPES:
            return largest(out)
        if self.name in CASTS and self.inputs:
            return largest(self.inputs[-1])
        if id(out) not in self.before and any(tensor is out for tensor in self.inputs):
            return None  # what it held before is gone

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in self.before:
                return self.before[id(tensor)]
            return tensor.float() if tensor.dtype in HALF_DTYPES else tensor

        try:
            args = map_tree(self.args, widen, objects=False)
            kwargs = {k: torch.float32 if v in HALF_DTYPES else v for k, v in self.kwargs.items()}
            result = self.func(*args, **map_tree(kwargs, widen, objects=False))
        except Exception:  # not every op takes float32 in place of half
            return None
        return max((largest(t) for t in tensors_in(result)), default=None)


class Later(NamedTuple):
    """A second birth in one tensor: of ``event`` are those of its values that are lost and were not lost ``before``."""

    event: Event
    before: torch.Tensor


class Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that examines the result of every op. Reads the device at each: not for a run that is well.

    Args:
        places: Knows where ops come from; entered around the probe.

    Attributes:
        events: What was born, in order.
        came_in: Those of them that came into a forward with its input.
        largest_gradient: The largest finite result in half that the engine's ops had.
    """

    def __init__(self, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = places
        self.origins: dict[int, Event] = {}
        self.later: dict[int, Later] = {}
        self.made: dict[int, Made] = {}
        self.events: list[Event] = []
        self.came_in: list[Event] = []
        self.largest_gradient = 0.0
        self._reduced: set[int] = set()  # what other ranks write into, some time after the collective was called
        self._is_paused = False
        self._process = os.getpid()  # the copies that a data loader forks are not looked at

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, ops are a tool's own, and not looked at."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def given_to(self, model: torch.nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Note what ``model`` gets and holds that is not finite, and comes from nowhere that was seen."""
        kind = type(model).__name__
        inputs = [(str(number), tensor) for number, tensor in enumerate(tensors_in((args, kwargs)))]
        for op, tensors in (
            ("input", inputs),
            ("parameter", model.named_parameters()),
            ("buffer", model.named_buffers()),
        ):
            for name, tensor in tensors:
                if is_finite(tensor):
                    continue
                origin = self.origins.get(storage(tensor))
                if origin is None:
                    self._given(tensor, op, name, kind)
                elif op == "input":
                    self.came_in.append(origin)

    def _given(self, tensor: torch.Tensor, op: str, name: str, model: str) -> None:
        master = master_of(tensor)
        event = Event(
            op=op,
            place=Place(name, "", "", None, model),
            backward=False,
            dtype=tensor.dtype,
            value=largest(tensor if master is None else master.value),
            not_finite=count_not_finite(tensor),
            elements=tensor.numel(),
            rows=_rows(tensor),
        )
        self._born(tensor, event)

    def origin(self, tensors: Iterable[torch.Tensor]) -> Event | None:
        """The earliest origin of what is not finite in ``tensors``."""
        bad = [t for t in tensors if not is_finite(t)]
        found = [self.origins[storage(t)] for t in bad if storage(t) in self.origins]
        return min(found, key=self.events.index, default=None)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if self._is_paused or os.getpid() != self._process or _torch.is_capturing():
            return func(*args, **(kwargs or {}))
        call = Call(func, args, kwargs or {})
        result = func(*call.args, **call.kwargs)
        if call.is_collective:
            self._reduced.update(storage(tensor) for tensor in call.inputs)
        for out in tensors_in(result):
            if readable(out):
                self._examine(call, out)
        return result

    def _examine(self, call: Call, out: torch.Tensor) -> None:
        """Note how a result was made, and where what is not finite in it comes from."""
        if "empty" in call.name:  # what is there is not read before it is written
            self.origins.pop(storage(out), None)
            return
        is_written = any(t is out for t in call.inputs)
        is_view = not is_written and any(storage(t) == storage(out) for t in call.inputs)
        sources = [self.made[storage(t)] for t in call.inputs if storage(t) in self.made]
        made = self._made(call, out, sources)
        if not is_view:
            self.made[storage(out)] = made
        node = _torch.current_node()
        if made.largest < float("inf"):
            if node is not None and out.dtype in HALF_DTYPES:
                self.largest_gradient = max(self.largest_gradient, made.largest)
            if not is_view and covers_storage(out):
                self.origins.pop(storage(out), None)
            return
        origin = self._origin_of(call, out if is_written else None)
        if origin is not None and node is not None:
            origin = self._reaching(call, out, origin, made)
        if origin is not None:
            if origin.spread is None and not origin.is_nan and bool(torch.isnan(out).any()):
                origin.spread = made.place
            self.origins[storage(out)] = origin
            return
        is_cast_by_amp = call.name == "_to_copy" and is_called_by_amp(sys._getframe())
        event = Event(
            op=COLLECTIVE if call.is_collective else call.name,
            place=made.place._replace(function="") if is_cast_by_amp else made.place,
            backward=node is not None,
            dtype=out.dtype,
            value=call.largest_in_float32(out),
            not_finite=count_not_finite(out),
            elements=out.numel(),
            scalars=made.scalars,
            denominators=sum(int((t == 0).sum()) for t in call.inputs[-1:] if t is not out),
            made=sources,
            node="" if node is None else node.name(),
        )
        self._born(out, event)

    def _reaching(self, call: Call, out: torch.Tensor, origin: Event, made: Made) -> Event:
        """What has reached ``out``: ``origin``, or a later birth in the same tensor, where a mask has taken the first.

        A ReLU masks the infinite gradients of what it has set to 0; others may have overflowed in a cast on the way.
        """
        key = storage(out)
        self.later.pop(key, None)
        sources = (t for t in call.inputs if t is not out and t.shape == out.shape)
        source = next((t for t in sources if self.origins.get(storage(t)) is origin), None)
        if source is None:
            return origin
        lost = ~torch.isfinite(out)
        later = self.later.get(storage(source))
        if later is not None and later.before.shape == lost.shape:
            if not bool((lost & later.before).any()):
                return later.event
            self.later[key] = later
            return origin
        was_lost = ~torch.isfinite(source)
        is_new = lost & ~was_lost
        if call.name in CASTS and bool(is_new.any()):
            event = Event(
                op=call.name,
                place=made.place,
                backward=True,
                dtype=out.dtype,
                value=largest(source[is_new]),
                not_finite=int(is_new.sum()),
                elements=out.numel(),
            )
            self.events.append(event)
            self.later[key] = Later(event, was_lost)
        return origin

    def _made(self, call: Call, out: torch.Tensor, sources: list[Made]) -> Made:
        scalars = tuple(number for number in call.numbers if number not in (0, 1))
        before = sources[0] if sources and call.name in _CHEAP else None
        return Made(call.name, scalars, self.places.here(), largest(out), before)

    def _born(self, tensor: torch.Tensor, event: Event) -> None:
        """Note ``event`` as the origin of what is not finite in ``tensor``."""
        self.events.append(event)
        self.origins[storage(tensor)] = event

    def _origin_of(self, call: Call, written: torch.Tensor | None) -> Event | None:
        """The origin of what is not finite in the inputs of an op; None where they are finite."""
        if written is not None and storage(written) in self.origins:
            return self.origins[storage(written)]
        read = [tensor for tensor in call.inputs if tensor is not written]
        known = self.origin(read)
        argument = self._unknown_argument(call, read)
        return argument if known is None else known

    def _unknown_argument(self, call: Call, read: list[torch.Tensor]) -> Event | None:
        """Note the first of the tensors ``read`` that is not finite and comes from nowhere that was seen."""
        unseen = [tensor for tensor in read if storage(tensor) not in self.origins]
        unknown = next((tensor for tensor in unseen if not is_finite(tensor)), None)
        if unknown is None:
            return None
        place = self.places.here()
        op = UNSEEN if is_called_by_amp(sys._getframe()) else ARGUMENT
        event = Event(
            op=COLLECTIVE if storage(unknown) in self._reduced else op,
            place=place,
            backward=_torch.current_node() is not None,
            dtype=unknown.dtype,
            value=largest(unknown),
            not_finite=count_not_finite(unknown),
            elements=unknown.numel(),
            given=call.describe(unknown, place.function),
            rows=_rows(unknown),
        )
        self._born(unknown, event)
        return event


def _rows(tensor: torch.Tensor) -> str:
    """Which rows of ``tensor`` are not finite, from 0, as in ", in rows 3, 7 and 2 more"; "" where all are."""
    if tensor.dim() < 2 or len(tensor) < 2:
        return ""
    is_lost = ~torch.isfinite(tensor.detach()).flatten(1).all(1)
    rows = is_lost.nonzero().flatten().tolist()
    if len(rows) == len(tensor):
        return ""
    more = f" and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else ""
    return f", in {'rows' if len(rows) > 1 else 'row'} {', '.join(map(str, rows[:SHOWN_ROWS]))}{more}"
