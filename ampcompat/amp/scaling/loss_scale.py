"""A loss scale that moves: it multiplies a loss, and follows the overflows of its gradients.

This is all that a step needs of a scaler; ``scaler.LossScaler`` adds apex's names. apex moved the scale on the host
(``apex/amp/scaler.py: LossScaler.update_scale``).

When a block ends, its backward pass is *counted*: the scale makes its transition (:meth:`MovingScale.adjust`). A block
with ``delay_unscale`` or ``delay_overflow_check``, or one that an exception has left, delays that
(:meth:`MovingScale.delay`): its flag is ``pending`` until the next block counts it, or the script does, by
``LossScaler.update_scale()``. Optimizers note the flag at once, so that the next step is skipped all the same.

What counts passes:

=============================  ==================================================================================
caller                         when
=============================  ==================================================================================
``Block._count_pass``          a block ends: it counts its own pass, and those of earlier ``no_sync`` blocks that were
                               averaged with it
``steps._count_averaged``      a step begins, and the script has averaged gradients by itself
``LossScaler.update_scale``    the script calls it
=============================  ==================================================================================

Scripts also write the scale, and load it: see ``scaler``.
"""

from __future__ import annotations

import torch

from ampcompat import _torch

#: Clean passes before growth.
WINDOW = 2000
#: The smallest dynamic scale when ``min_loss_scale`` is None: a scale that reaches zero can never recover.
FLOOR = 2.0**-24
#: The largest power of two that float32 holds: a scale that reaches inf can never back off.
CEILING = 2.0**127


class MovingScale:
    """A scale, its growth and its back-off; kept on the device of the losses and updated there without a host sync.

    An overflow flag is a 0-dim float32 tensor on a device, not 0 after an overflow.

    Attributes:
        scale: 0-dim float32, made with the first loss; None before. A move changes it in place; an open block scales
            and unscales by a copy.
        clean_passes: 0-dim int32 next to ``scale``: passes since the scale moved, or all passes if it is static. None
            before the first loss.
        written_scale: What the host wrote or read last: the first scale; for a static scale, the authoritative value.
        written_clean_passes: What the host wrote last as ``clean_passes``, or has counted before the first loss.
        is_dynamic: Whether the scale moves. A static scale only counts passes.
        growth_factor: What the scale is multiplied by after enough clean passes.
        backoff_factor: What the scale is multiplied by after an overflow.
        growth_interval: Clean passes before growth.
        smallest: The limit of back-off.
        largest: The limit of growth.
        last_pass: The flag of the last backward pass.
        pending: The flag of passes since the last transition that are to be counted later; None where there are none.
    """

    def __init__(self, growth_factor: float) -> None:
        self.scale: torch.Tensor | None = None
        self.clean_passes: torch.Tensor | None = None
        self.written_scale = 1.0
        self.written_clean_passes = 0
        self.is_dynamic = False
        self.growth_factor = growth_factor
        self.backoff_factor = 1.0 / growth_factor
        self.growth_interval = WINDOW
        self.smallest = FLOOR
        self.largest = CEILING
        self.last_pass: torch.Tensor | None = None
        self.pending: torch.Tensor | None = None

    @property
    def is_one(self) -> bool:
        """Whether the scale is 1 and never moves: then blocks need not touch gradients. No host sync."""
        return not self.is_dynamic and self.written_scale == 1.0

    # -- the loss ------------------------------------------------------------------------------------------------------
    def copy_on(self, device: torch.device) -> torch.Tensor:
        """A copy of the scale on ``device``, which stays as it is when the scale moves. No host sync."""
        scale = self.scale
        if scale is None:
            scale = self._make_on(device)
        if scale.device == device:
            return scale.clone()
        return _torch.moved_to(device, scale)

    def _make_on(self, device: torch.device) -> torch.Tensor:
        """Make the tensors of the scale on ``device``; return the scale."""
        self.scale = torch.full((), self.written_scale, dtype=torch.float32, device=device)
        self.clean_passes = torch.full((), self.written_clean_passes, dtype=torch.int32, device=device)
        return self.scale

    def current_scale(self) -> torch.Tensor:
        """The scale, where it is; on the CPU before the first loss. No host sync."""
        if self.scale is None:
            return torch.full((), self.written_scale, dtype=torch.float32, device="cpu")
        return self.scale

    # -- the transition ------------------------------------------------------------------------------------------------
    def adjust(self, found_inf: torch.Tensor | None) -> torch.Tensor | None:
        """Make the transition for a backward pass: back off, grow, or only count. No host sync.

        Args:
            found_inf: The flag of the pass; None where no gradient was unscaled.

        Returns:
            The flag for the step, which must be skipped if it is set; None for a static scale, which never skips.
        """
        pending = self.pending
        self.pending = None
        if not self.is_dynamic:
            self.last_pass = found_inf
            self.count_static_pass()
            return None
        flag = self.note_pass(found_inf)
        self._move(flag if pending is None else torch.maximum(flag, pending))
        return flag

    def delay(self, found_inf: torch.Tensor | None) -> torch.Tensor | None:
        """Leave a pass to the next transition; return the flag for the step, as :meth:`adjust` does. No host sync."""
        flag = self.note_pass(found_inf)
        self.pending = flag if self.pending is None else torch.maximum(self.pending, flag)
        if not self.is_dynamic:
            return None
        return flag

    def _move(self, found_inf: torch.Tensor) -> None:
        """Back off where ``found_inf`` is set, else count a clean pass, and grow after enough of them. No host sync.

        ``scale`` and ``clean_passes``, which :meth:`note_pass` has made, change in place.
        """
        scale: torch.Tensor = self.scale  # type: ignore[assignment]
        clean_passes: torch.Tensor = self.clean_passes  # type: ignore[assignment]
        # A scale that starts within the limits stays there, since each move is clamped. Setting a limit updates
        # ``written_scale``.
        is_within_limits = self.smallest <= self.written_scale <= self.largest
        before = scale if is_within_limits else scale.clone()
        _torch.update_scale_(
            scale, clean_passes, found_inf, self.growth_factor, self.backoff_factor, self.growth_interval
        )
        if is_within_limits:
            scale.clamp_(self.smallest, self.largest)
            return
        # A scale that a script wrote past a limit stays there until it moves.
        moved = torch.where(scale > before, scale.clamp(max=self.largest), scale)
        scale.copy_(torch.where(moved < before, moved.clamp(min=self.smallest), moved))

    def note_pass(self, found_inf: torch.Tensor | None) -> torch.Tensor:
        """Keep ``found_inf`` as the flag of the last pass, next to the scale; return it."""
        scale = self.scale
        if scale is None:
            scale = self._make_on(torch.device("cpu") if found_inf is None else found_inf.device)
        if found_inf is None:
            flag = scale.new_full((), 0.0)
        elif found_inf.device == scale.device:
            flag = found_inf
        else:
            flag = _torch.moved_to(scale.device, found_inf)
        self.last_pass = flag
        return flag

    def count_static_pass(self) -> None:
        """Count a pass that leaves the scale alone, on the device if the scale is there."""
        if self.clean_passes is None:
            self.written_clean_passes += 1
        else:
            self.clean_passes.add_(1)

    def scale_after_back_off(self) -> torch.Tensor:
        """The scale to print for a skipped step, a delayed back-off included. No host sync."""
        scale = self.current_scale()
        if not self.is_dynamic or self.pending is None:
            return scale
        backed_off = (scale * self.backoff_factor).clamp(min=self.smallest)
        return torch.where(self.pending != 0, backed_off, scale)
