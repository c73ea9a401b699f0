"""Weights that the last steps made many times larger: a learning rate that is too high, which no precision holds."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from ampcompat.tools.core import Optimizer, ParamGroup, master_of, name_of, optimizer_name
from ampcompat.tools.tensors import storage
from ampcompat.tools.words import counted

#: Steps that are looked back on, and the growth in these that no healthy run has.
LOOKBACK, FAR = 10, 20.0
#: Below it a weight has a usual size, however small it was before. Two layers multiply four numbers: their weights, and
#: what goes into each. Where all are as large, a sum over 16 inputs leaves float16: 16 * 8 ** 4 is 65536.
LARGE = 8.0
#: Where the loss has become so many times larger, or the learning rate has risen, less growth of weights is why.
LOSS_FAR, FAR_WITH_CAUSE = 100.0, 3.0
#: A loss that is not below this share of the first has not fallen.
NOT_FALLEN = 0.9
#: Steps in which a run diverges: in longer ones weights grow for other reasons.
SOON = 500
#: Losses that are means of likelihoods or similarities end above it.
LEAST_LOSS = -10.0
#: A learning rate that has become so many times higher has risen: less growth of weights counts, and the rise is named.
RATE_FAR = 1.05


@dataclass
class Grown:
    """A weight that steps made many times larger."""

    optimizer: int  # the id of that which made them
    weight: int  # the id of the parameter
    storage: int  # of the parameter, or of its half copy where it has one: the model computes with it
    parameter: str  # qualified name, or "" where no live model has it
    before: float  # its largest magnitude some steps ago
    after: float  # and when it was found
    times: float  # how many times larger that is
    rates: list[float]  # the learning rate of each step in between, where that is a number
    is_of_sgd: bool  # its step is as large as the gradient: Adam divides by its size
    steps: int = 0  # that were made in between
    loss: float = 0.0  # the last that was finite, if it fell in these steps
    rise: tuple[float, float] | None = None  # of the loss, if it is far larger for the last batches: from what to what

    @property
    def text(self) -> str:
        """As in "conv2.weight grew from 0.21 to 350 in 3 steps, at lr=50"."""
        name = self.parameter or "a weight"
        rate = f", at lr={max(self.rates):g}" if self.rates else ""
        loss = "" if self.rise is None else f", and the loss from {self.rise[0]:.3g} to {self.rise[1]:.3g}"
        return f"{name} grew from {self.before:.3g} to {self.after:.3g} in {counted(self.steps, 'step')}{rate}{loss}"

    def as_dict(self) -> dict[str, object]:
        """The same for a line of JSON."""
        names = ("parameter", "before", "after", "steps", "rates")
        return {name: getattr(self, name) for name in names}

    @property
    def key(self) -> str:
        """The same for all weights of an optimizer: one outgrows the other."""
        return f"growth of {self.optimizer}"

    @property
    def cause(self) -> str:
        """As in "the growth of conv2.weight, at lr=50"."""
        if self.loss < LEAST_LOSS:
            return "a loss that falls far below 0, with which the weights grow"
        rate = f", at lr={max(self.rates):g}" if self.rates else ""
        if self._has_rate_risen:
            rate = ", at a learning rate that rises"
        return f"the growth of {self.parameter or 'a weight'}{rate}"

    @property
    def hint(self) -> str:
        """What stops it."""
        if self.loss < LEAST_LOSS:
            return (
                f"a loss that has a least value: this one fell to {self.loss:g}, as with targets outside of [0, 1], or"
                " with a wrong sign"
            )
        if self.rates and self.rates[-1] < 0:
            return "a learning rate that is not negative: look at what sets it, such as a scheduler past its end"
        if self._has_rate_risen:
            return (
                f"the learning rate went from {self.rates[0]:g} to {self.rates[-1]:g} in these steps: look at its"
                " scheduler, or cap it"
            )
        than = f" than {max(self.rates):g}, such as {max(self.rates) / 100:g}" if self.rates else ""
        others = "a warmup, or clipped gradients" if self.is_of_sgd else "or a warmup"
        return f"a lower learning rate{than}, {others}: no precision holds weights that grow so"

    @property
    def _has_rate_risen(self) -> bool:
        return _has_risen(self.rates)


class History:
    """The sizes of the weights of one optimizer, before and after each of its last steps, and the losses with these."""

    def __init__(self) -> None:
        self.seen: deque[dict[int, float]] = deque(maxlen=LOOKBACK + 1)  # the largest magnitudes, by the weights' ids
        self.losses: deque[deque[torch.Tensor]] = deque(maxlen=LOOKBACK + 1)  # that were finite, with these weights
        self.rates: deque[list[float | None]] = deque(maxlen=LOOKBACK)  # of each step, by param group
        self.steps = 0  # since it has begun
        self.first: dict[int, float] = {}  # the magnitudes then
        self.first_losses: deque[torch.Tensor] = deque()  # with these weights

    def begin(self, sizes: dict[int, float]) -> None:
        """Forget what was seen: something other than a step has written the weights."""
        self.seen.clear()
        self.losses.clear()
        self.rates.clear()
        self._append(sizes)
        self.steps = 0
        self.first, self.first_losses = sizes, self.losses[-1]

    def add(self, sizes: dict[int, float], optimizer: Optimizer) -> None:
        """Note the weights after a step of ``optimizer``."""
        self._append(sizes)
        self.rates.append([_rate(group) for group in optimizer.param_groups])
        self.steps += 1

    def _append(self, sizes: dict[int, float]) -> None:
        self.seen.append(sizes)
        self.losses.append(deque(maxlen=LOOKBACK))

    def add_loss(self, loss: torch.Tensor) -> None:
        """Note a loss that is finite, computed with the weights as they are. Reads nothing."""
        self.losses[-1].append(loss.detach())

    def growth(self, optimizer: Optimizer, but: Collection[int] = ()) -> Grown | None:
        """The weight of ``optimizer`` that grew most in the last steps; None where none grew far and is large.

        Less growth is enough where the loss of each batch has grown far with it, or the learning rate has risen. A
        weight that began at zero, or near it, is compared with the usual one. Host syncs: one for each loss.

        Args:
            optimizer: the one whose weights these are.
            but: the storages of weights that are not to blame.
        """
        if len(self.seen) < 2:
            return None
        rise = self._rise()
        far, large = (FAR, LARGE) if rise is None else (FAR_WITH_CAUSE, 0.0)
        lately = self._most_grown(optimizer, self.seen[0], far, FAR_WITH_CAUSE, large, lambda one: one not in but)
        if lately is None:
            return None
        return replace(lately, steps=len(self.seen) - 1, loss=self._fallen_loss(), rise=rise)

    def growth_since_first(self, optimizer: Optimizer, of: Collection[int]) -> Grown | None:
        """The weight that has grown most since the first step, in a short run whose loss has not fallen.

        Args:
            optimizer: the one whose weights these are.
            of: the storages of the weights that may be to blame.
        """
        if self.steps > SOON or self._has_loss_fallen():
            return None
        grown = self._most_grown(optimizer, self.first, FAR, FAR, 0.0, lambda one: one in of)
        return None if grown is None else replace(grown, steps=self.steps)

    def is_loss_zero(self) -> bool:
        """Whether the last loss is 0: nothing is left to learn. A host sync."""
        last = [loss for losses in self.losses for loss in losses][-1:]
        return any(_number(loss) == 0 for loss in last)

    def _most_grown(
        self,
        optimizer: Optimizer,
        before: dict[int, float],
        far: float,
        far_at_risen_rate: float,
        large: float,
        may_be_why: Callable[[int], bool],
    ) -> Grown | None:
        """The weight that has grown most since it was as ``before``, if it has grown ``far``, and is ``large``.

        Args:
            optimizer: the one whose weights these are.
            before: their magnitudes, by their ids.
            far: how many times larger it is to be,
            far_at_risen_rate: and where the learning rate of its group has risen.
            large: how large it is to be.
            may_be_why: whether the weight of a storage may be to blame.
        """
        after: dict[int, float] = {}  # the last finite sizes: a weight that became infinite at once has not grown
        for sizes in self.seen:
            after.update({key: size for key, size in sizes.items() if math.isfinite(size)})
        usual = statistics.median([size for size in before.values() if size > 0] or [1.0])
        grown: list[tuple[float, int, torch.Tensor]] = []
        for index, group in enumerate(optimizer.param_groups):
            far_here = far_at_risen_rate if _has_risen(self._rates_of(index)) else far
            for param in group["params"]:
                now = after.get(id(param), 0.0)
                times = now / max(before.get(id(param), math.inf), usual)
                has_grown = times >= far_here and now >= large  # not so for a NaN
                if has_grown and may_be_why(_memory(param)):
                    grown.append((times, index, param))
        if not grown:
            return None
        times, index, param = max(grown, key=lambda one: one[0])
        return Grown(
            optimizer=id(optimizer),
            weight=id(param),
            storage=_memory(param),
            parameter=name_of(param),
            before=before[id(param)],
            after=after[id(param)],
            times=times,
            rates=self._rates_of(index),
            is_of_sgd="SGD" in optimizer_name(optimizer),
        )

    def is_still_large(self, grown: Grown, but: Collection[int]) -> bool:
        """Whether a weight that has ``grown`` earlier is at least half as large now, ``but`` for some storages."""
        return grown.storage not in but and self.seen[-1].get(grown.weight, 0.0) >= grown.after / 2

    def _rates_of(self, group: int) -> list[float]:
        rates = [rates[group] for rates in self.rates if group < len(rates)]
        return [rate for rate in rates if rate is not None]

    def _rise(self) -> tuple[float, float] | None:
        """What the loss was, and what it is for the last batches, if that is far larger."""
        of_weights = [[abs(_number(loss)) for loss in losses] for losses in self.losses if losses]
        now = [loss for losses in of_weights[1:] for loss in losses][-2:]
        if len(now) < 2:  # a single batch may be to blame itself
            return None
        before = statistics.median(of_weights[0])
        return (before, min(now)) if min(now) >= LOSS_FAR * before > 0 else None

    def _has_loss_fallen(self) -> bool:
        """Whether the last losses are below the first, or too few are known."""
        last = [_number(loss) for losses in self.losses for loss in losses][-LOOKBACK:]
        first = [_number(loss) for loss in self.first_losses]
        if not first or len(last) < 2:
            return True
        return not statistics.median(last) >= NOT_FALLEN * statistics.median(first) > 0

    def _fallen_loss(self) -> float:
        """The last loss, if it is below 0, and twice as far as the first; otherwise 0."""
        known = [losses for losses in self.losses if losses]
        if not known:
            return 0.0
        first, last = _number(known[0][0]), _number(known[-1][-1])
        return last if last < 2 * min(first, 0.0) else 0.0


def _has_risen(rates: list[float]) -> bool:
    """Whether a learning rate is far higher than some steps ago, as where a scheduler multiplies it."""
    return bool(rates) and rates[-1] >= RATE_FAR * rates[0] > 0


def _memory(param: torch.Tensor) -> int:
    """The storage of ``param`` that the model computes with."""
    master = master_of(param)
    return storage(param if master is None else master.half)


def _number(loss: torch.Tensor) -> float:
    return float(loss.mean())


def _rate(group: ParamGroup) -> float | None:
    rate = group.get("lr")
    on_device = isinstance(rate, torch.Tensor) and rate.device.type != "cpu"  # not worth a host sync at each step
    return float(rate) if isinstance(rate, (int, float, torch.Tensor)) and not on_device else None
