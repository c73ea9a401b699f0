"""What saving and loading a half model does: hooks on every module, so that ``model.backbone.load_state_dict`` works.

``state_dict()`` of a half model is float32: the masters themselves, detached, where there are masters (a resumed run is
then bitwise the uninterrupted one, and an in-place average over ``state_dict()`` values takes effect), copies at O3.
``load_state_dict()`` puts the incoming float32 into the master and the rounded value into the model.
"""

from __future__ import annotations

from typing import Any

import torch

from ampcompat import _torch
from ampcompat.amp.half.masters import Master, align_for_save, copies_lock, value_written
from ampcompat.amp.half.record import (
    ATTRIBUTE,
    HalfWeights,
    check_replaced,
    drop_masters,
    ensure_master,
    masters_by_name,
    note_half,
    own_tensors,
    record_of,
)


def hook(module: torch.nn.Module) -> None:
    """Hook saving and loading of ``module``'s own tensors, where that is not done; it has a record."""
    record: HalfWeights = module.__dict__[ATTRIBUTE]
    if not record.hooks:
        record.hooks = _torch.register_state_dict_hooks(
            module, after_save=_export, before_load=_load_masters, after_load=_rebind_and_round
        )


def remove_record(module: torch.nn.Module) -> None:
    """Remove the record of ``module``, whose tensors are float32 again, with its masters and hooks."""
    drop_masters(module)
    record: HalfWeights | None = module.__dict__.pop(ATTRIBUTE, None)
    if record is not None:
        for handle in record.hooks:
            handle.remove()


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether saving and loading of ``module``'s own tensors is hooked."""
    record = record_of(module)
    return record is not None and bool(record.hooks)


def hook_added_modules(module: torch.nn.Module, record: HalfWeights) -> list[tuple[str, torch.nn.Module]]:
    """Hook what was added below ``module`` after ``initialize`` and is half; returns these modules by name.

    Args:
        module: A module that amp has cast.
        record: The record of ``module``; what was added gets the same dtype and, if ``module`` has them, masters.
    """
    added: list[tuple[str, torch.nn.Module]] = []
    for name, part in module.named_modules():
        if is_hooked(part):
            continue
        if any(tensor.dtype == record.dtype for _, tensor in own_tensors(part)):
            added.append((name, part))
    for _, part in added:
        note_half(part, record.dtype, record.has_masters)
        hook(part)
    return added


# -- the hooks ---------------------------------------------------------------------------------------------------------
def _export(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Hook after ``state_dict()``: exchange half tensors for their masters, or for float32 copies."""
    record = record_of(module)
    if record is None:
        return
    if torch.onnx.is_in_onnx_export():  # it looks up the tensors that the traced forward reads
        return
    with copies_lock:  # another thread may train the model
        for name, part in hook_added_modules(module, record):
            _export(part, state_dict, f"{prefix}{name}.", local_metadata)
        check_replaced(record.masters.values())
        _export_own_tensors(module, record, state_dict, prefix)


def _export_own_tensors(module: torch.nn.Module, record: HalfWeights, state_dict: dict[str, Any], prefix: str) -> None:
    for name, tensor in own_tensors(module):
        saved: Any = state_dict.get(prefix + name)
        is_saved_in_half = isinstance(saved, torch.Tensor) and saved.dtype == record.dtype
        if tensor.dtype != record.dtype or not is_saved_in_half:
            continue
        if not record.has_masters:
            state_dict[prefix + name] = saved.float()
            continue
        master = ensure_master(module, name)
        align_for_save([master])
        keeps_variables = saved is tensor  # state_dict(keep_vars=True)
        if keeps_variables:
            state_dict[prefix + name] = master.value
        else:
            if master.is_param:
                master.is_exported = True
            state_dict[prefix + name] = master.value.detach()


@torch.no_grad()
def _load_masters(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *_: Any
) -> None:
    """Hook before ``load_state_dict()``: put what is loaded into masters; torch then loads the rounded values."""
    record = record_of(module)
    if record is None:
        return
    hook_added_modules(module, record)  # in time: torch loads children after their parent
    assigns = local_metadata.get("assign_to_params_buffers", False)
    for name, tensor in own_tensors(module):
        loaded: Any = state_dict.get(prefix + name)
        if tensor.dtype != record.dtype or not _can_be_loaded(loaded, tensor):
            continue
        if assigns and not loaded.is_floating_point():
            continue  # torch refuses it
        if assigns:
            state_dict[prefix + name] = loaded.to(record.dtype)
        if record.has_masters:
            _load_master(ensure_master(module, name), loaded)


def _load_master(master: Master, loaded: torch.Tensor) -> None:
    address = loaded.data_ptr()  # 0 for a wrapper around other tensors
    is_master_itself = address != 0 and address == master.value.data_ptr()
    if not is_master_itself:
        master.value.copy_(loaded)


def _can_be_loaded(loaded: Any, tensor: torch.Tensor) -> bool:
    """Whether ``loaded`` has values that fit ``tensor``; where it does not, torch reports the mismatch."""
    if not isinstance(loaded, torch.Tensor) or loaded.is_meta:
        return False
    return loaded.shape == tensor.shape and not loaded.is_complex() and loaded.layout == torch.strided


def _rebind_and_round(module: torch.nn.Module, incompatible_keys: Any) -> None:
    """Hook after ``load_state_dict()``: round the masters that were loaded into the model."""
    for name, master in masters_by_name(module).items():
        held = module._parameters.get(name, module._buffers.get(name))
        if held is None:
            continue
        was_assigned = held is not master.half  # load_state_dict(assign=True)
        if was_assigned:
            master.rebind(held)
        if was_assigned or value_written([master]):
            master.push()
