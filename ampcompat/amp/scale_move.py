"""The move of a loss scale at the end of a backward pass, which can be taken up again where it was interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ampcompat import _torch

if TYPE_CHECKING:
    from ampcompat.amp.scaler import LossScaler

#: The smallest dynamic scale when ``min_loss_scale`` is None: a scale that reaches zero can never recover.
FLOOR = 2.0**-24


def floor_of(scaler: LossScaler) -> float:
    """The smallest scale that back-off leads to."""
    return FLOOR if scaler._min_loss_scale is None else scaler._min_loss_scale


class Flag(NamedTuple):
    """The overflow of a backward pass, as a step looks at it.

    Attributes:
        scaler: The scaler that counts it.
        found: A 0-dim float32 tensor, non-zero where there was an overflow.
        update: The update by hand that decides about it, by number; None where no script is to decide.
    """

    scaler: LossScaler
    found: torch.Tensor
    update: int | None = None

    @property
    def skips(self) -> bool:
        """Whether it is for the next step to look at: nobody has decided about it since."""
        return self.update is None or self.update == self.scaler.updates_by_hand


class ScaleMove:
    """What one backward pass does to its scaler. Making it changes nothing, and takes no host sync.

    The scale gets a new tensor: who holds the old one, to unscale by what it scaled by, goes on holding its value. In a
    capture it moves in place: each replay begins with the tensor that the capture began with.

    Attributes:
        found: A 0-dim float32 tensor, non-zero where there was an overflow; None for a static scaler: it never skips.

    Args:
        scaler: The scaler, whose overflow flags are those of the pass.
        flag: The pass's overflow flag, where another scaler unscaled it.
    """

    def __init__(self, scaler: LossScaler, flag: torch.Tensor | None = None) -> None:
        self.scaler = scaler
        noted = one_flag(scaler._found_inf) if flag is None else flag
        if scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(torch.device("cpu") if noted is None else noted.device)
        scale, tracker = scaler._scale, scaler._growth_tracker
        if scale is None or tracker is None:
            raise RuntimeError("The scale was not initialised - call scale_loss first.")
        self.before, self.tracker, self.counted = scale, tracker, tracker._version
        self.found: torch.Tensor | None = None
        self.scale: torch.Tensor | None = None
        self.clamped: torch.Tensor | None = None
        if scaler.dynamic:
            self.found = torch.zeros_like(scale) if noted is None else noted.to(scale.device, non_blocking=True)

    def make(self) -> None:
        """Move the scale; again, it does no harm."""
        if self.found is None:
            if self.tracker._version == self.counted:
                self.tracker.add_(1)
            self.scaler._found_inf = {}
            return
        if self.scale is None:
            self.scale = self.before.clone()
        if self.scale._version == 0:
            self._update(self.scale, self.found)
        if self.clamped is None:
            self.clamped = self._clamped(self.scale)
        after = self.clamped
        if _torch.host_value(self.before) is None and _torch.is_capturing():
            after = self.before.copy_(after)
        fill(self.scaler._lent_buffer, self.found)
        vars(self.scaler).update(_scale=after, _last_found=self.found, _uncounted=None, _found_inf={})

    def _update(self, scale: torch.Tensor, found: torch.Tensor) -> None:
        scaler, uncounted = self.scaler, self.scaler._uncounted
        if uncounted is not None:
            found = torch.maximum(found, uncounted.to(found.device, non_blocking=True))
        how = (scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval)
        _torch.update_scale_(scale, self.tracker, found, *how)

    def _clamped(self, scale: torch.Tensor) -> torch.Tensor:
        """The scale, clamped where it moved. In host memory the bounds take no op."""
        cap, floor, before = self.scaler._max_loss_scale, floor_of(self.scaler), self.before
        known = _torch.host_value(before)
        if known is not None:
            if floor <= known * self.scaler._backoff_factor and known * self.scaler._growth_factor <= cap:
                return scale  # the rule: wherever it moved, it is between them
            now = _torch.host_value(scale) or 0.0
            if known < now > cap:
                scale.fill_(cap)
            elif known > now < floor:
                scale.fill_(floor)
            return scale
        clamped = torch.where(scale > before, scale.clamp(max=cap), scale)
        return torch.where(scale < before, scale.clamp(min=floor), clamped)


class PutOff:
    """As :class:`ScaleMove`, but the scale stays: the next backward pass counts this overflow too."""

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        self.found = one_flag(scaler._found_inf) if scaler.dynamic else None
        earlier, self.uncounted = scaler._uncounted, self.found
        if self.found is not None and earlier is not None:
            self.uncounted = torch.maximum(self.found, earlier.to(self.found.device))

    def make(self) -> None:
        """Note the overflow; again, it does no harm."""
        if self.found is not None:
            fill(self.scaler._lent_buffer, self.found)
            vars(self.scaler).update({"_uncounted": self.uncounted, "_found_inf": {}})


class LeftToScript(PutOff):
    """As :class:`PutOff`; the script's own ``update_scale``, if it comes, decides whether the step is skipped."""


class ByHand:
    """Nothing: somebody else updates the scaler."""

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler, self.found = scaler, None

    def make(self) -> None:
        """Leave the scaler alone."""


def fill(lent: torch.Tensor | None, found: torch.Tensor) -> None:
    """Write an overflow flag into the buffer that a script has lent to a scaler; no host sync."""
    if lent is not None:
        lent.copy_(found, non_blocking=True)


def one_flag(found_inf: dict[torch.device, torch.Tensor]) -> torch.Tensor | None:
    """The overflow flags of all devices in one."""
    flags = list(found_inf.values())
    if len(flags) < 2:
        return flags[0] if flags else None
    return torch.stack([f.to(flags[0].device, non_blocking=True) for f in flags]).amax()
