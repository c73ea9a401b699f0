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
    keep_fp32: Collection[torch.nn.Module] = (),
    keep_batchnorm_fp32: bool = False,
    trained: Collection[int] | None = None,
) -> None:
    """Cast every floating parameter and buffer that ``modules`` hold to ``dtype``, in place; complex tensors stay.

    Parameters keep their identity; weights that an earlier call had cast are restored from their masters first. None
    leaves alone what no earlier call had cast, and restores the rest. Modules in ``keep_fp32`` stay float32, and with
    ``keep_batchnorm_fp32`` affine batch norm, as in apex's ``convert_module``. Half tensors get float32 masters: now
    where an optimizer holds them (``trained``, by id), else when needed; without ``trained`` none.
    """
    for module in modules:
        if "_amp_half" in module.__dict__:
            hook_new(module, *module.__dict__["_amp_half"])
    unshared = torch.empty(1, device="cpu")  # made here, so that no other thread holds it
    for module in modules:
        target = target_dtype(module, dtype, keep_fp32, keep_batchnorm_fp32)
        if target is None:
            continue
        before = _ModuleBefore(module)
        undo.callback(before.put_back)
        half = None if target == torch.float32 else target
        for name, tensor in own_tensors(module):
            if tensor.dtype not in _CASTABLE:
                continue
            master = before.masters.get(name) or master_of(tensor)
            if master is not None:
                master.register()
                master.reconcile(compare=True)
            # A new master takes the memory that the weight leaves, where nobody else holds it: no copy, no second peak.
            leaves_memory = master is None and tensor.dtype == torch.float32 and target != torch.float32
            adopts = leaves_memory and _torch.owns_memory_alone(tensor, unshared)
            exact = tensor.data if master is None else master.value.detach()
            if tensor.dtype != target:
                before.note(tensor, master)
                _cast(tensor, exact, target)
                _follow_cast(master, half)
            if half is not None and _is_trained(tensor, master, trained):
                if adopts:
                    exact = torch.nn.Parameter(exact, tensor.requires_grad)
                ensure_master(module, name, exact, adopt=adopts)
        hook(module, half, trained is not None)


def target_dtype(
    module: torch.nn.Module,
    dtype: torch.dtype | None,
    keep_fp32: Collection[torch.nn.Module],
    keep_batchnorm_fp32: bool,
) -> torch.dtype | None:
    """Return the dtype that the floating tensors of ``module`` are cast to; None leaves them as they are."""
    if dtype is None:  # no cast is wanted: undo that of an earlier call
        was_cast = "_amp_half" in module.__dict__
        return torch.float32 if was_cast else None
    if module in keep_fp32:
        return torch.float32
    if keep_batchnorm_fp32 and _is_affine_batch_norm(module):
        return torch.float32
    return dtype


def _is_affine_batch_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.affine


def _cast(tensor: torch.Tensor, exact: torch.Tensor, target: torch.dtype) -> None:
    """Give ``tensor`` the values ``exact`` in ``target``, in memory of its own."""
    # A gradient cannot have another dtype than its parameter, and a stale one must not be stepped with.
    tensor.grad = None
    tensor.data = exact.clone() if target == exact.dtype else exact.to(target)


def _follow_cast(master: Master | None, half: torch.dtype | None) -> None:
    """Tell the master of a tensor that was just cast to ``half``; with None it is float32 and needs no master."""
    if master is None:
        return
    if half is None:
        master.retire()
        return
    master.dtype = half
    master.push()


def _is_trained(tensor: torch.Tensor, master: Master | None, trained: Collection[int] | None) -> bool:
    """Whether an optimizer holds ``tensor``, or its master from an earlier call; ``trained`` has the ids it holds."""
    if not trained:
        return False
    return id(tensor) in trained or (master is not None and id(master.value) in trained)


class _ModuleBefore:
    """A module's own tensors, masters and hooks as they were before a cast.

    Attributes:
        masters: The module's masters, by name.
        tensors: The tensors that were cast, each with the data, the gradient and the master that it had.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.half, self.had_masters = module.__dict__.get("_amp_half", (None, False))
        self.masters: dict[str, Master] = dict(module.__dict__.get("_amp_masters", {}))
        self.tensors: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Master | None]] = []

    def note(self, tensor: torch.Tensor, master: Master | None) -> None:
        """Remember ``tensor``, which is about to be cast."""
        self.tensors.append((tensor, tensor.data, tensor.grad, master))

    def put_back(self) -> None:
        """Make the module what it was."""
        for tensor, data, grad, master in reversed(self.tensors):
            _torch.put_back(tensor, data, grad)
            if master is not None:
                master.dtype = data.dtype
                master.register()
                master.settle()
        hook(self.module, self.half, self.had_masters)
        set_masters(self.module, self.masters)


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
