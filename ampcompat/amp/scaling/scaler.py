"""The loss scaler by apex's names (``apex/amp/scaler.py: LossScaler``), around a scale of ``loss_scale``.

``amp.scale_loss`` drives it. ``unscale``, ``unscale_with_stashed`` and ``update_scale`` are apex's, for scripts that
unscale by hand. A static scaler counts clean passes and never moves nor skips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from ampcompat import _torch
from ampcompat.amp._amp_state import master_params
from ampcompat.amp.options import is_scale
from ampcompat.amp.scaling.loss_scale import FLOOR, WINDOW, DynamicLossScale, StaticLossScale

__all__ = ["LossScaler", "master_params"]

#: Overflow flags that are kept apart until a transition or a step looks at them; more become one.
MAX_FLAGS = 1024

_DTYPE = attrgetter("dtype")
_DEVICE_AND_DTYPE = attrgetter("device", "dtype")


@dataclass(eq=False, slots=True)
class _Overflows:
    """What a scaler knows of overflows. A flag is a 0-dim float32 tensor on a device, not 0 after an overflow.

    Attributes:
        found_inf: Flags of gradients unscaled since the last transition, by device. :meth:`LossScaler.unscale_grads`
            fills it, and :meth:`LossScaler.take_found_inf` empties it.
        last: The flag of the last backward pass, None before the first.
        written: What a script has written to ``_has_overflow``; holds as long as it is ``last``.
        delayed: Flags of passes that left the scale alone; the next transition counts them.
        lent_buffer: The tensor that a script has put in the place of ``_overflow_buf``.
    """

    found_inf: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    last: torch.Tensor | None = None
    written: torch.Tensor | None = None
    delayed: list[torch.Tensor] = field(default_factory=list)
    lent_buffer: torch.Tensor | None = None

    def add(self, flag: torch.Tensor) -> None:
        """Count ``flag`` among those of gradients that were unscaled on its device."""
        earlier = self.found_inf.get(flag.device)
        self.found_inf[flag.device] = flag if earlier is None else torch.maximum(flag, earlier)


def _forwarded(name: str, doc: str) -> Any:
    """A property that is ``name`` of the scaler's scale."""
    return property(lambda self: getattr(self.core, name), lambda self, value: setattr(self.core, name, value), doc=doc)


