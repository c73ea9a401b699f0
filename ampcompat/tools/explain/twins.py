"""Twins in float32 of what left the range of half: what it would be, had the ops from there on been float32.

One op in float32 is no cure where the next casts its result to half again. So each op that such a value reaches is
computed in float32 too, beside the run, and those that take or give what half does not hold are noted.
"""

from __future__ import annotations

import torch

from ampcompat import _torch
from ampcompat.tools.core import tensors_in
from ampcompat.tools.explain.call import CAST_OPS, Call
from ampcompat.tools.explain.event import Beyond, Event
from ampcompat.tools.explain.made import PARTS
from ampcompat.tools.explain.places import Place
from ampcompat.tools.tensors import LARGEST, is_finite, largest, readable, storage


class Twins:
    """The twins of tensors, by their storages: a view of a tensor has its part of the twin."""

    def __init__(self) -> None:
        self._of_storages: dict[int, torch.Tensor] = {}  # one element for each of the storage

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The twin of ``tensor``; None where it has none."""
        whole = self._of_storages.get(storage(tensor)) if readable(tensor) else None
        if whole is None or whole.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
            return None
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def forget(self, tensor: torch.Tensor) -> None:
        """Note that what ``tensor`` held before is gone."""
        self._of_storages.pop(storage(tensor), None)

    def overwrite(self, part: torch.Tensor) -> None:
        """Note that ``part`` of a tensor was written, and is finite."""
        twin = self.of(part)
        if twin is not None:
            twin.copy_(part)

    def renew(self, call: Call, out: torch.Tensor, result: object) -> None:
        """Note that ``out`` holds something else, which is finite.

        A quotient of inf is 0, where float32 gives something else: its twin goes on, to where a layer multiplies by it.
        """
        goes_on = call.denominator is not None or call.name in (*CAST_OPS, *PARTS)
        has_twin = any(self.of(tensor) is not None for tensor in call.inputs if tensor is not out)
        wide = call.in_float32(self.of) if goes_on and has_twin else None
        self.forget(out)
        if wide is not None:
            self._keep(result, wide)

    def begin(self, call: Call, result: object) -> float | None:
        """Compute the op that gave what is not finite in float32.

        Finite inputs count as they are, others by their twins.

        Returns:
            The largest magnitude; None where the op does not take float32.
        """
        wide = call.in_float32(lambda tensor: self.of(tensor) if not is_finite(tensor) else None)
        if wide is None:
            return None
        self._keep(result, wide)
        return max(map(largest, tensors_in(wide)), default=None)

    def follow(self, call: Call, result: object, origin: Event, place: Place) -> None:
        """Compute an op that what is not finite has reached in float32, and note it where half does not hold that."""
        is_backward = _torch.current_node() is not None
        origin.may_reach_layer = origin.may_reach_layer or (place.is_of_torch and not is_backward)
        twins = [twin for twin in map(self.of, call.inputs) if twin is not None]
        if not twins:
            return
        given = max(map(largest, twins))
        wide = call.in_float32(self.of)
        if wide is None:
            return
        self._keep(result, wide)
        is_half = any(out.dtype == torch.float16 for out in tensors_in(result))
        gives = max(map(largest, tensors_in(wide)), default=0.0)
        if not is_backward:
            origin.at_end_of_forward = gives
        if is_half and max(given, gives) > LARGEST:
            origin.beyond.append(Beyond(call.name, place, given, gives, is_backward))

    def _keep(self, result: object, wide: object) -> None:
        try:
            for out, twin in zip(tensors_in(result), tensors_in(wide), strict=False):
                if readable(out):
                    self._keep_one(out, twin)
        except RuntimeError:  # no memory is left for them: the run that is observed goes on
            self._of_storages.clear()

    def _keep_one(self, out: torch.Tensor, twin: torch.Tensor) -> None:
        known = self._of_storages.get(storage(out))
        if known is not None and storage(known) == storage(twin):
            return  # a view, or written in place
        memory = torch.empty(0, dtype=out.dtype, device=out.device).set_(out.untyped_storage())
        whole = memory.to(twin.dtype, copy=True)
        whole.as_strided(out.size(), out.stride(), out.storage_offset()).copy_(twin)
        self._of_storages[storage(out)] = whole
