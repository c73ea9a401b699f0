"""Kinds of tensors, their bits, and who holds their memory."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

import torch

from ampcompat._torch.parameters import data_of


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a ``DTensor``: one rank's part of a tensor."""
    return type(tensor).__name__ == "DTensor" or type(data_of(tensor)).__name__ == "DTensor"


#: Whether a tensor belongs to a lazy module that has not seen data yet.
is_uninitialized: Callable[[torch.Tensor], bool] = torch.nn.parameter.is_lazy


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View ``tensor`` as integers: NaN equals itself, and 0.0 is not -0.0."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def tensor_of(reference: weakref.ref[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor that a plain weak reference leads to; torch must be told that Python holds it again."""
    tensor = reference()
    if tensor is not None:
        tensor._fix_weakref()  # type: ignore[attr-defined] # as torch.utils.weak.TensorWeakRef does
    return tensor


@torch.inference_mode(False)
def leave_inference_mode(tensor: torch.Tensor) -> None:
    """Make ``tensor``, where it was made under ``inference_mode``, a normal one with a version counter, in place."""
    if tensor.is_inference():
        normal = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            normal = torch.nn.Parameter(normal, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, normal)  # type: ignore[no-untyped-call]


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` holds data, unlike a fake tensor, which stands for one while torch compiles."""
    return not isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)


def owns_memory_alone(tensor: torch.Tensor, probe: torch.Tensor) -> bool:
    """Whether ``tensor`` is all of its memory, and nothing else holds that: no view, array, file or other process.

    Not seen are raw pointers, and processes that were sent a tensor on a GPU.

    Args:
        tensor: A tensor, held by its owner alone.
        probe: A tensor on the CPU that the caller has made. It tells how many references torch and tracers hold to any.
    """
    if not _is_plain(tensor) or not _fills_its_memory(tensor):
        return False
    storage = tensor.untyped_storage()
    if tensor.is_cpu and storage.is_shared():
        return False
    alone = probe.untyped_storage()
    if sys.getrefcount(storage) != sys.getrefcount(alone):
        return False
    return torch._C._storage_Use_Count(storage._cdata) == torch._C._storage_Use_Count(alone._cdata)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is one of torch's own classes, with memory whose references count here and now."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return False
    is_inference = tensor.is_inference() or torch.is_inference_mode_enabled()
    return not is_inference and not torch.compiler.is_compiling()


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is dense, no part of a larger memory, and not in the memory of an array or a file."""
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.element_size() or not storage.resizable():
        return False
    is_channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.is_contiguous() or is_channels_last
