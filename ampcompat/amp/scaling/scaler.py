"""``LossScaler``: a moving scale by apex's names (``apex/amp/scaler.py: LossScaler``), which scripts read and write.

``amp.scale_loss`` needs :class:`ampcompat.amp.scaling.loss_scale.MovingScale` alone. ``unscale``,
``unscale_with_stashed`` and ``update_scale`` are for scripts that unscale by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ampcompat import _torch
from ampcompat.amp.options import is_scale, number, whole_number
from ampcompat.amp.scaling.found_inf import FoundInf
from ampcompat.amp.scaling.loss_scale import CEILING, FLOOR, WINDOW, MovingScale


class LossScaler(MovingScale):
    """A loss scale by apex's names.

    Args:
        loss_scale: ``"dynamic"``, or a positive number for a static scale.
        init_scale: First scale of a dynamic scaler, capped by ``max_loss_scale``.
        scale_factor: Growth factor; its reciprocal is the back-off factor.
        scale_window: Clean backward passes before growth.
        min_loss_scale: Floor of back-off; None means 2^-24 (apex let the scale die at zero).
        max_loss_scale: Cap of growth.
        loss_id: Which loss of its session this scaler serves; named in messages.

    Attributes:
        found_inf: Of gradients that a script has unscaled by hand since the last transition.
        taken_by_script: How often a script has counted passes of delayed blocks: flags of these passes, which
            optimizers have noted before, skip no step.
    """

    # Flags of apex's scaler, which scripts read and set: unscaling is fused on every device, and nothing is warned of.
    has_fused_kernel = True
    warned_no_fused_kernel = False
    warned_unscaling_non_fp32_grad = False

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
        super().__init__(growth_factor=scale_factor)
        self.loss_id = loss_id
        self.is_dynamic = isinstance(loss_scale, str) and loss_scale == "dynamic"
        self._scale_seq_len = scale_window
        self._min_loss_scale = min_loss_scale
        self._max_loss_scale = max_loss_scale
        self._loss_scale = init_scale if self.is_dynamic else loss_scale
        if self.is_dynamic and self.written_scale > self.largest:
            self.written_scale = self.largest
        self._lent_buffer: torch.Tensor | None = None  # what a script has put in the place of ``_overflow_buf``
        self.found_inf = FoundInf()
        self.taken_by_script = 0

    # -- what legacy code reads and writes -----------------------------------------------------------------------------
    def loss_scale(self) -> float:
        """The current scale. Reads the device: one host sync."""
        return self.written_scale if self.scale is None else float(self.scale.item())

    get_scale = loss_scale  # GradScaler's name

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: Any) -> None:
        scale = number(value)
        if not is_scale(scale):
            raise ValueError(
                f"LossScaler._loss_scale = {value!r} - a scale is a positive finite number that float32 holds -"
                " write a power of two, 2.0**16 for example."
            )
        self.written_scale = scale
        if self.scale is not None:
            self.scale = torch.full_like(self.scale, scale)

    @property
    def _unskipped(self) -> int:
        """Clean passes since the scale moved. Reads the device: one host sync."""
        return self.written_clean_passes if self.clean_passes is None else int(self.clean_passes.item())

    @_unskipped.setter
    def _unskipped(self, value: Any) -> None:
        count = whole_number("LossScaler._unskipped", value)
        self.written_clean_passes = count
        if self.clean_passes is not None:
            self.clean_passes = torch.full_like(self.clean_passes, count)

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return self.is_dynamic

    @dynamic.setter
    def dynamic(self, value: Any) -> None:
        self.is_dynamic = bool(value)
        if not self.is_dynamic and self.scale is not None:
            self.written_scale = self.loss_scale()  # it stays where it has come to

    @property
    def _scale_seq_len(self) -> int:
        """Clean passes before growth."""
        return self.growth_interval

    @_scale_seq_len.setter
    def _scale_seq_len(self, value: Any) -> None:
        self.growth_interval = whole_number("LossScaler._scale_seq_len", value)

    @property
    def _min_loss_scale(self) -> float:
        """The limit of back-off. To write it reads the device."""
        return self.smallest

    @_min_loss_scale.setter
    def _min_loss_scale(self, value: Any) -> None:
        limit = 0.0 if value is None else number(value)
        if not limit < CEILING:
            _refuse_limit("_min_loss_scale", value)
        self.written_scale = self.loss_scale()  # it may be past the new limit
        self.smallest = limit if limit > 0 else FLOOR  # 0 meant no limit, as None did

    @property
    def _max_loss_scale(self) -> float:
        """The limit of growth. To write it reads the device."""
        return self.largest

    @_max_loss_scale.setter
    def _max_loss_scale(self, value: Any) -> None:
        limit = number(value)
        if not limit > 0:
            _refuse_limit("_max_loss_scale", value)
        self.written_scale = self.loss_scale()  # it may be past the new limit
        self.largest = min(limit, CEILING)

    @property
    def _has_overflow(self) -> bool:
        """Whether the last backward pass overflowed; a static scaler never says so. Reads the device: one host sync."""
        if self.last_pass is None or not self.is_dynamic:
            return False
        return bool(self.last_pass.item())

    @_has_overflow.setter
    def _has_overflow(self, value: object) -> None:
        raise AttributeError(
            f"LossScaler._has_overflow = {value!r} - it tells what the last backward pass found, and cannot be written"
            " - to decide yourself, lend a tensor: scaler._overflow_buf = torch.tensor([1]), then call"
            " scaler.update_scale()."
        )

    @property
    def _overflow_buf(self) -> torch.Tensor:
        if self._lent_buffer is not None:
            return self._lent_buffer
        if self.last_pass is not None:
            return self.last_pass.reshape(1).int()
        device = torch.device("cpu") if self.scale is None else self.scale.device
        return torch.zeros(1, dtype=torch.int, device=device)

    @_overflow_buf.setter
    def _overflow_buf(self, buffer: torch.Tensor) -> None:
        if not isinstance(buffer, torch.Tensor) or buffer.numel() != 1:
            got = list(buffer.shape) if isinstance(buffer, torch.Tensor) else type(buffer).__name__
            raise TypeError(f"_overflow_buf = {got} - must be a tensor of one element - lend torch.zeros(1).int().")
        self._lent_buffer = buffer

    def clear_overflow_state(self) -> None:
        """Forget all overflows: of the last pass, and those noted since the last transition."""
        self.last_pass = None
        if self._lent_buffer is not None:
            self._lent_buffer.zero_()
        self.found_inf = FoundInf()
        self._take_pending()

    def _take_pending(self) -> torch.Tensor | None:
        """Take the flag of delayed passes: the script decides about their step."""
        pending = self.pending
        if pending is not None:
            self.pending = None
            self.taken_by_script += 1
        return pending

    def note_pass(self, found_inf: torch.Tensor | None) -> torch.Tensor:
        """As a moving scale does; a dynamic one shows the flag in the buffer that a script has lent, too."""
        flag = super().note_pass(found_inf)
        if self.is_dynamic and self._lent_buffer is not None:
            self._lent_buffer.copy_(_torch.moved_to(self._lent_buffer.device, flag))
        return flag

    # -- as torch.amp.GradScaler saves it ------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return what ``torch.amp.GradScaler.load_state_dict`` takes. Reads the device."""
        return {
            "scale": self._loss_scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self._scale_seq_len,
            "_growth_tracker": self._unskipped,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict`, here or of GradScaler, returned; what is scaled already keeps its scale."""
        factors = float(state_dict["growth_factor"]), float(state_dict["backoff_factor"])
        counts = state_dict["growth_interval"], state_dict["_growth_tracker"]
        self._loss_scale = state_dict["scale"]
        self.pending = None
        self.growth_factor, self.backoff_factor = factors
        self._scale_seq_len, self._unskipped = counts

    # -- by hand -------------------------------------------------------------------------------------------------------
    def update_scale(self) -> bool:
        """End a backward pass by hand, as in apex (``apex/amp/scaler.py: LossScaler.update_scale``). One host sync.

        It counts what ``unscale`` has found by hand, and the passes of blocks that have delayed their transition. A
        buffer that a script has lent to ``_overflow_buf`` stands for the delayed passes: it may hold the overflows of
        all ranks. The caller decides about the step: flags of delayed passes skip none any more.

        Returns:
            Whether the step must be skipped.
        """
        pending = self._take_pending()
        if self._lent_buffer is not None:
            self.found_inf.add((self._lent_buffer.reshape(()) != 0).float())
        elif pending is not None:
            self.found_inf.add(pending)
        self.adjust(self.found_inf.flag())
        self.found_inf = FoundInf()
        return self._has_overflow

    # -- unscaling by hand ---------------------------------------------------------------------------------------------
    def unscale_grads(self, grads: Sequence[torch.Tensor], scale: torch.Tensor | None = None) -> None:
        """Divide ``grads``, dense tensors of any device and dtype, by the scale in place; note any inf or NaN.

        ``scale`` is what they were multiplied by (0-dim float32), where that may not be the current scale. No host
        sync.
        """
        self.found_inf.multiply(list(grads), _torch.inverse_of(self.current_scale() if scale is None else scale))

    @_torch.without_grad
    def unscale(
        self,
        model_grads: Sequence[torch.Tensor],
        master_grads: Sequence[torch.Tensor],
        unused_scale: object = None,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write ``model_grads``, divided by the scale, into ``master_grads``; note any inf or NaN for ``update_scale``.

        As in apex (``apex/amp/scaler.py: LossScaler.unscale``): after an overflow nothing is written until
        ``clear_overflow_state()``. :func:`ampcompat.amp.scale_loss` never calls it. One host sync.

        Args:
            model_grads: Dense gradients of any device and dtype.
            master_grads: As many tensors of the same shapes, or ``model_grads`` themselves.
            unused_scale: Ignored, as in apex.
            models_are_masters: Ignored: it says that both lists hold the same tensors.
            scale_override: What the gradients were multiplied by, where that is not the current scale.

        Raises:
            ValueError: The lists differ in length.
        """
        _check_parallel("unscale", model_grads, master_grads)
        if self._has_overflow:
            return
        for model_grad, master_grad in zip(model_grads, master_grads, strict=True):
            if master_grad is not model_grad:
                master_grad.copy_(model_grad)
        self.unscale_grads(master_grads, None if scale_override is None else _float32(scale_override))

    @_torch.without_grad
    def unscale_with_stashed(
        self,
        model_grads: Sequence[torch.Tensor],
        stashed_master_grads: Sequence[torch.Tensor],
        master_grads: Sequence[torch.Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """Write into ``master_grads`` the sum of ``model_grads``, divided by the scale, and ``stashed_master_grads``.

        As in apex (``apex/amp/scaler.py: LossScaler.unscale_with_stashed``): inf and NaN are looked for in
        ``model_grads`` alone, and after an overflow nothing is written until ``clear_overflow_state()``. One host sync.

        Args:
            model_grads: The new gradients, dense, of any device and dtype. They stay unless they are ``master_grads``
                too.
            stashed_master_grads: The saved gradients, which had accumulated before.
            master_grads: Where the sum goes; may hold the tensors of either other list.
            scale_override: The scales of ``model_grads``, of ``stashed_master_grads`` and of the sum, instead of the
                current scale, 1 and 1.

        Raises:
            ValueError: The lists differ in length.
        """
        _check_parallel("unscale_with_stashed", model_grads, stashed_master_grads, master_grads)
        if self._has_overflow:
            return
        if scale_override is None:
            scale_override = (self._loss_scale, 1.0, 1.0)
        grads_scale, saved_scale, out_scale = scale_override
        new_grads = [grad.to(torch.float32, copy=True) for grad in model_grads]
        self.unscale_grads(new_grads, _float32(grads_scale / out_scale))
        for master_grad, new, saved in zip(master_grads, new_grads, stashed_master_grads, strict=True):
            master_grad.copy_(new.add_(saved, alpha=out_scale / saved_scale))


def _float32(number: float) -> torch.Tensor:
    return torch.tensor(float(number), dtype=torch.float32, device="cpu")


def _refuse_limit(name: str, value: object) -> NoReturn:
    raise ValueError(f"LossScaler.{name} = {value!r} - a limit is a positive number - write a power of two.")


def _check_parallel(method: str, *lists: Sequence[torch.Tensor]) -> None:
    sizes = list(map(len, lists))
    if len(set(sizes)) > 1:
        raise ValueError(
            f"LossScaler.{method} got lists of {sizes} tensors - each gradient goes with one of every other list - pass"
            " lists of equal length."
        )


def check_scaler(scaler: object, index: int) -> None:
    """Raise a TypeError unless ``scaler``, entry ``index`` of ``_amp_state.loss_scalers``, is a :class:`LossScaler`.

    A subclass is none: scripts override methods that apex called, and that ``amp.scale_loss`` would never call.
    """
    if type(scaler) is not LossScaler:
        raise TypeError(
            f"amp._amp_state.loss_scalers[{index}] is a {type(scaler).__name__} - amp.scale_loss scales and updates on"
            " the device, by amp.scaler.LossScaler itself - put one there; to share overflows between ranks, leave"
            " blocks with delay_overflow_check=True, all-reduce the tensor lent to _overflow_buf, and call"
            " update_scale()."
        )
