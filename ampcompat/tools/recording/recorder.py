"""The observer that records a run: loss, scale, gradient norm, skip, time and memory at every step."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ampcompat._types import Optimizer
from ampcompat.amp.casts import CastsOff
from ampcompat.amp.optimizer import step_was_skipped
from ampcompat.amp.scaler import LossScaler
from ampcompat.tools.recording.events import Step
from ampcompat.tools.recording.memory import cuda_in_use, peak_memory


@dataclass
class _Pending:
    """Gather what an optimizer got since its last step."""

    losses: list[float]
    scale: float | None = None
    grad_norm: float | None = None


class Recorder:
    """Hands a :class:`Step` to ``on_record`` after every optimizer step; changes no number of the run.

    Each event waits for the device (several host syncs per step), so that times are those of finished work; what the
    recording itself takes is left out of them.

    Args:
        on_record: Called with each step; what it raises goes through to the script.
        on_loss: Called with value, scale and dtype of each loss when it is scaled.
    """

    def __init__(
        self,
        on_record: Callable[[Step], None],
        on_loss: Callable[[float, float, torch.dtype], None] | None = None,
    ) -> None:
        self._on_record = on_record
        self._on_loss = on_loss
        self._pending: weakref.WeakKeyDictionary[Optimizer, _Pending] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.blocks = self.steps = 0
        self._last_step: float | None = None
        self._own_time = 0.0

    def on_scale_loss(self, loss: torch.Tensor, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """Note loss and scale for the optimizers of the block."""
        begin = _now()
        self.blocks += 1
        with CastsOff():
            value = float(loss.detach().float().mean().item())
        scale = float(scaler.loss_scale())
        for optimizer in optimizers:
            pending = self._pending.setdefault(optimizer, _Pending([]))
            pending.losses.append(value)
            pending.scale = scale if pending.scale is None else min(scale, pending.scale)
        if self._on_loss is not None:
            self._on_loss(value, scale, loss.dtype)
        self._own_time += _now() - begin

    def on_gradients(self, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """Note the norm of what has accumulated."""
        begin = _now()
        with CastsOff():
            for optimizer in optimizers:
                self._pending.setdefault(optimizer, _Pending([])).grad_norm = _grad_norm(optimizer)
        self._own_time += _now() - begin

    def on_step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Record the step."""
        begin = _now()
        self.steps += 1
        pending = self._pending.pop(optimizer, _Pending([]))
        seconds = None if self._last_step is None else max(0.0, begin - self._last_step - self._own_time)
        step = Step(
            step=self.steps,
            optimizer=self._numbers.setdefault(optimizer, len(self._numbers)),
            losses=pending.losses,
            loss=sum(pending.losses) if pending.losses else None,
            scale=pending.scale,
            grad_norm=pending.grad_norm,
            skipped=step_was_skipped(optimizer) if skipped is None else skipped,
            seconds=seconds,
            memory=peak_memory(),
        )
        self._on_record(step)
        self._last_step, self._own_time = _now(), 0.0


def _grad_norm(optimizer: Optimizer) -> float | None:
    """2-norm over all gradients of ``optimizer``, in float32; None without any. One host sync per device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                grad = param.grad.detach()
                grad = grad.coalesce().values() if grad.is_sparse else grad
                grad = torch.view_as_real(grad) if grad.is_complex() else grad
                by_device.setdefault(grad.device, []).append(torch.linalg.vector_norm(grad, dtype=torch.float32))
    if not by_device:
        return None
    totals = [torch.linalg.vector_norm(torch.stack(norms)).item() for norms in by_device.values()]
    return float(sum(total**2 for total in totals) ** 0.5)


def _now() -> float:
    if cuda_in_use():
        torch.cuda.synchronize()
    return time.perf_counter()
