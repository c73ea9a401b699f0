"""Half-precision convolutions on the CPU, at float32's speed.

torch's own kernels for them are tens of times slower than float32's where the processor has no half-precision
arithmetic. Here their inputs are widened, float32 does the work, and the result is rounded once: what tensor cores
compute as well. The rules sit below autograd, on the CPU's own dispatch key, so they serve the half model of O2 and O3
as well as the casts of O1, forward, backward and double backward, eager and compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._state import state

Tensors = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _rounded(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``result`` in ``dtype`` and the strides of torch's half kernels (3-d: contiguous), as compiled graphs expect."""
    layout = torch.contiguous_format if result.dim() == 5 else torch.preserve_format
    return result.to(dtype, memory_format=layout)


def _forward(native: Callable[..., torch.Tensor], slow: frozenset[torch.dtype]) -> Callable[..., torch.Tensor]:
    def convolution(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any, **named: Any
    ) -> torch.Tensor:
        dtype = x.dtype
        if dtype not in slow or weight.dtype is not dtype:  # mixed dtypes: torch's own error
            return native(x, weight, bias, *settings, **named)
        wide_bias = None if bias is None else bias.float()
        y = native(x.float(), weight.float(), wide_bias, *settings, **named)
        return _rounded(y, dtype)

    return convolution


def _backward(native: Callable[..., Tensors], slow: frozenset[torch.dtype]) -> Callable[..., Tensors]:
    def convolution_backward(
        grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *settings: Any, **named: Any
    ) -> Tensors:
        dtype = x.dtype
        if dtype not in slow or weight.dtype is not dtype or grad.dtype is not dtype:
            return native(grad, x, weight, *settings, **named)
        wide = native(grad.float(), x.float(), weight.float(), *settings, **named)
        dx, dweight, dbias = (None if g is None else _rounded(g, dtype) for g in wide)
        return dx, dweight, dbias

    return convolution_backward


def acquire() -> None:
    """Compute half convolutions on the CPU in float32 from here on, and no others. Idempotent."""
    if state.casts.cpu_convolution is not None:
        return
    slow = _torch.halves_without_cpu_convolution()
    with ExitStack() as undo:
        registrations = _torch.Registrations()
        undo.callback(registrations.close)
        # aten::convolution, and the graphs of torch.jit.trace, go through aten::_convolution.
        for name, make in (("_convolution", _forward), ("convolution_backward", _backward)):
            for op in _torch.aten_overloads(name):
                registrations.add(op, make(_torch.composite(op), slow), "CPU")
        state.casts.cpu_convolution = undo.pop_all()
        state.undo.callback(release)


def release() -> None:
    """Give torch its own convolutions back. Idempotent."""
    undo, state.casts.cpu_convolution = state.casts.cpu_convolution, None
    if undo is not None:
        undo.close()
