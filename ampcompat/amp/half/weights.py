"""A model's weights in half: casting them in place and back, and what saving, loading and copying them does.

``state_dict()`` of a half model is float32: the masters themselves, detached, where there are masters (a resumed run is
then bitwise the uninterrupted one, and an in-place average over ``state_dict()`` values takes effect), copies at O3.
``load_state_dict()`` puts the incoming float32 into the master and the rounded value into the model. Both are hooks on
every module, so that ``model.backbone.load_state_dict`` works too.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from ampcompat import _torch
from ampcompat._types import HALF_DTYPES
from ampcompat.amp.half.masters import (
    Master,
    ensure_master,
    master_of,
    own_tensors,
    set_masters,
    settle,
    warn_of_replaced,
)
from ampcompat.amp.half.record import (
    HalfWeights,
    drop_half_weights,
    ensure_half_weights,
    half_weights,
    masters_by_name,
)

_CASTABLE = (*HALF_DTYPES, torch.float32, torch.float64)


# -- casting -----------------------------------------------------------------------------------------------------------
def cast_weights(
    modules: Collection[torch.nn.Module],
    dtype: torch.dtype | None,
    undo: ExitStack,
    *,
    keep_fp32: Collection[torch.nn.Module] = (),
    keep_batchnorm_fp32: bool = False,
    has_masters: bool = False,
    trained: Collection[int] = (),
) -> None:
    """Cast every floating parameter and buffer that ``modules`` hold to ``dtype``, in place; complex tensors stay.

    Parameters keep their identity. Weights that an earlier call had cast are restored from their masters first. As in
    apex (``apex/fp16_utils/fp16util.py: convert_network``), which made masters of all parameters.

    Args:
        modules: Each part of the models, once.
        dtype: Half dtype or ``torch.float32``. None leaves alone what no earlier call had cast, and restores the rest.
        undo: Gets a callback per module that makes it what it was.
        keep_fp32: Modules that stay float32.
        keep_batchnorm_fp32: Whether affine batch norm stays float32.
        has_masters: Whether half tensors get float32 masters, when these are first needed.
        trained: Ids of parameters that optimizers hold; their masters are made now.

    Host syncs: one for each weight that has a master of an earlier call.
    """
    for module in modules:
        record = half_weights(module)
        if record is not None:
            hook_added_modules(module, record)
    unshared = torch.empty(1, device="cpu")  # made here, so that no other thread holds it
    for module in modules:
        target = target_dtype(module, dtype, keep_fp32, keep_batchnorm_fp32)
        if target is None:
            continue
        before = _ModuleBefore(module)
        undo.callback(before.put_back)
        if target == torch.float32:
            _cast_own_tensors(module, target, before, (), unshared)
            unhook(module)
        else:
            hook(module, target, has_masters)
            _cast_own_tensors(module, target, before, trained, unshared)


def target_dtype(
    module: torch.nn.Module,
    dtype: torch.dtype | None,
    keep_fp32: Collection[torch.nn.Module],
    keep_batchnorm_fp32: bool,
) -> torch.dtype | None:
    """Return the dtype that the floating tensors of ``module`` are cast to; None leaves them as they are."""
    if dtype is None:  # no cast is wanted: undo that of an earlier call
        was_cast = half_weights(module) is not None
        return torch.float32 if was_cast else None
    if module in keep_fp32:
        return torch.float32
    if keep_batchnorm_fp32 and _is_affine_batch_norm(module):
        return torch.float32
    return dtype


def _is_affine_batch_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.affine


def _cast_own_tensors(
    module: torch.nn.Module,
    target: torch.dtype,
    before: _ModuleBefore,
    trained: Collection[int],
    unshared: torch.Tensor,
) -> None:
    """Cast the floating tensors that ``module`` itself holds, and make masters of those that are ``trained``."""
    for name, tensor in own_tensors(module):
        if tensor.dtype not in _CASTABLE:
            continue
        is_wide_already = tensor.dtype == torch.float32 and master_of(tensor) is None
        if target == torch.float32 and is_wide_already:  # a tied tensor, too, that was cast back as another module's
            continue
        master = before.masters.get(name)  # the index may have been reset since
        if master is None or master.half is not tensor:
            master = master_of(tensor)
        if master is not None:
            master.register()
            settle([master])
        adopts = master is None and _leaves_memory(tensor, target, unshared)
        exact = _torch.data_of(tensor) if master is None else master.value.detach()
        if tensor.dtype != target:
            before.note(tensor, master)
            _cast(tensor, exact, target)
            if master is not None:
                _follow_cast(master, target)
        if _is_trained(tensor, master, trained):
            if adopts:
                exact = torch.nn.Parameter(exact, tensor.requires_grad)
            ensure_master(module, name, exact, adopt=adopts)


def _leaves_memory(tensor: torch.Tensor, target: torch.dtype, unshared: torch.Tensor) -> bool:
    """Whether a cast to ``target`` leaves float32 memory that no other tensor holds.

    A new master takes that over: no copy, and no second peak of memory.
    """
    if tensor.dtype != torch.float32 or target == torch.float32:
        return False
    return _torch.owns_memory_alone(tensor, unshared)


def _cast(tensor: torch.Tensor, exact: torch.Tensor, target: torch.dtype) -> None:
    """Give ``tensor`` the values ``exact`` in ``target``, in memory of its own."""
    # A gradient cannot have another dtype than its parameter, and a stale one must not be stepped with.
    tensor.grad = None
    _torch.set_data(tensor, exact.clone() if target == exact.dtype else exact.to(target))


def _follow_cast(master: Master, target: torch.dtype) -> None:
    """Tell ``master`` that its tensor was just cast to ``target``; a float32 one needs no master."""
    if target == torch.float32:
        master.retire()
        return
    master.dtype = target
    master.push()


def _is_trained(tensor: torch.Tensor, master: Master | None, trained: Collection[int]) -> bool:
    """Whether an optimizer holds ``tensor``, or its master from an earlier call; ``trained`` has the ids it holds."""
    if id(tensor) in trained:
        return True
    return master is not None and id(master.value) in trained


class _TensorBefore(NamedTuple):
    """A tensor that is about to be cast, with the data, the gradient and the master that it has."""

    tensor: torch.Tensor
    data: torch.Tensor
    grad: torch.Tensor | None
    master: Master | None

    def put_back(self) -> None:
        _torch.put_back(self.tensor, self.data, self.grad)
        if self.master is not None:
            self.master.dtype = self.data.dtype
            self.master.register()
            self.master.record()


class _ModuleBefore:
    """A module's own tensors, masters and hooks as they were before a cast.

    Attributes:
        dtype: The half dtype of its tensors; None where amp had not cast them.
        has_masters: As in its :class:`HalfWeights`.
        masters: The module's masters, by name.
        tensors: The tensors that were cast.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        record = half_weights(module)
        self.module = module
        self.dtype = None if record is None else record.dtype
        self.has_masters = record is not None and record.has_masters
        self.masters: dict[str, Master] = {} if record is None else dict(record.masters)
        self.tensors: list[_TensorBefore] = []

    def note(self, tensor: torch.Tensor, master: Master | None) -> None:
        """Remember ``tensor``, which is about to be cast."""
        self.tensors.append(_TensorBefore(tensor, _torch.data_of(tensor), tensor.grad, master))

    def put_back(self) -> None:
        """Make the module what it was."""
        for before in reversed(self.tensors):
            before.put_back()
        if self.dtype is None:
            unhook(self.module)
            return
        hook(self.module, self.dtype, self.has_masters)
        set_masters(self.module, self.masters)


