"""Noticing an average of weights that is kept in half, where it cannot move.

``ema = copy.deepcopy(model)`` and then ``e.mul_(.9999).add_(p, alpha=.0001)`` over ``parameters()`` rounds to half at
every update at O2 and O3: steps below half a unit in the last place vanish. Nothing fails, so it must be said. Each
half model carries a watch on its largest weight; a deepcopy's watch also knows the original's. A copy whose weight is
written again and again by others than amp and yet stays far behind the original is such an average; a teacher that is
frozen, or copied whole from time to time, is not.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch

from ampcompat._log import warn_once
from ampcompat.amp.master_index import master_of_half
from ampcompat.amp.properties import HALF_DTYPES

#: Writes before the first look, elements looked at, and how far a copy that follows its original has come at least.
WRITES, SAMPLE, FOLLOWS = 8, 256, 0.75


class HalfAverageWatch:
    """Watches one half parameter for being the average of another.

    Args:
        param: The parameter.
        original: What it was deep-copied from.
    """

    def __init__(self, param: torch.Tensor, original: torch.Tensor | None = None) -> None:
        self.param = param
        self.original = None if original is None else weakref.ref(original)
        self.birth = None if original is None else _sample(param)
        self.writes, self.version, self.next_look = 0, param._version, WRITES

    def __deepcopy__(self, memo: dict[int, Any]) -> HalfAverageWatch:
        return HalfAverageWatch(copy.deepcopy(self.param, memo), self.param)

    def __reduce__(self) -> Any:
        return HalfAverageWatch, (self.param,)

    def forgive(self) -> None:
        """What was written so far was no average (``load_state_dict``)."""
        self.writes, self.version, self.next_look = 0, self.param._version, WRITES
        if self.birth is not None:
            self.original = None

    def look(self) -> None:
        """Count writes; once there are enough, compare. Host sync: only when it compares, ever more rarely."""
        original = None if self.original is None else self.original()
        if original is None or original.shape != self.param.shape or self.birth is None:
            return
        master = master_of_half(self.param)
        if master is None:
            self.writes += self.param._version - self.version
        elif master.value._version == master.seen[1]:
            self.writes += self.param._version - master.seen[0]
        self.version = self.param._version
        if self.writes < self.next_look:
            return
        self.next_look *= 2
        birth = self.birth.to(self.param.device)
        moved = (_sample(self.param) - birth).abs().sum()
        gone = (_sample(original).to(birth.device) - birth).abs().sum()
        if moved < FOLLOWS * gone:
            warn_once(
                "half average",
                f"A deepcopy of a model whose weights amp.initialize cast to {self.param.dtype} is being updated over"
                " its parameters(), as a moving average is - in half small updates round to nothing (a decay of 0.9999"
                " cannot move) - average over state_dict() values instead: at O2 these are the float32 masters.",
            )


def watch(model: torch.nn.Module) -> None:
    """Put a watch on the largest half weight of ``model``: on the model and on the module that holds the weight."""
    half = [
        (param.numel(), module, param)
        for module in model.modules()
        for param in module._parameters.values()
        if param is not None and param.dtype in HALF_DTYPES
    ]
    if not half:
        model.__dict__.pop("_amp_watch", None)
        return
    _, module, param = max(half, key=lambda entry: entry[0])
    placed = HalfAverageWatch(param)
    for holder in (model, module):
        object.__setattr__(holder, "_amp_watch", placed)


def _sample(param: torch.Tensor) -> torch.Tensor:
    flat = param.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].float()
