"""The loss scaler: ``torch.amp.GradScaler`` driven as apex drove its own.

The transition, once per backward pass (one leaving of a ``scale_loss`` block that unscales):

* overflow: ``scale = max(min_loss_scale, scale / 2)``, ``unskipped = 0``;
* clean: ``unskipped += 1``; when it reaches the window, ``scale = min(max_loss_scale, scale * 2)``, ``unskipped = 0``.

The clamps act where the scale moves, so a scale that a user wrote above the maximum comes down at the next growth.
A static scaler counts clean passes and never moves nor skips.
"""

from __future__ import annotations

from typing import Any

import torch

from ampcompat import _torch
from ampcompat.amp.scale_move import ScaleMove, floor_of

WINDOW = 2000


class LossScaler(torch.amp.GradScaler):
    """Scale, its growth and its back-off; kept on the device of the losses and updated there without a host sync.

    Args:
        loss_scale: ``"dynamic"``, or a positive number for a static scale.
        init_scale: First scale of a dynamic scaler, capped by ``max_loss_scale``.
        scale_factor: Growth factor; its reciprocal is the back-off factor.
        scale_window: Clean backward passes before growth.
        min_loss_scale: Floor of back-off; None means 2^-24 (apex let the scale die at zero).
        max_loss_scale: Cap of growth.
        loss_id: Which loss of its session this scaler serves; named in messages.
    """

    warned_no_fused_kernel = False
    warned_unscaling_non_fp32_grad = False
    has_fused_kernel = True

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = WINDOW,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        loss_id: int = 0,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        first = min(max_loss_scale, init_scale) if self.dynamic else float(loss_scale)
        # The device named here only decides whether GradScaler checks for CUDA; the scale itself is made on the
        # device of the first loss.
        super().__init__("cpu", first, scale_factor, 1.0 / scale_factor, scale_window)
        self._min_loss_scale = min_loss_scale
        self._max_loss_scale = max_loss_scale
        self.loss_id = loss_id
        self.blocks = 0  # that it has scaled a loss for
        self._has_overflow = False
        self._found_inf: dict[torch.device, torch.Tensor] = {}
        self._last_found: torch.Tensor | None = None
        self._lent_buffer: torch.Tensor | None = None  # a script's, instead of ours
        self.updates_by_hand = 0
        self._uncounted: torch.Tensor | None = None  # overflow that skipped a step and has not moved the scale yet

    # -- what legacy code reads and writes ---------------------------------------------------------------------------
    def loss_scale(self) -> float:
        """The current scale. Reads the device: one host sync."""
        return self.get_scale()

    def scale_on(self, device: torch.device) -> torch.Tensor:
        """The current scale as a 0-dim float32 tensor on ``device``; no host sync."""
        if self._scale is None:
            return torch.full((), self._init_scale, device=device)
        return self._scale.to(device, non_blocking=True)

    def scale_to_say(self, device: torch.device) -> torch.Tensor:
        """As :meth:`scale_on`, after the back-off that a ``delay_overflow_check`` block has put off."""
        scale = self.scale_on(device)
        if self._uncounted is None:
            return scale
        return (scale * self._backoff_factor).clamp(min=floor_of(self))

    @property
    def _loss_scale(self) -> float:
        return self.get_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        if self._scale is None:
            self._init_scale = float(value)
        else:
            self._scale = torch.full_like(self._scale, float(value))

    @property
    def _unskipped(self) -> int:
        return self._init_growth_tracker if self._growth_tracker is None else int(self._growth_tracker.item())

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        if self._growth_tracker is None:
            self._init_growth_tracker = int(value)
        else:
            self._growth_tracker = torch.full_like(self._growth_tracker, int(value))

    @property
    def is_one(self) -> bool:
        """Whether the scale is 1 and nobody has written it: then blocks need not touch gradients. No host sync."""
        return not self.dynamic and self._scale is None and self._init_scale == 1.0

    @property
    def _scale_seq_len(self) -> int:
        return self._growth_interval

    @_scale_seq_len.setter
    def _scale_seq_len(self, value: int) -> None:
        self._growth_interval = int(value)

    @property
    def _overflow_buf(self) -> torch.Tensor:
        if self._lent_buffer is not None:
            return self._lent_buffer
        device = torch.device("cpu") if self._scale is None else self._scale.device
        found = self._last_found
        return torch.zeros(1, dtype=torch.int, device=device) if found is None else found.reshape(1).int()

    @_overflow_buf.setter
    def _overflow_buf(self, buffer: torch.Tensor) -> None:
        if not isinstance(buffer, torch.Tensor) or buffer.numel() != 1:
            got = list(buffer.shape) if isinstance(buffer, torch.Tensor) else type(buffer).__name__
            raise TypeError(f"_overflow_buf = {got} - must be a tensor of one element - lend torch.zeros(1).int().")
        self._lent_buffer = buffer

    # -- one backward pass -------------------------------------------------------------------------------------------
    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss.float() * scale``, on the device of ``loss``, of any shape; no host sync."""
        scale = self._scale
        if scale is None or scale.device != loss.device:
            return self.scale(loss.float())
        return loss.float() * scale  # what that would do, without its copies of nothing

    def clear_overflow_state(self) -> None:
        """Forget the overflows noted since the last update."""
        self._has_overflow, self._uncounted, self._found_inf = False, None, {}
        if self._lent_buffer is not None:
            self._lent_buffer.zero_()

    def unscale_(self, grads: Any, scale: torch.Tensor | None = None) -> None:
        """Multiply the gradient tensors in place by 1 / scale and note any inf or NaN; no host sync.

        Args:
            grads: List of dense tensors of any device and floating dtype, empty included. An optimizer, as
                ``GradScaler.unscale_`` takes it, works too.
            scale: What they were scaled by (0-dim float32), where that may not be the current scale.
        """
        if hasattr(grads, "param_groups"):
            grads = [p.grad for group in grads.param_groups for p in group["params"] if p.grad is not None]
        if len({grad.device for grad in grads}) == 1 == len({grad.dtype for grad in grads}):
            self._unscale_alike(grads, scale)  # nearly always: thousands of gradients are not sorted then
            return
        for device, dtype in dict.fromkeys([(grad.device, grad.dtype) for grad in grads]):
            self._unscale_alike([g for g in grads if g.device == device and g.dtype == dtype], scale)

    def _unscale_alike(self, grads: list[torch.Tensor], scale: torch.Tensor | None) -> None:
        """:meth:`unscale_` for gradients of one device and dtype."""
        device = grads[0].device
        if grads[0].is_complex():
            grads = [torch.view_as_real(grad) for grad in grads]
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        found = self._found_inf.get(device)
        if found is None:
            found = self._found_inf[device] = torch.zeros((), dtype=torch.float32, device=device)
        _torch.unscale_and_check_(grads, found, self._inverse(device, self._scale if scale is None else scale))

    def _inverse(self, device: torch.device, scale: torch.Tensor | None) -> torch.Tensor:
        known = None if scale is None or device.type != "cpu" else _torch.host_value(scale)
        if scale is not None and known is not None and known > 1e-30:  # else the inverse may not be finite
            # Rounded from a double: the same bits as a float32 division's.
            return scale.new_full((), 1.0 / known)
        scale = scale.to(device=device, non_blocking=True)  # type: ignore[union-attr] # unscale_ has made it
        # Not reciprocal(): at O1 that is an op of the float list and takes the way through its rule.
        return scale.new_ones(()).div_(scale)

    def end_backward_pass(self) -> torch.Tensor | None:
        """Move the scale for the backward pass just unscaled; no host sync.

        Returns:
            A 0-dim float32 tensor, non-zero where there was an overflow; None for a static scaler, which never skips.
        """
        move = ScaleMove(self)
        move.make()
        return move.found

    def update_scale(self) -> bool:
        """The end of a backward pass, by its apex name. Reads the device: one host sync.

        The caller decides about the step: overflows that ``delay_overflow_check`` blocks noted skip none any more. A
        buffer that was lent to ``_overflow_buf`` is looked at instead of what they noted: it may hold the overflows of
        all ranks.

        Returns:
            Whether the step must be skipped.
        """
        lent = self._lent_buffer
        noted = self._uncounted if lent is None else (lent.reshape(()) != 0).float()
        if noted is not None:
            earlier = self._found_inf.get(noted.device)
            self._found_inf[noted.device] = noted if earlier is None else torch.maximum(noted, earlier)
        self._uncounted = None
        self.updates_by_hand += 1
        found = self.end_backward_pass()
        self._has_overflow = found is not None and bool(found.item())
        return self._has_overflow

    # -- checkpoints -------------------------------------------------------------------------------------------------
    def amp_state(self) -> dict[str, float | int]:
        """Scale and clean passes as plain numbers, as apex saved them. Reads the device."""
        return {"loss_scale": self.get_scale(), "unskipped": self._unskipped}
