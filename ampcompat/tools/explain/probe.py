"""The probe: sees every op, and follows what is not finite from where it was born to where it ends up.

An inf that softmax turns into a 0 is no fault: masks do that on purpose. The birth to tell is that of what reaches the
loss or a gradient, so each tensor that is not finite carries its origin.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompat import _torch
from ampcompat.tools.core import HALF_DTYPES, Args, Kwargs, master_of, tensors_in
from ampcompat.tools.explain.birth import OP, UNSEEN, Birth
from ampcompat.tools.explain.call import CAST_OPS, Call
from ampcompat.tools.explain.made import MadeTensors
from ampcompat.tools.explain.places import NOWHERE, Place, Places
from ampcompat.tools.explain.tensor_facts import TensorFacts
from ampcompat.tools.frames import is_called_by_amp
from ampcompat.tools.tensors import covers_storage, is_finite, largest, readable, storage

#: Arguments that are not infinite on purpose, as a mask may be.
_NO_MASKS = ("weight", "bias", "target", "pos_weight")


class Later(NamedTuple):
    """A second birth in one tensor, and where values of it were lost already."""

    birth: Birth
    before: torch.Tensor


class Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that looks at the result of every op. Reads the device at each: not for a run that is well.

    Args:
        places: Knows where ops stand; entered around the probe.
    """

    def __init__(self, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = places
        self.births: list[Birth] = []  # in order
        self.made = MadeTensors()
        self._origins: dict[int, Birth] = {}  # by storage
        self._later: dict[int, Later] = {}  # by storage
        self._parameters: set[int] = set()  # storages
        self._read: set[int] = set()  # those that an op has read
        self._lost_buffers: dict[Birth, int] = {}  # storages of buffers that were not finite before a forward
        self._reduced: set[int] = set()  # storages that other ranks write into, some time after the collective
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

    # -- what comes from outside ---------------------------------------------------------------------------------------
    def given_to(self, model: torch.nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Note what ``model`` gets and holds that is not finite, and that no op has made."""
        self._parameters.update(storage(one) for one in model.parameters() if readable(one))
        arguments = (*enumerate(args), *kwargs.items())
        given = [(str(name), tensor) for name, value in arguments for tensor in tensors_in(value)]
        held = {"input": given, "parameter": model.named_parameters(), "buffer": model.named_buffers()}
        for kind, tensors in held.items():
            for name, tensor in tensors:
                if not is_finite(tensor) and storage(tensor) not in self._origins:
                    self._note_given(kind, f"{kind} {name} of {type(model).__name__}", tensor)

    def _note_given(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        is_mask = bool(tensor.detach().amax() < torch.inf)  # it holds -inf alone
        numbers = {"value": -torch.inf} if is_mask else {}
        birth = self._note(Birth(kind, name, NOWHERE, False, TensorFacts.of(kind, tensor), numbers=numbers), tensor)
        master = master_of(tensor)
        if master is not None:
            birth.inputs.append(TensorFacts.of("its master", master.value))
        if kind == "buffer":
            self._lost_buffers[birth] = storage(tensor)

    def _note_unseen(self, call: Call, tensor: torch.Tensor, place: Place) -> Birth:
        """Note an argument that is not finite, and that no op has made that was seen."""
        name = call.name_of(tensor)
        is_seen = storage(tensor) not in self._reduced and not is_called_by_amp(sys._getframe())
        words = f"{name}, given to {place.function or call.name},"
        kind = "tensor" if is_seen else UNSEEN
        return self._note(Birth(kind, words, place, False, TensorFacts.of(name, tensor)), tensor)

    # -- origins -------------------------------------------------------------------------------------------------------
    def origin(self, tensors: Iterable[torch.Tensor]) -> Birth | None:
        """The earliest birth of what is not finite in ``tensors``."""
        bad = [storage(one) for one in tensors if not is_finite(one)]
        found = [self._origins[key] for key in bad if key in self._origins]
        first = min(found, key=self.births.index, default=None)
        return None if first is None else _behind(first)

    def birth_of(self, tensors: Iterable[torch.Tensor]) -> Birth | None:
        """The same; None also where another rank, or something else that was not seen, made it."""
        tensors = list(tensors)
        birth = self.origin(tensors)
        if birth is None or birth.kind == UNSEEN:
            return None
        is_nan = any(bool(torch.isnan(one).any()) for one in tensors)
        if birth.became is not None and birth.became[1] == "NaN" and not is_nan:
            birth.became = None  # what has become NaN there has not come here
        return birth

    def writer_of(self, birth: Birth) -> Birth | None:
        """What has written a buffer that was not finite before a forward, after that forward; else None."""
        writer = self._origins.get(self._lost_buffers.get(birth, 0))
        return None if writer is birth else writer

    def argument(self) -> Birth | None:
        """The first argument of an op that was not finite and is no mask, by its name."""
        of_ops = (one for one in self.births if one.kind == "tensor")
        return next((one for one in of_ops if one.out.name in _NO_MASKS), None)

    # -- ops -----------------------------------------------------------------------------------------------------------
    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if self._is_paused or os.getpid() != self._process or _torch.is_capturing():
            return func(*args, **(kwargs or {}))
        call = Call(func, args, kwargs or {})
        result = func(*call.args, **call.kwargs)
        inputs = set(map(storage, call.inputs))
        if call.is_collective:
            self._reduced |= inputs
        self._read |= inputs & self._parameters
        for index, out in enumerate(tensors_in(result)):
            if readable(out):
                self._look_at(call, out, index)
        if result is None:
            self._follow_lists(call)
        return result

    def _follow_lists(self, call: Call) -> None:
        """Follow an op that writes into each tensor of its first list, as ``_foreach_add_``, by which amp adds."""
        lists = [value for value in call.args if isinstance(value, (list, tuple))]
        for written, *others in zip(*lists, strict=False):
            if not isinstance(written, torch.Tensor) or is_finite(written):
                continue
            origin = self.origin(other for other in others if isinstance(other, torch.Tensor) and readable(other))
            if origin is not None:
                self._origins.setdefault(storage(written), origin)

    def _look_at(self, call: Call, out: torch.Tensor, index: int) -> None:
        """Note how a result was made, and where what is not finite in it comes from."""
        key = storage(out)
        if "empty" in call.name:  # what is there is not read before it is written
            self._origins.pop(key, None)
            return
        place = self.places.here()
        if is_finite(out):
            self.made.note(call, out, index, place, self._hidden_by(call))
            is_view = any(storage(one) == key and one is not out for one in call.inputs)
            if covers_storage(out) and not is_view:
                self._origins.pop(key, None)
            return
        origin = self._origin_of(call, out, place)
        beside_mask = None if origin is None or not origin.is_mask else _lost_beside(call, out)
        if origin is None or beside_mask is not None:
            self._born(call, out, index, place, beside_mask)
        else:
            if _torch.current_node() is not None:
                origin = self._reaching(call, out, origin, place)
            if origin.became is None and _is_new_nan(call, out):
                origin.became = place, "NaN"
            self._origins[key] = origin
        self.made.note(call, out, index, place, None)

    def _hidden_by(self, call: Call) -> Birth | None:
        """The birth of what is not finite in the inputs of an op whose result is finite; None where nothing is."""
        known = [one for one in call.inputs if storage(one) in self._origins]
        bad = [self._origins[storage(one)] for one in known if not is_finite(call.before(one))]
        return min(bad, key=self.births.index, default=None)

    def _origin_of(self, call: Call, out: torch.Tensor, place: Place) -> Birth | None:
        """The origin of what is not finite in the inputs of an op; None where they are finite."""
        is_written = any(one is out for one in call.inputs)
        is_replaced = is_written and call.name == "copy_" and covers_storage(out)
        before = self._origins.get(storage(out)) if is_written and not is_replaced else None
        if before is not None and not before.is_mask:
            return before
        # What other ranks have written into it since the collective was called came before this op.
        read = [one for one in call.inputs if one is not out or storage(one) in self._reduced]
        bad = _but_masks([one for one in read if not is_finite(one)])
        unseen = next((one for one in bad if storage(one) not in self._origins), None)
        argument = None if unseen is None else self._note_unseen(call, unseen, place)
        known = self.origin(one for one in bad if one is not unseen)
        return known or before or argument

    def _born(
        self, call: Call, out: torch.Tensor, index: int, place: Place, where: torch.Tensor | None = None
    ) -> Birth:
        """Note that an op made ``out`` not finite: of finite inputs, or, ``where`` that is given, beside a mask."""
        is_cast_by_amp = call.name == "_to_copy" and is_called_by_amp(sys._getframe())
        backward = _torch.current_node() is not None
        birth = Birth(
            kind=UNSEEN if call.is_collective else OP,
            name=call.name,
            place=place._replace(function="") if is_cast_by_amp else place,
            is_backward=backward,
            out=TensorFacts.of("result", out),
            inputs=[TensorFacts.of(call.name_of(one), call.before(one)) for one in call.inputs],
            numbers=call.numbers,
            gradient=self.made.gradient_in(call),
            read=frozenset(self._read),
        )
        if out.dtype in HALF_DTYPES:
            wide = call.in_float32()
            if index < len(wide):
                birth.float32 = largest(wide[index] if where is None else wide[index][where])
        if not birth.is_held_by_float32:
            birth.zero = self.made.zero_in(call)
        return self._note(birth, out)

    def _note(self, birth: Birth, tensor: torch.Tensor) -> Birth:
        self.births.append(birth)
        self._origins[storage(tensor)] = birth
        return birth

    # -- behind a mask of a backward -----------------------------------------------------------------------------------
    def _reaching(self, call: Call, out: torch.Tensor, origin: Birth, place: Place) -> Birth:
        """What has reached ``out`` in a backward: ``origin``, or a later birth, where a mask has taken the first.

        A ReLU masks the infinite gradients of what it has set to 0; others may have overflowed in a cast on the way.
        """
        self._later.pop(storage(out), None)
        alike = (one for one in call.inputs if one is not out and one.shape == out.shape)
        source = next((one for one in alike if self._origins.get(storage(one)) is origin), None)
        if source is None:
            return origin
        later = self._later.get(storage(source)) or self._later_in(call, out, source, place)
        if later is None or later.before.shape != out.shape:
            return origin
        is_first_there = bool((later.before & ~torch.isfinite(out)).any())
        if not is_first_there:
            return later.birth
        self._later[storage(out)] = later
        return origin

    def _later_in(self, call: Call, out: torch.Tensor, source: torch.Tensor, place: Place) -> Later | None:
        """Note what a cast of ``source``, some of whose values are lost already, has lost besides."""
        was_lost = ~torch.isfinite(source)
        is_new = ~torch.isfinite(out) & ~was_lost
        if call.name not in CAST_OPS or not bool(is_new.any()):
            return None
        return Later(self._born(call, out, 0, place, is_new), was_lost)


def _behind(birth: Birth) -> Birth:
    """The overflow whose inf a division made a 0 of, if ``birth`` comes of that 0, as in log(1 / inf); else itself."""
    zero = birth.zero
    if zero is None or zero.hidden is None or not zero.is_division or not zero.hidden.is_held_by_float32:
        return birth
    zero.hidden.became = zero.hidden.became or (zero.place, "0")
    return zero.hidden


def _is_new_nan(call: Call, out: torch.Tensor) -> bool:
    """Whether ``out`` has a NaN, and no input had."""
    given = [call.before(one) for one in call.inputs]
    return bool(torch.isnan(out).any()) and not any(bool(torch.isnan(one).any()) for one in given)


def _lost_beside(call: Call, out: torch.Tensor) -> torch.Tensor | None:
    """Where an op on each value by itself has lost what was finite in all its inputs; None where nowhere."""
    is_written = any(one is out for one in call.inputs)
    if torch.Tag.pointwise not in call.func.tags or is_written:
        return None
    lost = ~torch.isfinite(out)
    for tensor in call.inputs:
        lost = lost & torch.isfinite(tensor)
    return lost if bool(lost.any()) else None


def _but_masks(bad: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those of ``bad`` that are not of -inf alone, as masks are; all where there are no others."""
    if len(bad) < 2:
        return bad
    return [one for one in bad if not bool(one.amax() < torch.inf)] or bad
