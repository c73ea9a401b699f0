"""The loss scalers that came before ``amp``: one fixed, one dynamic."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


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
