"""The loss scaler, by apex's names (``apex/amp/scaler.py: LossScaler``).

``amp.scale_loss`` drives it. ``unscale``, ``unscale_with_stashed`` and ``update_scale`` are apex's, for scripts that
unscale by hand. How the scale moves is ``loss_scale.next_scale``; a static scale only counts clean passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch

from ampcompat import _torch
from ampcompat.amp._amp_state import master_params
from ampcompat.amp.options import is_scale, number, whole_number
from ampcompat.amp.scaling.loss_scale import CEILING, FLOOR, WINDOW, next_scale

__all__ = ["LossScaler", "master_params"]

#: How many flags of delayed overflows are kept apart; more become one.
MAX_FLAGS = 1024

_DTYPE = attrgetter("dtype")
_DEVICE_AND_DTYPE = attrgetter("device", "dtype")


class LossScaler:
    """Scale, its growth and its back-off; kept on the device of the losses and updated there without a host sync.

    An overflow flag is a 0-dim float32 tensor on a device, not 0 after an overflow.

    Args:
        loss_scale: ``"dynamic"``, or a positive number for a static scale.
        init_scale: First scale of a dynamic scaler, capped by ``max_loss_scale``.
        scale_factor: Growth factor; its reciprocal is the back-off factor.
        scale_window: Clean backward passes before growth.
        min_loss_scale: Floor of back-off; None means 2^-24 (apex let the scale die at zero).
        max_loss_scale: Cap of growth.
        loss_id: Which loss of its session this scaler serves; named in messages.

    Attributes:
        scale: 0-dim float32, made with the first loss; None before. Each move makes a new tensor, since an open block
            unscales by the one that it has scaled by.
        initial_scale: What ``scale`` is made with, or what the host last wrote.
        clean_passes: 0-dim int32 next to ``scale``: passes since the scale moved. None before the first loss.
        initial_clean_passes: What ``clean_passes`` is made with, or what the host last wrote.
        growth_factor: What the scale is multiplied by after enough clean passes.
        backoff_factor: What the scale is multiplied by after an overflow.
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
        self.loss_id = loss_id
        # The scale and how it moves.
        self.scale: torch.Tensor | None = None
        self.initial_scale: float  # written below, through apex's name
        self.clean_passes: torch.Tensor | None = None
        self.initial_clean_passes = 0
        self.growth_factor = scale_factor
        self.backoff_factor = 1.0 / scale_factor
        self.dynamic = isinstance(loss_scale, str) and loss_scale == "dynamic"
        self._scale_seq_len = scale_window
        self._min_loss_scale = min_loss_scale
        self._max_loss_scale = max_loss_scale
        self._loss_scale = init_scale if self.dynamic else loss_scale
        if self.dynamic and self.initial_scale > self._largest:
            self.initial_scale = self._largest
        # What is known of overflows.
        self._found_inf: dict[torch.device, torch.Tensor] = {}  # of gradients unscaled since the last transition
        self._delayed: list[torch.Tensor] = []  # of passes that left the scale alone; the next transition counts them
        self._last_pass: torch.Tensor | None = None  # of the last backward pass
        self._lent_buffer: torch.Tensor | None = None  # what a script has put in the place of ``_overflow_buf``
        self._cached_inverse: tuple[float, torch.Tensor] | None = None  # a scale in host memory, and 1 / scale

    # -- what legacy code reads and writes -----------------------------------------------------------------------------
    def loss_scale(self) -> float:
        """The current scale. Reads the device: one host sync."""
        return self.initial_scale if self.scale is None else float(self.scale.item())

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
        self.initial_scale = scale
        if self.scale is not None:
            self.scale = torch.full_like(self.scale, scale)

    @property
    def _unskipped(self) -> int:
        """Clean passes since the scale moved. Reads the device: one host sync."""
        return self.initial_clean_passes if self.clean_passes is None else int(self.clean_passes.item())

    @_unskipped.setter
    def _unskipped(self, value: Any) -> None:
        count = whole_number("LossScaler._unskipped", value)
        self.initial_clean_passes = count
        if self.clean_passes is not None:
            self.clean_passes = torch.full_like(self.clean_passes, count)

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return self._is_dynamic

    @dynamic.setter
    def dynamic(self, value: Any) -> None:
        self._is_dynamic = bool(value)
        if not self._is_dynamic and self.scale is not None:
            self.initial_scale = self.loss_scale()  # it stays where it has come to

    @property
    def _scale_seq_len(self) -> int:
        """Clean passes before growth."""
        return self._growth_interval

    @_scale_seq_len.setter
    def _scale_seq_len(self, value: Any) -> None:
        self._growth_interval = whole_number("LossScaler._scale_seq_len", value)

    @property
    def _min_loss_scale(self) -> float:
        """The limit of back-off."""
        return self._smallest

    @_min_loss_scale.setter
    def _min_loss_scale(self, value: Any) -> None:
        limit = 0.0 if value is None else number(value)
        if not limit < CEILING:
            _refuse_limit("_min_loss_scale", value)
        self._smallest = limit if limit > 0 else FLOOR  # 0 meant no limit, as None did

    @property
    def _max_loss_scale(self) -> float:
        """The limit of growth."""
        return self._largest

    @_max_loss_scale.setter
    def _max_loss_scale(self, value: Any) -> None:
        limit = number(value)
        if not limit > 0:
            _refuse_limit("_max_loss_scale", value)
        self._largest = min(limit, CEILING)

    @property
    def is_one(self) -> bool:
        """Whether the scale is 1 and never moves: then blocks need not touch gradients. No host sync."""
        return not self._is_dynamic and self.initial_scale == 1.0

    @property
    def _has_overflow(self) -> bool:
        """Whether the last backward pass overflowed; a static scaler never says so. Reads the device: one host sync."""
        if self._last_pass is None or not self._is_dynamic:
            return False
        return bool(self._last_pass.item())

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
        if self._last_pass is not None:
            return self._last_pass.reshape(1).int()
        device = torch.device("cpu") if self.scale is None else self.scale.device
        return torch.zeros(1, dtype=torch.int, device=device)

    @_overflow_buf.setter
    def _overflow_buf(self, buffer: torch.Tensor) -> None:
        if not isinstance(buffer, torch.Tensor) or buffer.numel() != 1:
            got = list(buffer.shape) if isinstance(buffer, torch.Tensor) else type(buffer).__name__
            raise TypeError(f"_overflow_buf = {got} - must be a tensor of one element - lend torch.zeros(1).int().")
        self._lent_buffer = buffer

    def clear_overflow_state(self) -> None:
        """Forget the overflows noted since the last transition."""
        self.forget_last_pass()
        self._found_inf = {}
        self._delayed = []

    def forget_last_pass(self) -> None:
        """Forget the overflow that ``_has_overflow`` tells of: after one, :meth:`unscale` writes nothing until then."""
        self._last_pass = None
        if self._lent_buffer is not None:
            self._lent_buffer.zero_()

    # -- one backward pass ---------------------------------------------------------------------------------------------
    def scale_on(self, device: torch.device | None = None) -> torch.Tensor:
        """The current scale as a 0-dim float32 tensor on ``device``, or where it is; no host sync."""
        if self.scale is None:
            return torch.full((), self.initial_scale, dtype=torch.float32, device=device or "cpu")
        return self.scale if device is None else self.scale.to(device, non_blocking=True)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss.float() * scale``, on the device of ``loss``, of any shape; no host sync."""
        scale = self._made_on(loss.device)
        if scale.device != loss.device:
            scale = scale.to(loss.device, non_blocking=True)
        return loss.float() * scale

    def _made_on(self, device: torch.device) -> torch.Tensor:
        """The current scale; its tensors are made on ``device`` if there are none yet."""
        if self.scale is None:
            self.scale = torch.full((), self.initial_scale, dtype=torch.float32, device=device)
            self.clean_passes = torch.full((), self.initial_clean_passes, dtype=torch.int32, device=device)
        return self.scale

    def unscale_grads(self, grads: Any, scale: torch.Tensor | None = None) -> None:
        """Multiply ``grads``, dense tensors of any device and dtype, in place by 1 / scale; note any inf or NaN.

        ``scale`` is what they were scaled by (0-dim float32), where that may not be the current scale. No host sync.
        """
        alike = len(set(map(_DTYPE, grads))) == 1 and len(set(map(torch.Tensor.get_device, grads))) == 1
        if not alike:  # no gradients, or one kernel call for each device and dtype
            for kind in dict.fromkeys(map(_DEVICE_AND_DTYPE, grads)):
                self.unscale_grads([grad for grad in grads if _DEVICE_AND_DTYPE(grad) == kind], scale)
            return
        device = grads[0].device
        if grads[0].is_complex():
            grads = [torch.view_as_real(grad) for grad in grads]
        if scale is None:
            scale = self._made_on(device)
        if scale.device != device:
            scale = scale.to(device, non_blocking=True)
        found_inf = self._found_inf.get(device)
        if found_inf is None:
            found_inf = scale.new_full((), 0.0)
            self._found_inf[device] = found_inf
        _torch.unscale_and_check_(grads, found_inf, self._inverse_of(scale))

    def _inverse_of(self, scale: torch.Tensor) -> torch.Tensor:
        """``1 / scale``, kept for the next pass where ``scale`` is in host memory."""
        value = _torch.host_value(scale)
        if not value:  # on a device
            return _torch.inverse_of(scale)
        if self._cached_inverse is None or self._cached_inverse[0] != value:
            self._cached_inverse = (value, scale.new_full((), 1.0 / value))
        return self._cached_inverse[1]

    def take_found_inf(self) -> torch.Tensor | None:
        """The flag of the gradients unscaled since the last transition, which is forgotten; None where none were."""
        flags = list(self._found_inf.values())
        self._found_inf = {}
        return _torch.any_of(flags) if flags else None

    def add_found_inf(self, flag: torch.Tensor) -> None:
        """Count ``flag``, a 0-dim float32 tensor, among those of gradients unscaled since the last transition."""
        earlier = self._found_inf.get(flag.device)
        self._found_inf[flag.device] = flag if earlier is None else torch.maximum(flag, earlier)

    def forget_found_inf(self) -> None:
        """Forget overflows of a backward pass that is given up."""
        self._found_inf = {}

    def adjust(self, found_inf: torch.Tensor | None) -> torch.Tensor | None:
        """Make the transition for a backward pass; no host sync.

        Args:
            found_inf: The flag of the pass, of :meth:`take_found_inf`; None where no gradient was unscaled.

        Returns:
            The flag for the step, which must be skipped if it is set; None for a static scaler, which never skips.
        """
        flag = self._note_pass(found_inf)
        if not self._is_dynamic:
            self.count_clean_pass()
            return None
        self._move(_torch.any_of([flag, *self._delayed]))
        self._delayed = []
        return flag

    def delay(self, found_inf: torch.Tensor | None) -> torch.Tensor | None:
        """As :meth:`adjust`, but leave the scale alone: the next transition counts an overflow of this pass."""
        flag = self._note_pass(found_inf)
        if not self._is_dynamic:
            return None
        if len(self._delayed) >= MAX_FLAGS:  # a script may delay them without end
            self._delayed = [_torch.any_of(self._delayed)]
        self._delayed.append(flag)  # no copy: ``update_scale`` clears the flag that the steps hold
        return flag

    def count_clean_pass(self) -> None:
        """Count a pass that leaves the scale alone, on the device if the scale is there."""
        if self.clean_passes is None:
            self.initial_clean_passes += 1
        else:
            self.clean_passes.add_(1)

    def _note_pass(self, found_inf: torch.Tensor | None) -> torch.Tensor:
        """Show ``found_inf`` to scripts as the flag of the last pass; return it where the scale is."""
        scale = self._made_on(torch.device("cpu") if found_inf is None else found_inf.device)
        if found_inf is None:
            flag = scale.new_full((), 0.0)
        elif found_inf.device == scale.device:
            flag = found_inf
        else:
            flag = found_inf.to(scale.device, non_blocking=True)
        self._last_pass = flag
        if self._is_dynamic and self._lent_buffer is not None:
            self._lent_buffer.copy_(flag, non_blocking=True)
        return flag

    def _move(self, found_inf: torch.Tensor) -> None:
        """Back off, or grow, or only count, after a pass with the flag ``found_inf``.

        While a CUDA graph is captured the tensors change in place, since each replay begins with those of the capture.
        """
        scale: torch.Tensor = self.scale  # type: ignore[assignment] # made, at the latest, by ``_note_pass``
        clean_passes: torch.Tensor = self.clean_passes  # type: ignore[assignment] # made with the scale
        moved, counted = next_scale(
            scale,
            clean_passes,
            found_inf,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self._growth_interval,
            smallest=self._smallest,
            largest=self._largest,
            # Where the host's last value was within the limits, every later scale is too.
            is_within_limits=self._smallest <= self.initial_scale <= self._largest,
        )
        if _torch.is_capturing():
            scale.copy_(moved)
            clean_passes.copy_(counted)
        else:
            self.scale = moved
            self.clean_passes = counted

    def scale_after_back_off(self) -> torch.Tensor:
        """The scale to print for a skipped step, any delayed back-off included. No host sync."""
        scale = self.scale_on()
        if self._is_dynamic and self._delayed:
            return (scale * self.backoff_factor).clamp(min=self._smallest)
        return scale

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
        self._loss_scale = state_dict["scale"]
        self.growth_factor = float(state_dict["growth_factor"])
        self.backoff_factor = float(state_dict["backoff_factor"])
        self._scale_seq_len = state_dict["growth_interval"]
        self._unskipped = state_dict["_growth_tracker"]

    # -- by hand -------------------------------------------------------------------------------------------------------
    def update_scale(self) -> bool:
        """End a backward pass by hand; returns whether the step must be skipped. One host sync.

        The caller decides about the step: overflows that ``delay_overflow_check`` blocks noted no longer skip one. A
        buffer lent to ``_overflow_buf`` is looked at instead: it may hold the overflows of all ranks. As in apex
        (``apex/amp/scaler.py: LossScaler.update_scale``).
        """
        delayed = self._delayed
        self._delayed = []
        flags = delayed if self._lent_buffer is None else [self._lent_buffer]
        if flags:
            is_set = [(flag.reshape(()) != 0).float() for flag in flags]
            self.add_found_inf(_torch.any_of(is_set))
        for flag in delayed:
            flag.zero_()  # for the optimizers that hold it: their step is not skipped
        self.adjust(self.take_found_inf())
        return self._has_overflow

    # -- unscaling by hand ---------------------------------------------------------------------------------------------
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
            model_grads: Dense gradients of any device and dtype; they stay unless they are ``master_grads`` too.
            stashed_master_grads: What had accumulated before.
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
        grads_scale, stashed_scale, out_scale = scale_override
        fresh = [grad.to(torch.float32, copy=True) for grad in model_grads]
        self.unscale_grads(fresh, _float32(grads_scale / out_scale))
        for master_grad, new, stashed in zip(master_grads, fresh, stashed_master_grads, strict=True):
            master_grad.copy_(new.add_(stashed, alpha=out_scale / stashed_scale))


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
