"""A model's weights in half: casting them in place and back, and what saving, loading and copying them does.

``state_dict()`` of a half model is float32: the masters themselves, detached, where there are masters (a resumed run is
then bitwise the uninterrupted one, and an in-place average over ``state_dict()`` values takes effect), copies at O3.
``load_state_dict()`` puts the incoming float32 into the master and the rounded value into the model. Both are hooks on
every module, so that ``model.backbone.load_state_dict`` works too; a module carries ``_amp_half``, its half dtype and
whether there are masters, while its tensors are half.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import torch

from ampcompat import _torch
from ampcompat.amp.masters import Master, ensure_master, master_of, own_tensors, rebind, set_masters
from ampcompat.amp.properties import HALF_DTYPES

_CASTABLE = (*HALF_DTYPES, torch.float32, torch.float64)


def cast_weights(
    modules: Collection[torch.nn.Module],
    dtype: torch.dtype | None,
    undo: ExitStack,
    kept: Collection[torch.nn.Module] = (),
    keep_batchnorm_fp32: bool = False,
    trained: Collection[int] | None = None,
) -> None:
    """Cast every floating parameter and buffer that ``modules`` hold to ``dtype``, in place; complex tensors stay.

    Parameters keep their identity; weights that an earlier call had cast are restored from their masters first. None
    leaves alone what no earlier call had cast, and restores the rest. ``kept`` modules stay float32, and with
    ``keep_batchnorm_fp32`` affine batch norm, as in apex's ``convert_module``. Half tensors get float32 masters: now
    where an optimizer holds them (``trained``, by id), else when needed; without ``trained`` none.
    """
    for module in modules:
        if "_amp_half" in module.__dict__:
            hook_new(module, *module.__dict__["_amp_half"])
    new = torch.empty(1, device="cpu")  # which no other thread holds
    for module in modules:
        before, held = module.__dict__.get("_amp_half"), dict(module.__dict__.get("_amp_masters", {}))
        norm = keep_batchnorm_fp32 and isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.affine
        target = torch.float32 if (before is not None if dtype is None else norm or module in kept) else dtype
        if target is None:
            continue
        half = None if target == torch.float32 else target
        undo.callback(_undo_cast, module, before, held, taken := list[Any]())
        for name, tensor in own_tensors(module):
            if tensor.dtype not in _CASTABLE:
                continue
            master = held.get(name) or master_of(tensor)
            if master is not None:
                master.register()
                master.reconcile(compare=True)
            alone = master is None and tensor.dtype == torch.float32 != target and _torch.owns_memory_alone(tensor, new)
            exact = tensor.data if master is None else master.value.detach()
            if tensor.dtype != target:
                taken.append((tensor, exact if master is None else tensor.data, tensor.grad, master))
                # A gradient cannot have another dtype than its parameter, and a stale one must not be stepped with.
                tensor.grad = None
                tensor.data = exact.clone() if target == exact.dtype else exact.to(target)
                if master is not None and half is not None:
                    master.dtype = half
                    master.push()
                elif master is not None:
                    master.retire()
            if half and trained and (id(tensor) in trained or (master is not None and id(master.value) in trained)):
                if alone:  # the master takes the memory that the weight just left: no copy, no second peak
                    exact = torch.nn.Parameter(exact, tensor.requires_grad)
                ensure_master(module, name, exact, adopt=alone)
        hook(module, half, trained is not None)


def _undo_cast(module: torch.nn.Module, before: Any, held: dict[str, Master], taken: list[Any]) -> None:
    """Give ``module`` its weights, hooks (``before``) and masters (``held``) of before a cast."""
    for tensor, data, grad, master in reversed(taken):
        _torch.put_back(tensor, data, grad)
        if master is not None:
            master.dtype = data.dtype
            master.register()
            master.settle()
    hook(module, *(before or (None, False)))
    set_masters(module, held)


def hook(module: torch.nn.Module, half: torch.dtype | None, master_weights: bool) -> None:
    """Hook saving and loading of ``module``'s own tensors; None takes the hooks off, and the masters."""
    if half is None:
        set_masters(module, {})
        for handle in module.__dict__.pop("_amp_state_hooks", ()):
            handle.remove()
        module.__dict__.pop("_amp_half", None)
        return
    object.__setattr__(module, "_amp_half", (half, master_weights))
    if "_amp_state_hooks" not in module.__dict__:
        module.__dict__["_amp_state_hooks"] = _torch.register_state_dict_hooks(module, _hand_out, _take_in, _loaded)


def hook_new(module: torch.nn.Module, half: torch.dtype, master_weights: bool) -> list[tuple[str, torch.nn.Module]]:
    """Hook what was added below ``module`` after ``initialize`` and is half; returns these modules by name."""
    found = [
        (name, part)
        for name, part in module.named_modules()
        if "_amp_half" not in part.__dict__ and any(tensor.dtype == half for _, tensor in own_tensors(part))
    ]
    for _, part in found:
        hook(part, half, master_weights)
    return found


def _hand_out(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    half, master_weights = module.__dict__.get("_amp_half", (None, False))
    for name, part in hook_new(module, half, master_weights) if half is not None else ():
        _hand_out(part, state_dict, f"{prefix}{name}.", local_metadata)
    for name, tensor in own_tensors(module):
        handed = state_dict.get(prefix + name)
        if half is None or not isinstance(handed, torch.Tensor) or tensor.dtype != half or handed.dtype != half:
            continue
        if not master_weights:
            state_dict[prefix + name] = handed.float()
            continue
        master = ensure_master(module, name)
        master.reconcile(compare=True)
        state_dict[prefix + name] = master.value if handed is tensor else master.hand_out()  # tensor: keep_vars


@torch.no_grad()
def _take_in(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *_: Any) -> None:
    half, master_weights = module.__dict__.get("_amp_half", (None, False))
    if half is not None:
        hook_new(module, half, master_weights)  # in time: torch loads children after their parent
    for name, tensor in own_tensors(module):
        incoming = state_dict.get(prefix + name)
        if half is None or tensor.dtype != half or not isinstance(incoming, torch.Tensor) or incoming.is_meta:
            continue
        if incoming.shape != tensor.shape or not incoming.is_floating_point() or incoming.layout != torch.strided:
            continue  # torch reports the mismatch, or that it cannot be copied
        if local_metadata.get("assign_to_params_buffers", False):
            state_dict[prefix + name] = incoming.to(half)
        if master_weights:
            master = ensure_master(module, name)
            address = incoming.data_ptr()  # 0 for a wrapper around other tensors
            if not address or address != master.value.data_ptr():
                master.value.copy_(incoming)


def _loaded(module: torch.nn.Module, incompatible_keys: Any) -> None:
    for name, master in module.__dict__.get("_amp_masters", {}).items():
        now = module._parameters.get(name, module._buffers.get(name))
        if now is not None and now is not master.half:  # load_state_dict(assign=True)
            rebind(master, now)
        elif now is not None and master.value._version != master.seen[1]:
            master.push()
