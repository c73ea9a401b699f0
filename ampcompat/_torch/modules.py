"""Kinds of modules and tensors, their state dicts, and data parallelism."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ampcompat._torch.parameters import data_of
from ampcompat._torch.patch import replace

#: What runs while a module is called.
_CALL: Any = torch.nn.Module._call_impl.__code__


def register_state_dict_hooks(
    module: Any, after_save: Callable[..., None], before_load: Callable[..., None], after_load: Callable[..., None]
) -> list[RemovableHandle]:
    """Hook saving and loading of ``module``'s own tensors; hooks survive deepcopy and pickle. Returns their handles."""
    return [
        module._register_state_dict_hook(after_save),
        module._register_load_state_dict_pre_hook(before_load, with_module=True),
        module.register_load_state_dict_post_hook(after_load),
    ]


def watch_zero_grad(zeroed: Callable[[torch.nn.Module, bool], None], undo: ExitStack) -> None:
    """Call ``zeroed(module, set_to_none)`` after each ``module.zero_grad()``."""
    original: Callable[..., None] = torch.nn.Module.zero_grad

    @functools.wraps(original)
    def zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        zeroed(self, set_to_none)

    replace(torch.nn.Module, "zero_grad", zero_grad, undo)


def patch_ddp_constructor(after: Callable[[DistributedDataParallel, bool], None], undo: ExitStack) -> None:
    """Call ``after(ddp, whether it broadcast rank 0's weights)`` for every DDP that is made."""
    original: Callable[..., None] = DistributedDataParallel.__init__

    @functools.wraps(original)
    def __init__(self: DistributedDataParallel, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        after(self, bool(kwargs.get("init_sync", True)))

    replace(DistributedDataParallel, "__init__", __init__, undo)


def patch_ddp_join(after: Callable[[DistributedDataParallel, int], None], undo: ExitStack) -> None:
    """Call ``after(ddp, rank)`` when ``join()`` ends, on every rank: ``rank`` of its group gave its weights to all."""
    original: Callable[..., None] = DistributedDataParallel._sync_final_model

    @functools.wraps(original)
    def _sync_final_model(self: Any, is_last_joiner: bool) -> None:
        original(self, is_last_joiner)
        after(self, self._authoritative_rank)

    replace(DistributedDataParallel, "_sync_final_model", _sync_final_model, undo)


def broadcast_elements(tensor: torch.Tensor, source: int, group: Any) -> None:
    """Broadcast ``tensor``, whose strides ranks need not share: ``dist.broadcast`` copies raw memory.

    Args:
        tensor: What ``source`` sends, and the other ranks overwrite.
        source: Global rank.
        group: Process group.
    """
    rows = tensor.contiguous()
    torch.distributed.broadcast(rows, source, group=group)
    if rows is not tensor:
        tensor.copy_(rows)


def parallel_wrapper(model: torch.nn.Module) -> str | None:
    """Name the data-parallel wrapper that ``model`` is, if it is one."""
    wrappers = (DistributedDataParallel, torch.nn.DataParallel)
    by_name = ("DistributedDataParallel", "FullyShardedDataParallel")  # apex's wrapper is not torch's
    if isinstance(model, wrappers) or type(model).__name__ in by_name:
        return type(model).__name__
    return None


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a ``DTensor``: one rank's part of a tensor."""
    return type(tensor).__name__ == "DTensor" or type(data_of(tensor)).__name__ == "DTensor"


#: Whether a tensor belongs to a lazy module that has not seen data yet.
is_uninitialized: Callable[[torch.Tensor], bool] = torch.nn.parameter.is_lazy


def is_graph_module(cls: type) -> bool:
    """Whether ``cls`` is a class of ``torch.fx``: one of a single module, on which its code is set as ``forward``."""
    return issubclass(cls, torch.fx.GraphModule)


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module behind ``torch.compile(module)``; ``model`` itself where it is not compiled."""
    if type(model).__name__ != "OptimizedModule":
        return model
    inner: torch.nn.Module = model._modules.get("_orig_mod") or model
    return inner


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


def owns_memory_alone(tensor: torch.Tensor, fresh: torch.Tensor) -> bool:
    """Whether ``tensor`` is all of its memory, and nothing else holds that: no view, array, file or other process.

    Not seen are raw pointers, and processes that were sent a tensor on a GPU. ``fresh`` is a tensor on the CPU that the
    caller made, to count what versions of torch and tracers hold of any.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return False
    if tensor.is_inference() or torch.is_inference_mode_enabled() or torch.compiler.is_compiling():
        return False
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.element_size() or not storage.resizable():
        return False  # a part of a larger memory, or the memory of an array or a file
    is_channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    if not (tensor.is_contiguous() or is_channels_last):
        return False
    if tensor.is_cpu and storage.is_shared():
        return False
    alone = fresh.untyped_storage()
    if sys.getrefcount(storage) != sys.getrefcount(alone):
        return False
    return torch._C._storage_Use_Count(storage._cdata) == torch._C._storage_Use_Count(alone._cdata)


def is_zero(optimizer: object) -> bool:
    """Whether ``optimizer`` is a ``ZeroRedundancyOptimizer``.

    Imports nothing: ``torch.distributed.optim`` takes its time.
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def steps_in_backward(optimizer: Any) -> bool:
    """Whether DDP's communication hook steps it (``overlap_with_ddp=True``)."""
    return bool(optimizer._overlap_with_ddp)


def running_module(frame: FrameType | None, bottom: FrameType | None) -> torch.nn.Module | None:
    """The innermost module whose call runs, from ``frame`` to below ``bottom``; None outside of any."""
    while frame is not None and frame is not bottom:
        if frame.f_code is _CALL:
            module: torch.nn.Module = frame.f_locals["self"]
            return module
        frame = frame.f_back
    return None
