"""How tensors came about, as far as it tells where a 0 in them, or the loss scale, comes from."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ampcompat import _torch
from ampcompat.tools.core import HALF_DTYPES
from ampcompat.tools.explain.birth import Birth, Made, Underflow
from ampcompat.tools.explain.call import CAST_OPS, Call
from ampcompat.tools.explain.places import NOWHERE, Place
from ampcompat.tools.tensors import largest, readable, storage

#: Ops beside those on each value by itself that may give 0 in half where float32 gives something else.
_MAY_UNDERFLOW = (*CAST_OPS, "_softmax", "sum", "mean")


class MadeTensors:
    """How the tensors that ops have given came about, by their storages."""

    def __init__(self) -> None:
        self._of_storages: dict[int, Made] = {}

    def of(self, tensors: Iterable[torch.Tensor]) -> list[Made]:
        """How those of ``tensors`` came about of which it is known."""
        keys = map(storage, tensors)
        return [self._of_storages[key] for key in keys if key in self._of_storages]

    def note_scaled(self, grad: torch.Tensor) -> None:
        """Note a gradient that has the loss scale in it, and from which others come."""
        self._of_storages[storage(grad)] = Made("gradient", NOWHERE, is_scaled=True, largest=largest(grad))

    def note(self, call: Call, out: torch.Tensor, index: int, place: Place, hidden: Birth | None) -> None:
        """Note how ``out``, the result of ``call`` numbered ``index``, came about. Reads the device."""
        key = storage(out)
        is_view = any(storage(one) == key and one is not out for one in call.inputs)
        if is_view and key in self._of_storages:
            return
        zeros = out == 0
        has_zeros = bool(zeros.any())
        sources = self.of(call.inputs)
        is_scaled = _torch.current_node() is not None and any(source.is_scaled for source in sources)
        self._of_storages[key] = Made(
            op=call.name,
            place=place,
            has_zeros=has_zeros,
            is_scaled=is_scaled,
            largest=largest(out) if is_scaled else 0.0,
            underflow=_underflow(call, out, index, place, zeros) if has_zeros else None,
            hidden=hidden,
            sources=sources,
        )

    def gradient_in(self, call: Call) -> Made | None:
        """How the largest input of ``call`` was made that has the loss scale in it; None where none has."""
        scaled = [made for made in self.of(call.inputs) if made.is_scaled]
        return max(scaled, key=lambda made: made.largest, default=None)

    def zero_in(self, call: Call) -> Made | None:
        """The nearest op before ``call`` that made a 0 of something else, in a chain of tensors with zeros."""
        with_zeros = [one for one in call.inputs if bool((call.before(one) == 0).any())]
        waiting = self.of(with_zeros)
        seen = set[int]()
        while waiting:
            made = waiting.pop(0)
            if id(made) in seen or not made.has_zeros:
                continue
            seen.add(id(made))
            if made.underflow is not None or made.hidden is not None:
                return made
            waiting.extend(made.sources)
        return None


def _underflow(call: Call, out: torch.Tensor, index: int, place: Place, zeros: torch.Tensor) -> Underflow | None:
    """The zeros of ``out`` that float32 does not give; None where it gives the same."""
    may_underflow = call.name in _MAY_UNDERFLOW or torch.Tag.pointwise in call.func.tags
    if out.dtype not in HALF_DTYPES or not may_underflow:
        return None
    wide = call.in_float32()
    if index >= len(wide) or not readable(wide[index]):
        return None
    lost = wide[index][zeros]
    count = int((lost != 0).sum())
    return Underflow(place, call.name, count, largest(lost)) if count else None