# -- hooks on saving and loading ---------------------------------------------------------------------------------------
def hook(module: torch.nn.Module, dtype: torch.dtype, has_masters: bool) -> None:
    """Record that ``module``'s own tensors are ``dtype``, and hook saving and loading of them."""
    record = ensure_half_weights(module, dtype, has_masters)
    if not record.hooks:
        record.hooks = _torch.register_state_dict_hooks(
            module, after_save=_export, before_load=_take_in, after_load=_loaded
        )


def unhook(module: torch.nn.Module) -> None:
    """Remove the hooks on saving and loading of ``module``, whose tensors are float32 again, and its masters."""
    set_masters(module, {})
    drop_half_weights(module)


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether saving and loading of ``module``'s own tensors is hooked."""
    record = half_weights(module)
    return record is not None and bool(record.hooks)


def hook_added_modules(module: torch.nn.Module, record: HalfWeights) -> list[tuple[str, torch.nn.Module]]:
    """Hook what was added below ``module`` after ``initialize`` and is half; returns these modules by name.

    Args:
        module: A module that amp has cast.
        record: That of ``module``: what was added is treated like it.
    """
    added: list[tuple[str, torch.nn.Module]] = []
    for name, part in module.named_modules():
        if is_hooked(part):
            continue
        if any(tensor.dtype == record.dtype for _, tensor in own_tensors(part)):
            added.append((name, part))
    for _, part in added:
        hook(part, record.dtype, record.has_masters)
    return added


