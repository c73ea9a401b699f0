"""Casting a model's weights to half in place, and back to float32."""

from __future__ import annotations

from collections.abc import Collection, Set

import torch

from ampcompat import _torch
from ampcompat._types import HALF_DTYPES
from ampcompat.amp.half.masters import Master, align_written, master_of
from ampcompat.amp.half.record import drop_masters, ensure_master, masters_by_name, note_half, own_tensors, record_of
from ampcompat.amp.half.saving import hook, hook_added_modules, remove_record

_CASTABLE = (*HALF_DTYPES, torch.float32, torch.float64)


def cast_weights(
    modules: Collection[torch.nn.Module],
    dtype: torch.dtype | None,
    *,
    keep_fp32: Collection[torch.nn.Module] = (),
    keep_batchnorm_fp32: bool = False,
    has_masters: bool = False,
    trained: Set[int] = frozenset(),
) -> None:
    """Cast every floating parameter and buffer that ``modules`` hold to ``dtype``, in place; complex tensors stay.

    Parameters keep their identity. Weights that were cast before are restored from their masters first. apex did the
    same (``apex/fp16_utils/fp16util.py: convert_network``), with masters of all parameters.

    A tensor changes only when its new memory has been allocated, and one that is cast already stays as it is: a call
    that ran out of memory can be made again, and loses no bit.

    Args:
        modules: Each part of the models, once.
        dtype: Half dtype or ``torch.float32``. None leaves alone what amp has not cast, and restores the rest.
        keep_fp32: Modules that stay float32.
        keep_batchnorm_fp32: Whether affine batch norm stays float32.
        has_masters: Whether half tensors get float32 masters, when these are first needed.
        trained: Ids of parameters that optimizers hold; their masters are made now.

    Host syncs: none.
    """
    for module in modules:
        record = record_of(module)
        if record is not None:
            hook_added_modules(module, record)
    refcount_probe = torch.empty(1, dtype=torch.float32, device="cpu")  # made here, so that no other thread holds it
    for module in modules:
        target = target_dtype(module, dtype, keep_fp32, keep_batchnorm_fp32)
        if target is None:
            continue
        dtypes_before = [tensor.dtype for _, tensor in own_tensors(module)]
        if target == torch.float32:
            _restore(module)
            remove_record(module)
        else:
            note_half(module, target, has_masters)
            hook(module)
            _cast_module_to_half(module, target, has_masters, trained, refcount_probe)
            if not has_masters:
                drop_masters(module)
        was_cast = [tensor.dtype for _, tensor in own_tensors(module)] != dtypes_before
        if was_cast and isinstance(module, torch.nn.RNNBase):
            _flatten(module)


def target_dtype(
    module: torch.nn.Module,
    dtype: torch.dtype | None,
    keep_fp32: Collection[torch.nn.Module],
    keep_batchnorm_fp32: bool,
) -> torch.dtype | None:
    """Return the dtype that the floating tensors of ``module`` are cast to; None leaves them as they are."""
    if dtype is None:  # no cast is wanted: undo the cast of an earlier session
        was_cast = record_of(module) is not None
        return torch.float32 if was_cast else None
    if isinstance(module, torch.jit.ScriptModule):  # without weights: others are refused
        return None
    if module in keep_fp32:
        return torch.float32
    if keep_batchnorm_fp32 and _is_affine_batch_norm(module):
        return torch.float32
    return dtype


def _is_affine_batch_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.affine


# -- the tensors of one module -----------------------------------------------------------------------------------------
def _restore(module: torch.nn.Module) -> None:
    """Cast the floating tensors that ``module`` itself holds to float32, each to the values of its master."""
    for name, tensor in _castable_tensors(module):
        is_restored = tensor.dtype == torch.float32 and master_of(tensor) is None
        if is_restored:  # through a module that it is tied to, or by a call that failed
            continue
        master = _aligned_master(module, name, tensor)
        if master is None:
            _cast(tensor, _torch.data_of(tensor), torch.float32)
        else:
            _cast(tensor, master.value.detach(), torch.float32)
            master.retire()


def _cast_module_to_half(
    module: torch.nn.Module,
    dtype: torch.dtype,
    has_masters: bool,
    trained: Set[int],
    refcount_probe: torch.Tensor,
) -> None:
    """Cast the floating tensors that ``module`` itself holds to ``dtype``, and make masters of the ``trained`` ones."""
    for name, tensor in _castable_tensors(module):
        master = _aligned_master(module, name, tensor)
        if master is not None:
            _cast_to_half_again(tensor, master, dtype)
            if not has_masters:
                tensor.grad = None
                master.retire()
            elif id(tensor) in trained or id(master.value) in trained:
                ensure_master(module, name)  # the module notes a master that another one, tied to it, has made
        elif id(tensor) in trained:
            value = _float32_values(tensor, refcount_probe)
            _cast_to_half(tensor, dtype)
            ensure_master(module, name, torch.nn.Parameter(value, tensor.requires_grad))
        else:
            _cast_to_half(tensor, dtype)


def _cast_to_half_again(tensor: torch.Tensor, master: Master, dtype: torch.dtype) -> None:
    """Cast ``tensor``, which has a master, to ``dtype``: it may be float32, or the other half dtype."""
    if tensor.dtype != dtype:
        _cast(tensor, master.value.detach(), dtype)
        master.dtype = dtype
        master.push()


def _cast_to_half(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        _cast(tensor, _torch.data_of(tensor), dtype)


def _float32_values(tensor: torch.Tensor, refcount_probe: torch.Tensor) -> torch.Tensor:
    """The values of ``tensor``, about to be cast, for its master: its own float32 memory if nothing else holds that."""
    if tensor.dtype == torch.float32 and _torch.owns_memory_alone(tensor, refcount_probe):
        return _torch.data_of(tensor)
    return _torch.data_of(tensor).to(torch.float32, copy=True)


def _flatten(module: torch.nn.RNNBase) -> None:
    """Put the weights of ``module`` into one buffer for cuDNN again: the cast gave each memory of its own."""
    module.flatten_parameters()
    for master in masters_by_name(module).values():
        master.note_equal()  # the half weights were moved, not written


def _castable_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in own_tensors(module) if tensor.dtype in _CASTABLE]


def _aligned_master(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> Master | None:
    """Return the master of ``tensor``, ``module``'s ``name``, with both copies equal; None if it has none."""
    master = masters_by_name(module).get(name)  # the index may have been reset since
    if master is None or master.half is not tensor:
        master = master_of(tensor)
    if master is not None:
        master.register()
        align_written([master])
    return master


def _cast(tensor: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> None:
    """Give ``tensor`` the ``values`` in ``dtype``, in memory of its own."""
    data = values.to(dtype, copy=True)
    # A gradient cannot have another dtype than its parameter, and a stale one must not be stepped with.
    tensor.grad = None
    _torch.set_data(tensor, data)
