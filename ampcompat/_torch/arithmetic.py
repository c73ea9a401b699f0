"""Fused passes over lists of tensors, and numbers on their way to the host."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch

# The lists of one call are on one device, of one dtype, and laid out alike: the fused kernels walk raw memory and, on
# 2.4 and 2.13, silently mix up elements when the strides of a param and its gradient differ.

foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_div_ = torch._foreach_div_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sqrt = torch._foreach_sqrt
foreach_sqrt_ = torch._foreach_sqrt_
foreach_sub_ = torch._foreach_sub_
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_
#: ``(grads, found_inf, inverse_scale)``: multiply ``grads`` (one device, one dtype, dense) in place, and set
#: ``found_inf`` to 1 on any inf or NaN.
unscale_and_check_ = torch._amp_foreach_non_finite_check_and_unscale_
#: ``(scale, tracker, found, growth, backoff, interval)``: move ``scale`` and count in ``tracker``, as
#: ``GradScaler.update`` does, on their device.
update_scale_ = torch._amp_update_scale_


def has_fused_kernels(device: torch.device) -> bool:
    """Whether torch's own optimizers would accept ``fused=True`` for params on ``device``."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return device.type in _get_fused_kernels_supported_devices()


def is_capturing() -> bool:
    """Whether work is being recorded for a CUDA graph: the host may ask the device nothing."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


class HostCopy:
    """Numbers of a device on their way to host memory; starting the copy does not wait for the device.

    While a CUDA graph is captured, nothing is copied and the numbers are zeros.

    Args:
        values: 0-dim tensors of one dtype and device.
    """

    def __init__(self, values: list[torch.Tensor]) -> None:
        device = values[0].device
        self._event: Any = None
        if is_capturing():  # a replay runs no Python: nobody could read what it copies
            self._host = torch.zeros(len(values), device="cpu")
            return
        streams: Any = None if device.type == "cpu" else getattr(torch, device.type, None)
        if hasattr(streams, "Event") and hasattr(streams, "current_stream"):
            self._host = torch.stack(values).to("cpu", non_blocking=True)  # pinned memory, by torch's own choice
            self._event = streams.Event()
            self._event.record(streams.current_stream(device))
        else:  # nothing would tell when an asynchronous copy is there
            self._host = torch.stack(values).to("cpu")

    def arrived(self) -> bool:
        """Whether :meth:`read` need not wait."""
        return self._event is None or (not is_capturing() and bool(self._event.query()))

    def read(self) -> list[float]:
        """The numbers; waits for the device where they have not arrived."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


def host_value(number: torch.Tensor) -> float | None:
    """The value of a 0-dim float32 tensor in host memory, read without an op; None where it lies elsewhere."""
    if type(number) is not torch.Tensor or not number.is_cpu:  # a fake tensor has no data
        return None
    return ctypes.c_float.from_address(number.data_ptr()).value


def found_inf_and_scale(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return what ``scaler`` knows of the gradients of ``optimizer``, for a ``step`` that takes a ``grad_scaler``.

    Returns:
        The overflow flag (0-dim float32, not 0 after an overflow) and the scale that the gradients still have, None
        where they are unscaled. Both are None of a scaler that is not enabled. No host sync.
    """
    if not scaler.is_enabled():
        return None, None
    state = scaler._per_optimizer_states[id(optimizer)]
    is_unscaled = state["stage"].name == "UNSCALED"
    if not is_unscaled:
        scaler._check_inf_per_device(optimizer)
    scale = cast(torch.Tensor, scaler._get_scale_async())
    flags = [flag.to(scale.device, non_blocking=True) for flag in state["found_inf_per_device"].values()]
    found_inf = torch.stack(flags).amax() if flags else torch.zeros((), device=scale.device)
    return found_inf, None if is_unscaled else scale