def _export(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Hook after ``state_dict()``: exchange half tensors for their masters, or for float32 copies."""
    record = half_weights(module)
    if record is None:
        return
    if torch.onnx.is_in_onnx_export():  # it looks up, among these tensors, those that the traced forward reads
        return
    for name, part in hook_added_modules(module, record):
        _export(part, state_dict, f"{prefix}{name}.", local_metadata)
    warn_of_replaced(record.masters.values())
    for name, tensor in own_tensors(module):
        saved = state_dict.get(prefix + name)
        if tensor.dtype != record.dtype or not isinstance(saved, torch.Tensor) or saved.dtype != record.dtype:
            continue
        if not record.has_masters:
            state_dict[prefix + name] = saved.float()
            continue
        master = ensure_master(module, name)
        settle([master])
        keeps_variables = saved is tensor  # state_dict(keep_vars=True)
        state_dict[prefix + name] = master.value if keeps_variables else master.export()


@torch.no_grad()
def _take_in(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *_: Any) -> None:
    """Hook before ``load_state_dict()``: put what is loaded into masters; torch then loads the rounded values."""
    record = half_weights(module)
    if record is None:
        return
    hook_added_modules(module, record)  # in time: torch loads children after their parent
    assigns = local_metadata.get("assign_to_params_buffers", False)
    for name, tensor in own_tensors(module):
        loaded: Any = state_dict.get(prefix + name)
        if tensor.dtype != record.dtype or not _can_be_loaded(loaded, tensor):
            continue
        if assigns:
            state_dict[prefix + name] = loaded.to(record.dtype)
        if record.has_masters:
            master = ensure_master(module, name)
            address = loaded.data_ptr()  # 0 for a wrapper around other tensors
            is_master_itself = address != 0 and address == master.value.data_ptr()
            if not is_master_itself:
                master.value.copy_(loaded)


def _can_be_loaded(loaded: Any, tensor: torch.Tensor) -> bool:
    """Whether ``loaded`` has values that fit ``tensor``; where it does not, torch reports the mismatch."""
    if not isinstance(loaded, torch.Tensor) or loaded.is_meta:
        return False
    return loaded.shape == tensor.shape and loaded.is_floating_point() and loaded.layout == torch.strided


def _loaded(module: torch.nn.Module, incompatible_keys: Any) -> None:
    """Hook after ``load_state_dict()``: round the masters that were loaded into the model."""
    for name, master in masters_by_name(module).items():
        held = module._parameters.get(name, module._buffers.get(name))
        if held is None:
            continue
        was_assigned = held is not master.half  # load_state_dict(assign=True)
        if was_assigned:
            master.rebind(held)
        if was_assigned or master.is_value_counted:
            master.push()
