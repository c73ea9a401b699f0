"""Half-precision convolutions on the CPU, at float32's speed.

torch's own kernels for them are tens of times slower than float32's where oneDNN has none: in a dtype that the
processor has no arithmetic for, and backward in float16 on any. Here float32 does the work and the result is rounded
once, as on tensor cores. The kernels are registered below autograd, on the CPU's own dispatch key: they serve the half
model of O2 and O3 as well as the casts of O1, forward, backward and double backward, eager and compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._state import state


def _in_float(
    native: Callable[..., Any], slow: frozenset[torch.dtype], emulated: frozenset[torch.dtype]
) -> Callable[..., Any]:
    """Make a kernel that computes ``native`` in float32 where the tensors are of a ``slow`` dtype.

    The leading three arguments are tensors: input, weight and bias (or None), or gradient, input and weight. For an
    ``emulated`` dtype torch has a forward of its own, whose results are contiguous in 3-d; oneDNN keeps the layout.
    """

    def kernel(*args: Any, **settings: object) -> object:
        tensors, dtype = args[:3], args[0].dtype
        if dtype not in slow or any(t is not None and t.dtype is not dtype for t in tensors):
            return native(*args, **settings)  # mixed dtypes: torch's own error
        wide = native(*(None if t is None else t.float() for t in tensors), *args[3:], **settings)
        # The strides of torch's half kernels, as compiled graphs expect.
        contiguous = args[0].dim() == 5 and dtype in emulated
        layout = torch.contiguous_format if contiguous else torch.preserve_format
        if isinstance(wide, torch.Tensor):
            return wide.to(dtype, memory_format=layout)
        return tuple(None if g is None else g.to(dtype, memory_format=layout) for g in wide)

    return kernel


def acquire() -> None:
    """Compute half convolutions on the CPU in float32 from here on, and no others. Idempotent."""
    if state.casts.cpu_convolution is not None:
        return
    emulated = _torch.halves_without_cpu_convolution()
    # aten::convolution, and the graphs of torch.jit.trace, go through aten::_convolution.
    (forward,), (backward,) = map(_torch.aten_overloads, ("_convolution", "convolution_backward"))
    kernels = {
        forward: _in_float(_torch.composite(forward), emulated, emulated),
        backward: _in_float(_torch.composite(backward), emulated | {torch.float16}, emulated),
    }
    with ExitStack() as undo:
        _torch.register_kernels(kernels, "CPU", undo)
        state.casts.cpu_convolution = undo.pop_all()
    state.undo.callback(release)


def release() -> None:
    """Give torch its own convolutions back. Idempotent."""
    undo, state.casts.cpu_convolution = state.casts.cpu_convolution, None
    if undo is not None:
        undo.close()
