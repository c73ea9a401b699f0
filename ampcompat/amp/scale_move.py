"""The move of a loss scale at the end of a backward pass, which can be taken up again where it was interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ampcompat import _torch

if TYPE_CHECKING:
    from ampcompat.amp.scaler import LossScaler

#: The smallest dynamic scale when ``min_loss_scale`` is None: a scale that reaches zero can never recover.
FLOOR = 2.0**-24


class ScaleMove:
    """What one backward pass does to its scaler. Making it changes nothing, and takes no host sync.

    Attributes:
        found: A 0-dim float32 tensor, non-zero where there was an overflow; None for a static scaler: it never skips.

    Args:
        scaler: The scaler, whose overflow flags are those of the pass.
    """

    def __init__(self, scaler: LossScaler) -> None:
        self.scaler = scaler
        if scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(next(iter(scaler._found_inf), torch.device("cpu")))
        scale, tracker = scaler._scale, scaler._growth_tracker
        if scale is None or tracker is None:
            raise RuntimeError("The scale was not initialised - call scale_loss first.")
        self.scale, self.tracker = scale, tracker
        self.seen = (scale._version, tracker._version)  # the fused update moves the scale's only
        self.found: torch.Tensor | None = None
        if scaler.dynamic:
            noted = one_flag(scaler._found_inf)
            self.found = torch.zeros_like(scale) if noted is None else noted.to(scale.device, non_blocking=True)
            self.known = _torch.host_value(scale)
            self.before = scale.clone() if self.known is None else scale

    def make(self) -> None:
        """Move the scale; again, it does no harm."""
        if self.found is None:
            if not self._made():
                self.tracker.add_(1)
            self.scaler._found_inf = {}
            return
        if not self._made():
            self._update(self.found)
        after: dict[str, Any] = {"_scale": self._clamped(), "_last_found": self.found}
        vars(self.scaler).update({**after, "_uncounted": None, "_found_inf": {}})

    def _made(self) -> bool:
        return (self.scale._version, self.tracker._version) != self.seen

    def _update(self, found: torch.Tensor) -> None:
        scaler, uncounted = self.scaler, self.scaler._uncounted
        if uncounted is not None:
            found = torch.maximum(found, uncounted.to(found.device, non_blocking=True))
        how = (scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval)
        _torch.update_scale_(self.scale, self.tracker, found, *how)

    def _clamped(self) -> torch.Tensor:
        """The scale, clamped where it moved. In host memory the bounds take no op."""
        scaler, scale = self.scaler, self.scale
        cap, floor = scaler._max_loss_scale, FLOOR if scaler._min_loss_scale is None else scaler._min_loss_scale
        if self.known is not None:
            now = _torch.host_value(scale) or 0.0
            if self.known < now > cap:
                scale.fill_(cap)
            elif self.known > now < floor:
                scale.fill_(floor)
            return scale
        clamped = torch.where(scale > self.before, scale.clamp(max=cap), scale)
        return torch.where(scale < self.before, scale.clamp(min=floor), clamped)


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
            vars(self.scaler).update({"_uncounted": self.uncounted, "_found_inf": {}})


class ByHand:
    """Nothing: somebody else updates the scaler."""

    found = None

    def __init__(self, scaler: LossScaler) -> None:
        pass

    def make(self) -> None:
        """Leave the scaler alone."""


def one_flag(found_inf: dict[torch.device, torch.Tensor]) -> torch.Tensor | None:
    """The overflow flags of all devices in one."""
    flags = list(found_inf.values())
    if len(flags) < 2:
        return flags[0] if flags else None
    return torch.stack([f.to(flags[0].device, non_blocking=True) for f in flags]).amax()
