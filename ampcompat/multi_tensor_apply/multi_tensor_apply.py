"""MultiTensorApply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

R = TypeVar("R")


class MultiTensorApply:
    """Call ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``.

    Reproduces ``apex/multi_tensor_apply/multi_tensor_apply.py: MultiTensorApply``.

    Args:
        chunk_size: Elements a CUDA block took in apex; torch's kernels choose for themselves.

    Attributes:
        available: Whether the functions can be used: always, :mod:`ampcompat.amp_C` serves them on every device.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing: there is no extension that might be missing."""

    def __call__(
        self,
        op: Callable[..., R],
        noop_flag_buffer: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        *args: object,
    ) -> R:
        """Return what ``op`` returns."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
