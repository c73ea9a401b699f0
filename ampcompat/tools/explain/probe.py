"""The probe: sees every op, and follows what is not finite from where it was born to where it ends up.

An inf that softmax turns into a zero is not a fault (masks do that on purpose); the one to name is the one that reaches
an output or a gradient. So every non-finite tensor carries its origin, the op that made it from finite inputs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompat import _torch
from ampcompat.tools.core import HALF_DTYPES, Args, Kwargs, master_of, tensors_in
from ampcompat.tools.explain.call import CAST_OPS, DIVISIONS, Call
from ampcompat.tools.explain.event import ARGUMENT, COLLECTIVE, GIVEN, UNSEEN, Event
from ampcompat.tools.explain.made import Made, MadeTensors
from ampcompat.tools.explain.places import Place, Places
from ampcompat.tools.explain.rows import far_rows, lost_rows
from ampcompat.tools.explain.twins import Twins
from ampcompat.tools.frames import is_called_by_amp
from ampcompat.tools.tensors import count_not_finite, covers_storage, is_finite, largest, readable, storage


class Later(NamedTuple):
    """A second birth in one tensor."""

    event: Event
    before: torch.Tensor  # where values were lost already


#: Ops that give inf of 0.
_INFINITE_AT_ZERO = ("log", "log_", "log2", "log10")


class Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that examines the result of every op. Reads the device at each: not for a run that is well.

    Args:
        places: Knows where ops come from; entered around the probe.
    """

    def __init__(self, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = places
        self.events: list[Event] = []  # what was born, in order
        self.came_in: list[Event] = []  # those of them that came into a forward with its input, or a buffer
        self.inputs: list[tuple[str, torch.Tensor]] = []  # of the last forward of each model
        # By storage: where what is not finite in it was born, and what was born there later.
        self.origins: dict[int, Event] = {}
        self.later: dict[int, Later] = {}
        self.made = MadeTensors()
        self.twins = Twins()
        self._hidden: set[int] = set()  # the numbers of events whose inf some op has taken away, as torch.where does
        self._lost_buffers: dict[Event, int] = {}  # the storages of those that came into a forward not finite
        self._outside: dict[int, str] = {}  # in words, by storage: what models are given, and what they hold
        self._weights: set[int] = set()  # storages of those that are parameters
        self._unread: set[int] = set()  # and of those that no op has read yet: these are not why
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
        self.inputs = inputs
        for op, tensors in (
            ("input", inputs),
            ("parameter", model.named_parameters()),
            ("buffer", model.named_buffers()),
        ):
            for name, tensor in tensors:
                self._note_outside(op, name, kind, tensor)
                if is_finite(tensor):
                    continue
                origin = self.origins.get(storage(tensor))
                if origin is None:
                    master = master_of(tensor)
                    value = largest(tensor if master is None else master.value)
                    place = Place(name, "", "", None, kind)
                    is_mask = bool((tensor.amin() == -torch.inf) & (tensor.amax() <= 0))
                    event = self._born(tensor, op, place, value, rows=lost_rows(tensor), holds_mask=is_mask)
                    if op == "buffer":
                        self._lost_buffers[event] = storage(tensor)
                elif op == "input":
                    self.came_in.append(origin)

    def _note_outside(self, what: str, name: str, kind: str, tensor: torch.Tensor) -> None:
        if not readable(tensor):
            return
        key = storage(tensor)
        self._outside[key] = f"{what} {name} of {kind}"
        if what == "parameter" and key not in self._weights:
            self._weights.add(key)
            self._unread.add(key)

    def origin(self, tensors: Iterable[torch.Tensor]) -> Event | None:
        """The earliest origin of what is not finite in ``tensors``."""
        bad = [t for t in tensors if not is_finite(t)]
        found = [self.origins[storage(t)] for t in bad if storage(t) in self.origins]
        first = min(found, key=self.events.index, default=None)
        if first is not None:
            first = self._behind(first)
        if first is not None and first.op not in (*GIVEN, ARGUMENT):
            others = [one for number, one in enumerate(self.events) if one is not first and number not in self._hidden]
            first.alike = [one.place for one in others if _kind(one) == _kind(first)]
        return first

    def writer_of(self, event: Event) -> Event | None:
        """What has written the buffer that ``event`` is, after a forward was given it not finite already."""
        writer = self.origins.get(self._lost_buffers.get(event, 0))
        return None if writer is None or writer.op in GIVEN else writer

    def _behind(self, event: Event) -> Event:
        """The overflow whose inf a division made the 0 that ``event`` takes, as in log(1 / inf); else ``event``."""
        is_of_zero = bool(event.zeros) or (event.op in _INFINITE_AT_ZERO and event.is_undefined and not event.is_nan)
        if not is_of_zero:
            return event
        sources = [made for one in event.made for made in (one, one.largest_input) if made is not None]
        for made in sources:
            behind = None if made.hides is None else self.events[made.hides]
            if behind is not None and behind.out_of_range and made.op.removesuffix("_") in DIVISIONS:
                behind.spread, behind.becomes = made.place._replace(function=made.op), "0"
                return behind
        return event

    def received(self, grads: Iterable[torch.Tensor]) -> None:
        """Note gradients that a backward begins with."""
        for grad in grads:
            self.made.received(grad)

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
                self._examine(call, out, result)
        if result is None:
            self._follow_lists(call)
        return result

    def _follow_lists(self, call: Call) -> None:
        """Follow what is not finite through an op that writes into each tensor of its first list, and returns nothing.

        As ``_foreach_add_`` does, with which amp adds gradients.
        """
        lists = [value for value in call.args if isinstance(value, (list, tuple))]
        for written, *others in zip(*lists, strict=False):
            if not isinstance(written, torch.Tensor) or not readable(written) or is_finite(written):
                continue
            origin = self.origin(other for other in others if isinstance(other, torch.Tensor) and readable(other))
            if origin is not None:
                self.origins.setdefault(storage(written), origin)

    def _examine(self, call: Call, out: torch.Tensor, result: object) -> None:
        """Note how a result was made, and where what is not finite in it comes from."""
        if "empty" in call.name:  # what is there is not read before it is written
            self.origins.pop(storage(out), None)
            self.twins.forget(out)
            return
        is_written = any(t is out for t in call.inputs)
        is_view = not is_written and any(storage(t) == storage(out) for t in call.inputs)
        self._unread.difference_update(map(storage, call.inputs))
        sources = self.made.of(call.inputs)
        given = [self.events.index(origin) for origin in self._origins_in(call)]
        made = self.made.note(call, out, self.places.here(), is_view, min(given, default=None), self._weights)
        if made.largest < float("inf"):
            if made.hides is not None:
                if not is_view:  # which may be of the finite part alone
                    self._hidden.add(made.hides)
                self.events[made.hides].may_reach_layer = True
            if not is_view and covers_storage(out):
                self.origins.pop(storage(out), None)
                self.twins.renew(call, out, result)
            elif is_written:
                self.twins.overwrite(out)
            return
        origin = self._origin_of(call, out if is_written else None)
        beside_mask = None if origin is None or not origin.is_mask else _lost_beside(call, out)
        if origin is None or beside_mask is not None:
            event = self._born_of(call, out, result, made, sources)
            if beside_mask is not None:
                twin = self.twins.of(out)
                event.value = largest((out if twin is None else twin)[beside_mask])
                event.not_finite = int(beside_mask.sum())
            return
        self.twins.follow(call, result, origin, made.place)
        if _torch.current_node() is not None:
            origin = self._reaching(call, out, origin, made)
        if origin.spread is None and not origin.is_nan and bool(torch.isnan(out).any()):
            origin.spread = made.place
            origin.is_divided_by_sum = self.made.is_quotient_of_sum(call, origin.op)
        self.origins[storage(out)] = origin

    def _born_of(self, call: Call, out: torch.Tensor, result: object, made: Made, sources: list[Made]) -> Event:
        """Note that an op gave ``out`` from finite inputs, or from some that a mask has written."""
        node = _torch.current_node()
        last = call.inputs[-1] if call.inputs else out
        denominator = call.denominator
        is_cast_by_amp = call.name == "_to_copy" and is_called_by_amp(sys._getframe())
        return self._born(
            out,
            COLLECTIVE if call.is_collective else call.name,
            made.place._replace(function="") if is_cast_by_amp else made.place,
            self.twins.begin(call, result) if out.dtype in HALF_DTYPES else made.largest,
            scalars=made.scalars,
            zeros=None if denominator is None else int((denominator == 0).sum()),
            denominator=None if denominator is None else next(iter(self.made.of([denominator])), None),
            is_of_whole=last is not out and self.made.is_whole(last if denominator is None else denominator),
            is_of_forward=node is not None and not any(source.is_gradient for source in sources),
            is_by_number_zero="div" in call.name and 0.0 in call.numbers,
            is_of_nothing=any(t.numel() == 0 for t in call.inputs),
            made=sources,
            weights=made.weights,
            comes_from=self._outside.get(storage(call.inputs[0]), "") if call.inputs else "",
            node="" if node is None else node.name(),
            far_rows=far_rows(out, call.inputs, self.inputs) if node is None else "",
        )

    def _born(self, tensor: torch.Tensor, op: str, place: Place, value: float | None, **more: Any) -> Event:
        """Note the birth of what is not finite in ``tensor``; ``more`` are further fields of :class:`Event`."""
        event = Event(
            op=op,
            place=place,
            backward=_torch.current_node() is not None,
            dtype=tensor.dtype,
            value=value,
            not_finite=count_not_finite(tensor),
            elements=tensor.numel(),
            unread=frozenset(self._unread),
            **more,
        )
        self.events.append(event)
        self.origins[storage(tensor)] = event
        return event

    def _reaching(self, call: Call, out: torch.Tensor, origin: Event, made: Made) -> Event:
        """What has reached ``out`` in a backward: ``origin``, or a later birth, where a mask has taken the first.

        A ReLU masks the infinite gradients of what it has set to 0; others may have overflowed in a cast on the way.
        """
        self.later.pop(storage(out), None)
        alike = (t for t in call.inputs if t is not out and t.shape == out.shape)
        source = next((t for t in alike if self.origins.get(storage(t)) is origin), None)
        if source is None:
            return origin
        later = self.later.get(storage(source)) or self._later_in(call, out, source, made)
        if later is None or later.before.shape != out.shape:
            return origin
        is_first_there = bool((later.before & ~torch.isfinite(out)).any())
        if not is_first_there:
            return later.event
        self.later[storage(out)] = later
        return origin

    def _later_in(self, call: Call, out: torch.Tensor, source: torch.Tensor, made: Made) -> Later | None:
        """Note what a cast of ``source``, some of whose values are lost already, has lost besides."""
        was_lost = ~torch.isfinite(source)
        is_new = ~torch.isfinite(out) & ~was_lost
        if call.name not in CAST_OPS or not bool(is_new.any()):
            return None
        event = self._born(out, call.name, made.place, largest(source[is_new]))
        event.not_finite = int(is_new.sum())
        return Later(event, was_lost)

    def _origins_in(self, call: Call) -> list[Event]:
        """The origins of what is not finite in the inputs of ``call``."""
        known = [tensor for tensor in call.inputs if storage(tensor) in self.origins]
        return [self.origins[storage(tensor)] for tensor in known if not is_finite(tensor)]

    def _origin_of(self, call: Call, written: torch.Tensor | None) -> Event | None:
        """The origin of what is not finite in the inputs of an op; None where they are finite."""
        is_replaced = written is not None and call.name == "copy_" and covers_storage(written)
        before = None if written is None or is_replaced else self.origins.get(storage(written))
        if before is not None and not before.is_mask:
            return before
        # What other ranks have written into it since the collective was called came before this op.
        read = [tensor for tensor in call.inputs if tensor is not written or storage(tensor) in self._reduced]
        known = self.origin(_but_masks(read))
        argument = self._unknown_argument(call, read)  # noted in any case: the watch may prefer it
        return known or before or argument

    def _unknown_argument(self, call: Call, read: list[torch.Tensor]) -> Event | None:
        """Note the first of the tensors ``read`` that is not finite and comes from nowhere that was seen."""
        unseen = [tensor for tensor in read if storage(tensor) not in self.origins]
        unknown = next((tensor for tensor in unseen if not is_finite(tensor)), None)
        if unknown is None:
            return None
        place = self.places.here()
        if storage(unknown) in self._reduced:
            op = COLLECTIVE
        else:
            op = UNSEEN if is_called_by_amp(sys._getframe()) else ARGUMENT
        return self._born(
            unknown,
            op,
            place,
            largest(unknown),
            description=call.describe(unknown, place.function),
            argument=call.name_of(unknown),
            rows=lost_rows(unknown),
        )


def _kind(event: Event) -> tuple[object, ...]:
    return event.op, event.backward, event.out_of_range, event.is_undefined


def _lost_beside(call: Call, out: torch.Tensor) -> torch.Tensor | None:
    """Where an op that computes each element by itself has lost what was finite in all that it was given, if it has."""
    is_written = any(tensor is out for tensor in call.inputs)
    if torch.Tag.pointwise not in call.func.tags or is_written:
        return None
    lost = ~torch.isfinite(out)
    for tensor in call.inputs:
        lost = lost & torch.isfinite(tensor)
    return lost if bool(lost.any()) else None


def _but_masks(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those of ``tensors`` that are not finite, without those with -inf alone, masks, where others are left."""
    bad = [tensor for tensor in tensors if not is_finite(tensor)]
    if len(bad) < 2:
        return bad
    return [tensor for tensor in bad if not bool(tensor.amax() < torch.inf)] or bad
