"""The loss scalers of ``FP16_Optimizer``, in both of apex's generations.

:class:`LossScaler` and :class:`DynamicLossScaler` came before ``amp``; scripts read their ``loss_scale``. From March
2019 on apex's ``FP16_Optimizer`` had the scaler of ``amp``, whose ``loss_scale()`` is called; that is
:class:`CallableLossScaler`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ampcompat.fp16_utils.fp16util import to_python_float as to_python_float  # apex had it here, too


def has_inf_or_nan(tensors: Iterable[Tensor]) -> bool:
    """Whether any value is not finite (one host sync a device)."""
    flags: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        flags.setdefault(values.device, []).append(values.isfinite().all())
    return any(not bool(torch.stack(found).all()) for found in flags.values())


class LossScaler:
    """A fixed scale; never reports an overflow."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = float(scale)

    @property
    def loss_scale(self) -> float:
        """The factor on the loss."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Always False: a fixed scale is not checked."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Nothing: the scale is fixed."""

    def scale_gradient(self, module: object, grad_in: tuple[Tensor, ...], grad_out: object) -> tuple[Tensor, ...]:
        """A backward hook that multiplies the gradients by the scale."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backward of the scaled loss."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


class DynamicLossScaler(LossScaler):
    """Divides the scale on an overflow and multiplies it after ``scale_window`` iterations without one.

    Args:
        init_scale: Scale to begin with.
        scale_factor: What the scale is divided and multiplied by.
        scale_window: Iterations without overflow before it grows.
        min_scale: It never falls below this.
        delayed_shift: Overflows in a row to wait for before the scale falls; 1 is apex's behaviour.
    """

    def __init__(
        self,
        init_scale: float = 2**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 1,
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.cur_hysteresis = delayed_shift

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of ``params`` is not finite (host sync)."""
        return has_inf_or_nan(p.grad for p in params if p.grad is not None)

    def update_scale(self, overflow: bool) -> None:
        """Close the iteration: shrink, keep or grow the scale."""
        if overflow:
            if self.cur_hysteresis <= 1:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            self.cur_hysteresis = self.delayed_shift
            if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1


class CallableLossScaler:
    """The scaler that ``FP16_Optimizer`` has had since March 2019; attributes and arguments are those of ``amp``'s.

    Reproduces ``apex/amp/scaler.py: LossScaler``, as numbers on the host.

    Args:
        loss_scale: ``"dynamic"``, or a fixed scale.
        init_scale: Scale to begin with, when dynamic; ``max_loss_scale`` caps it.
        scale_factor: What the scale is divided and multiplied by.
        scale_window: Steps without overflow before it grows.
        min_loss_scale: It never falls below this.
        max_loss_scale: It never grows above this.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._loss_scale = float(min(init_scale, max_loss_scale) if self.dynamic else loss_scale)
        self._scale_factor = scale_factor
        self._scale_seq_len = scale_window
        self._min_loss_scale = min_loss_scale
        self._max_loss_scale = max_loss_scale
        self._unskipped = 0

    def loss_scale(self) -> float:
        """The factor on the loss."""
        return self._loss_scale

    @property
    def cur_scale(self) -> float:
        """The same, under the name that it has in the generation before."""
        return self._loss_scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self._loss_scale = float(value)

    @property
    def min_scale(self) -> float:
        """The scale that it does not fall below; without one, 2^-24: apex let the scale die at zero."""
        return 2.0**-24 if self._min_loss_scale is None else self._min_loss_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of ``params`` is not finite (host sync); a fixed scale is not checked."""
        return self.dynamic and has_inf_or_nan(p.grad for p in params if p.grad is not None)

    def update_scale(self, overflow: bool) -> None:
        """Close the step: shrink, keep or grow a dynamic scale."""
        if not self.dynamic:
            return
        if overflow:
            self._loss_scale = max(self._loss_scale / self._scale_factor, self.min_scale)
            self._unskipped = 0
            return
        self._unskipped += 1
        if self._unskipped == self._scale_seq_len:
            self._loss_scale = min(self._loss_scale * self._scale_factor, self._max_loss_scale)
            self._unskipped = 0

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backward of the scaled loss."""
        (loss * self._loss_scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


AnyLossScaler = LossScaler | CallableLossScaler


def dynamic_scaler(arguments: Mapping[str, Any]) -> AnyLossScaler:
    """The dynamic scaler that takes ``arguments``: that of 2019, unless they are of the generation before."""
    if {"min_scale", "delayed_shift"} & arguments.keys():
        return DynamicLossScaler(**arguments)
    return CallableLossScaler("dynamic", **arguments)


def restored_scaler(saved: Mapping[str, Any] | object) -> AnyLossScaler:
    """The scaler of a checkpoint: of either generation, as an object (apex) or as a dict of its attributes (ours).

    Raises:
        ValueError: It is neither.
    """
    values = saved if isinstance(saved, Mapping) else vars(saved)
    scaler: AnyLossScaler
    if "_loss_scale" in values:
        scaler = CallableLossScaler("dynamic")
    elif "cur_scale" in values:
        scaler = DynamicLossScaler() if "cur_iter" in values else LossScaler()
    else:
        raise ValueError(
            f"loss_scaler has {sorted(values)} - an FP16_Optimizer's has _loss_scale (apex from March 2019 on) or"
            " cur_scale (before) - load its own checkpoint, or set optimizer.loss_scale by hand."
        )
    known = vars(scaler).keys()
    vars(scaler).update({name: value for name, value in values.items() if name in known})
    return scaler