class LossScaler:
    """Scale, its growth and its back-off; kept on the device of the losses and updated there without a host sync.

    Args:
        loss_scale: ``"dynamic"``, or a positive number for a static scale.
        init_scale: First scale of a dynamic scaler, capped by ``max_loss_scale``.
        scale_factor: Growth factor; its reciprocal is the back-off factor.
        scale_window: Clean backward passes before growth.
        min_loss_scale: Floor of back-off; None means 2^-24 (apex let the scale die at zero).
        max_loss_scale: Cap of growth.
        loss_id: Which loss of its session this scaler serves; named in messages.

    Attributes:
        core: The scale itself.
        dynamic: Whether it moves.
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
        self.dynamic = loss_scale == "dynamic"
        kind = DynamicLossScale if self.dynamic else StaticLossScale
        self.core = kind(
            initial=min(max_loss_scale, init_scale) if self.dynamic else float(loss_scale),
            growth_factor=scale_factor,
            backoff_factor=1.0 / scale_factor,
            growth_interval=scale_window,
            smallest=FLOOR if min_loss_scale is None else min_loss_scale,
            largest=max_loss_scale,
        )
        self.loss_id = loss_id
        self._overflows = _Overflows()
        self._cached_inverse: tuple[float, torch.Tensor] | None = None  # a scale in host memory, and 1 / scale

    # -- what legacy code reads and writes -----------------------------------------------------------------------------
    def loss_scale(self) -> float:
        """The current scale. Reads the device: one host sync."""
        return self.core.read()

    get_scale = loss_scale  # GradScaler's name

    @property
    def _loss_scale(self) -> float:
        return self.core.read()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        scale = float(value)
        if not is_scale(scale):
            raise ValueError(
                f"LossScaler._loss_scale = {value!r} - a scale is a positive finite number that float32 holds -"
                " write a power of two, 2.0**16 for example."
            )
        self.core.write(scale)

    @property
    def _unskipped(self) -> int:
        return self.core.read_clean_passes()

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self.core.write_clean_passes(int(value))

    _scale_seq_len = _forwarded("growth_interval", "Clean passes before growth.")
    _min_loss_scale = _forwarded("smallest", "The limit of back-off.")
    _max_loss_scale = _forwarded("largest", "The limit of growth.")

    @property
    def is_one(self) -> bool:
        """Whether the scale is 1, and no script has written it: then blocks need not touch gradients. No host sync."""
        return not self.dynamic and self.core.scale is None and self.core.initial == 1.0

    @property
    def _has_overflow(self) -> bool:
        """Whether the last backward pass overflowed; a static scaler never says so. Reads the device: one host sync.

        A script that checks gradients itself may write it: until the next backward pass it reads what was written, and
        ``update_scale`` counts a True.
        """
        last = self._overflows.last
        if last is None:
            return False
        was_written = last is self._overflows.written
        if not self.dynamic and not was_written:
            return False
        return bool(last.item())

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        device = None if self.core.scale is None else self.core.scale.device
        written = torch.full((), float(bool(value)), dtype=torch.float32, device=device)
        self._overflows.written = written
        self._overflows.last = written

    @property
    def _overflow_buf(self) -> torch.Tensor:
        if self._overflows.lent_buffer is not None:
            return self._overflows.lent_buffer
        last = self._overflows.last
        if last is not None:
            return last.reshape(1).int()
        device = torch.device("cpu") if self.core.scale is None else self.core.scale.device
        return torch.zeros(1, dtype=torch.int, device=device)

    @_overflow_buf.setter
    def _overflow_buf(self, buffer: torch.Tensor) -> None:
        if not isinstance(buffer, torch.Tensor) or buffer.numel() != 1:
            got = list(buffer.shape) if isinstance(buffer, torch.Tensor) else type(buffer).__name__
            raise TypeError(f"_overflow_buf = {got} - must be a tensor of one element - lend torch.zeros(1).int().")
        self._overflows.lent_buffer = buffer

    def clear_overflow_state(self) -> None:
        """Forget the overflows noted since the last transition."""
        self.forget_last_pass()
        self._overflows.found_inf = {}
        self._overflows.delayed = []

    def forget_last_pass(self) -> None:
        """Have ``_has_overflow`` and ``_overflow_buf`` tell of no overflow; :meth:`unscale` writes nothing else."""
        self._overflows.last = None
        if self._overflows.lent_buffer is not None:
            self._overflows.lent_buffer.zero_()

    # -- one backward pass ---------------------------------------------------------------------------------------------
    def scale_on(self, device: torch.device | None = None) -> torch.Tensor:
        """The current scale as a 0-dim float32 tensor on ``device``, or where it is; no host sync."""
        return self.core.on(device)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss.float() * scale``, on the device of ``loss``, of any shape; no host sync."""
        scale = self.core.make(loss.device)
        if scale.device != loss.device:
            scale = scale.to(loss.device, non_blocking=True)
        return loss.float() * scale

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
            self.core.make(device)
            scale = self.core.on(device)
        elif scale.device != device:
            scale = scale.to(device, non_blocking=True)
        found_inf = self._overflows.found_inf.get(device)
        if found_inf is None:
            found_inf = self._overflows.found_inf[device] = scale.new_full((), 0.0)
        _torch.unscale_and_check_(grads, found_inf, self._inverse_of(scale))

    def _inverse_of(self, scale: torch.Tensor) -> torch.Tensor:
        """``1 / scale``, kept for the next pass where ``scale`` is in host memory."""
        number = _torch.host_value(scale)
        if not number:  # on a device
            # Not reciprocal(): at O1 that is an op of the float list, and would go through its rule.
            return torch.ones_like(scale).div_(scale)
        if self._cached_inverse is None or self._cached_inverse[0] != number:
            self._cached_inverse = (number, scale.new_full((), 1.0 / number))
        return self._cached_inverse[1]

    def take_found_inf(self) -> torch.Tensor | None:
        """The flag of the gradients unscaled since the last transition, which is forgotten; None where none were."""
        by_device = self._overflows.found_inf
        if not by_device:
            return None
        self._overflows.found_inf = {}
        return _torch.any_of(list(by_device.values()))

    def add_found_inf(self, flag: torch.Tensor) -> None:
        """Count ``flag``, a 0-dim float32 tensor, among those of gradients unscaled since the last transition."""
        self._overflows.add(flag)

    def forget_found_inf(self) -> None:
        """Forget overflows of a backward pass that is given up."""
        self._overflows.found_inf = {}

    def adjust(self, found_inf: torch.Tensor | None) -> torch.Tensor | None:
        """Make the transition for a backward pass; no host sync.

        Args:
            found_inf: The flag of the pass, of :meth:`take_found_inf`; None where no gradient was unscaled.

        Returns:
            The flag for the step, which must be skipped if it is set; None for a static scaler, which never skips.
        """
        flag = self._note_pass(found_inf)
        if not self.dynamic:
            self.core.adjust(flag)
            return None
        if self._overflows.delayed:
            self.core.adjust(_torch.any_of([flag, *self._overflows.delayed]))
            self._overflows.delayed = []
        else:
            self.core.adjust(flag)
        return flag

    def delay(self, found_inf: torch.Tensor | None) -> torch.Tensor | None:
        """As :meth:`adjust`, but leave the scale alone, and have the next transition count an overflow of this pass."""
        flag = self._note_pass(found_inf)
        if not self.dynamic:
            return None
        overflows = self._overflows
        if len(overflows.delayed) >= MAX_FLAGS:  # a script may delay them without end
            overflows.delayed = [_torch.any_of(overflows.delayed)]
        overflows.delayed.append(flag)  # no copy: ``update_scale`` clears the flag that the steps hold
        return flag

    def _note_pass(self, found_inf: torch.Tensor | None) -> torch.Tensor:
        """Have ``found_inf`` read by scripts as that of the last pass; the flag, where the scale is."""
        scale = self.core.make(torch.device("cpu") if found_inf is None else found_inf.device)
        if found_inf is None:
            flag = scale.new_full((), 0.0)
        elif found_inf.device == scale.device:
            flag = found_inf
        else:
            flag = found_inf.to(scale.device, non_blocking=True)
        self._overflows.last = flag
        if self.dynamic and self._overflows.lent_buffer is not None:
            self._overflows.lent_buffer.copy_(flag, non_blocking=True)
        return flag

    # -- as torch.amp.GradScaler saves it ------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return what ``torch.amp.GradScaler.load_state_dict`` takes. Reads the device."""
        core = self.core
        return {
            "scale": core.read(),
            "growth_factor": core.growth_factor,
            "backoff_factor": core.backoff_factor,
            "growth_interval": core.growth_interval,
            "_growth_tracker": core.read_clean_passes(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict`, here or of GradScaler, returned; what is scaled already keeps its scale."""
        core = self.core
        core.write(float(state_dict["scale"]))
        core.growth_factor = float(state_dict["growth_factor"])
        core.backoff_factor = float(state_dict["backoff_factor"])
        core.growth_interval = int(state_dict["growth_interval"])
        core.write_clean_passes(int(state_dict["_growth_tracker"]))

    # -- by hand -------------------------------------------------------------------------------------------------------
    def scale_after_back_off(self) -> torch.Tensor:
        """The scale to name when a step is skipped: with a back-off that was delayed. No host sync."""
        if self._overflows.delayed and isinstance(self.core, DynamicLossScale):
            return self.core.after_back_off()
        return self.core.on()

    def update_scale(self) -> bool:
        """End a backward pass by hand; returns whether the step must be skipped. One host sync.

        The caller decides about the step: overflows that ``delay_overflow_check`` blocks noted skip none any more. A
        buffer lent to ``_overflow_buf`` is looked at instead: it may hold the overflows of all ranks. As in apex
        (``apex/amp/scaler.py: LossScaler.update_scale``).
        """
        overflows = self._overflows
        delayed = overflows.delayed
        overflows.delayed = []
        flags = delayed if overflows.lent_buffer is None else [overflows.lent_buffer]
        if overflows.written is not None and overflows.written is overflows.last:
            flags = [*flags, overflows.written]
        if flags:
            overflows.add(_torch.any_of([(flag.reshape(()) != 0).float() for flag in flags]))
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
    return torch.tensor(float(number), dtype=torch.float32)


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
