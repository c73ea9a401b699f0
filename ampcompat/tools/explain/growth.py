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
    rates: list[float]  # the learning rates of these
    losses: list[float]  # the losses of these that were finite, the first and the last
    times: float  # how many times larger it is, or than the usual weight was

    def __str__(self) -> str:
        text = f"the largest value of {self.parameter or 'a weight'} went from {self.before:.4g} to {self.after:.4g}"
        text += f" in {counted(self.steps, 'step')}"
        if self.rates:
            last = f" to {self.rates[-1]:g}" if self.rates[-1] != self.rates[0] else ""
            text += f", at lr={self.rates[0]:g}{last}"
        return text + (f"; the loss went from {self.losses[0]:.4g} to {self.losses[-1]:.4g}" if self.losses else "")


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
        self._losses.clear()
        self._sizes.append(sizes)

    def add(self, sizes: dict[int, float], optimizer: Optimizer) -> None:
        """Note the weights after a step of ``optimizer``, if they are finite."""
        if all(map(math.isfinite, sizes.values())):
            self._sizes.append(sizes)
            self._rates.append([_rate(group) for group in optimizer.param_groups])

    def add_loss(self, loss: torch.Tensor) -> None:
        """Note a loss that is finite. Reads nothing."""
        self._losses.append(loss.detach())

    @property
    def losses(self) -> list[float]:
        """The first loss and the last, of the last steps. A host sync each."""
        return [float(loss.float().mean()) for loss in (list(self._losses)[:1] + list(self._losses)[-1:])]

    def growth(self, optimizer: Optimizer, read: Collection[int] | None) -> Growth | None:
        """The weight that has grown most; None where none has grown so far.

        A weight that began at zero, or near it, is compared with the usual one.

        Args:
            optimizer: The one whose weights these are.
            read: The storages of the weights that count; None for all.
        """
        if len(self._sizes) < 2:
            return None
        before, after = self._sizes[0], self._sizes[-1]
        usual = statistics.median([size for size in before.values() if size > 0] or [1.0])
        found: list[tuple[float, int, torch.Tensor]] = []
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                times = after.get(id(param), 0.0) / max(before.get(id(param), math.inf), usual)
                if times >= GROWN and (read is None or _memory(param) in read):
                    found.append((times, index, param))
        if not found:
            return None
        times, index, param = max(found, key=lambda one: one[0])
        rates = [rates[index] for rates in self._rates if index < len(rates) and not math.isnan(rates[index])]
        sizes = abs(before[id(param)]), after[id(param)]  # of zeros it may be -0.0
        return Growth(name_of(param), *sizes, len(self._sizes) - 1, rates, self.losses, times)


def _memory(param: torch.Tensor) -> int:
    """The storage of ``param`` that the model computes with."""
    master = master_of(param)
    return storage(param if master is None else master.half)


def _rate(group: ParamGroup) -> float:
    """The learning rate of ``group``; NaN where it is not on the host: not worth a host sync at each step."""
    rate = group.get("lr")
    on_device = isinstance(rate, torch.Tensor) and rate.device.type != "cpu"
    return float(rate) if isinstance(rate, (int, float, torch.Tensor)) and not on_device else math.nan
