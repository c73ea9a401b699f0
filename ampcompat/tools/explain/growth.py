"""How far the weights of an optimizer, and the loss, have grown in the last steps, as numbers."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import torch

from ampcompat.tools.core import Optimizer, ParamGroup, master_of, name_of
from ampcompat.tools.tensors import storage
from ampcompat.tools.words import counted

#: Growth is told of a weight that is so many times as large as at most so many steps before.
GROWN, LOOKBACK = 4.0, 20


@dataclass(frozen=True)
class Growth:
    """A weight that has grown, and the loss at the same steps."""

    parameter: str  # qualified name; "" where no live model has it
    before: float  # its largest magnitude some steps ago
    after: float  # and after the last step
    steps: int  # that were made in between
    rates: tuple[float, ...]  # the learning rates of these, the first and the last
    losses: tuple[float, ...]  # the losses of these that were finite, the first and the last
    times: float  # how many times larger it is, or than the usual weight was

    def __str__(self) -> str:
        text = f"{self.parameter or 'a weight'} went from {self.before:.4g} to {self.after:.4g}"
        text += f" in {counted(self.steps, 'step')}"
        if self.rates:
            text += f", at lr={_from_to(self.rates)}"
        if self.losses:
            text += f"; the loss went from {self.losses[0]:.4g} to {self.losses[-1]:.4g}"
        return text


class History:
    """The sizes of the weights of one optimizer after each of its last steps, and the losses."""

    def __init__(self) -> None:
        self._sizes: deque[dict[int, float]] = deque(maxlen=LOOKBACK + 1)  # the largest magnitudes, by the weights' ids
        self._rates: deque[list[float]] = deque(maxlen=LOOKBACK)  # of each step, by param group
        self._losses: deque[torch.Tensor] = deque(maxlen=LOOKBACK)

    def begin(self, sizes: dict[int, float]) -> None:
        """Forget what was seen: something other than a step has written the weights."""
        self._sizes.clear()
        self._rates.clear()
        self._sizes.append(sizes)

    def add(self, sizes: dict[int, float], optimizer: Optimizer) -> None:
        """Note the weights after a step of ``optimizer``."""
        if all(map(math.isfinite, sizes.values())):
            self._sizes.append(sizes)
            self._rates.append([_rate(group) for group in optimizer.param_groups])

    def add_loss(self, loss: torch.Tensor) -> None:
        """Note a loss that is finite. Reads nothing."""
        self._losses.append(loss.detach())

    @property
    def last_loss(self) -> float:
        """The last loss that was finite; NaN where none was. A host sync."""
        return _number(self._losses[-1]) if self._losses else math.nan

    def growth(self, optimizer: Optimizer, read: Collection[int] | None) -> Growth | None:
        """The weight that has grown most; None where none has grown so far.

        A weight that began at zero, or near it, is compared with the usual one. A host sync for two losses.

        Args:
            optimizer: The one whose weights these are.
            read: The storages of the weights that count; None for all.
        """
        if len(self._sizes) < 2:
            return None
        before, after = self._sizes[0], self._sizes[-1]
        usual = statistics.median([size for size in before.values() if size > 0] or [1.0])
        found: list[Growth] = []
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                size = after.get(id(param), 0.0)
                times = size / max(before.get(id(param), math.inf), usual)
                if times >= GROWN and (read is None or _memory(param) in read):
                    found.append(self._growth_of(param, index, abs(before[id(param)]), size, times))
        return max(found, key=lambda one: one.times, default=None)

    def _growth_of(self, param: torch.Tensor, group: int, before: float, after: float, times: float) -> Growth:
        rates = [rates[group] for rates in self._rates if group < len(rates) and not math.isnan(rates[group])]
        ends = [self._losses[0], self._losses[-1]] if self._losses else []
        return Growth(
            parameter=name_of(param),
            before=before,
            after=after,
            steps=len(self._sizes) - 1,
            rates=tuple(rates[:1] + rates[-1:]),
            losses=tuple(map(_number, ends)),
            times=times,
        )


def _from_to(numbers: tuple[float, ...]) -> str:
    first, last = numbers[0], numbers[-1]
    return f"{first:g}" if first == last else f"{first:g} to {last:g}"


def _memory(param: torch.Tensor) -> int:
    """The storage of ``param`` that the model computes with."""
    master = master_of(param)
    return storage(param if master is None else master.half)


def _number(loss: torch.Tensor) -> float:
    return float(loss.float().mean())


def _rate(group: ParamGroup) -> float:
    """The learning rate of ``group``; NaN where it is not on the host: not worth a host sync at each step."""
    rate = group.get("lr")
    on_device = isinstance(rate, torch.Tensor) and rate.device.type != "cpu"
    return float(rate) if isinstance(rate, (int, float, torch.Tensor)) and not on_device else math.nan
