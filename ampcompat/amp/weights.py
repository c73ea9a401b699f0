"""A model's weights in half: casting them in place and back, and what saving, loading and copying them does.

``state_dict()`` of a half model is float32: the masters themselves, detached, where there are masters (a resumed run is
then bitwise the uninterrupted one, and an in-place average over ``state_dict()`` values takes effect), copies at O3.
``load_state_dict()`` puts the incoming float32 into the master and the rounded value into the model. Both are hooks on
every module, so that ``model.backbone.load_state_dict`` works too; a module carries ``_amp_half``, its half dtype and
whether there are masters, while its tensors are half.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from ampcompat import _torch
from ampcompat._log import warn_once
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.masters import ensure_master, master_of, own_tensors, rebind, set_masters
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
    for module in modules:
        before, held = module.__dict__.get("_amp_half"), dict(module.__dict__.get("_amp_masters", {}))
        norm = keep_batchnorm_fp32 and isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.affine
        target = torch.float32 if (before is not None if dtype is None else norm or module in kept) else dtype
        if target is None:
            continue
        half = None if target == torch.float32 else target
        undo.callback(set_masters, module, held)
        undo.callback(hook, module, *(before or (None, False)))
        for name, tensor in own_tensors(module):
            if tensor.dtype not in _CASTABLE:
                continue
            master = held.get(name) or master_of(tensor)
            if master is not None:
                master.register()
                master.absorb()
            alone = tensor.dtype == torch.float32 != target and master is None and _torch.owns_memory_alone(tensor)
            exact = tensor.detach() if master is None else master.value.detach()
            if tensor.dtype != target:
                if master is not None:
                    undo.callback(master.settle)
                    undo.callback(master.register)
                    undo.callback(setattr, master, "dtype", tensor.dtype)
                undo.callback(setattr, tensor, "grad", tensor.grad)
                undo.callback(setattr, tensor, "data", tensor.data)  # runs first
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
                    exact = torch.nn.Parameter(exact.data, tensor.requires_grad)
                ensure_master(module, name, exact, adopt=alone)
        hook(module, half, trained is not None)
        if half is None:
            set_masters(module, {})


def hook(module: torch.nn.Module, half: torch.dtype | None, master_weights: bool) -> None:
    """Hook saving and loading of ``module``'s own tensors; None takes the hooks off."""
    if half is None:
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
        master.absorb()
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
    average: HalfAverage | None = module.__dict__.get("_amp_average")
    if average is not None and (param := average.param()) is not None:
        average.writes, average.version = 0, param._version  # what was loaded is no average in half
    for name, master in module.__dict__.get("_amp_masters", {}).items():
        now = module._parameters.get(name, module._buffers.get(name))
        if now is not None and now is not master.half:  # load_state_dict(assign=True)
            rebind(master, now)
        elif now is not None and master.value._version != master.seen[1]:
            master.push()


#: Writes before the look, elements looked at, and the least share of the way that a copy which follows has come.
_WRITES, _SAMPLE, _FOLLOWS = 8, 256, 0.75


@dataclass(eq=False)
class HalfAverage:
    """Notices an average of weights that is kept in half, where it cannot move.

    ``ema = copy.deepcopy(model)`` and then ``e.mul_(.9999).add_(p, alpha=.0001)`` over ``parameters()`` rounds to half
    at every update at O2 and O3, as under apex. The module that holds a model's largest half weight carries such an
    object; that of a deepcopy knows the original's weight and looks once, after several writes by others than amp: a
    copy far behind its original is such an average; a teacher that is frozen, or copied whole at times, is not.
    """

    param: TensorWeakRef
    original: TensorWeakRef  # itself, where it is no copy
    birth: torch.Tensor | None = None  # a sample of a copy as it was made
    writes: int = 0
    version: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> HalfAverage | None:
        param = self.param()
        if param is None or not _torch.has_storage(param):
            return None
        twin = copy.deepcopy(param, memo)
        copied = HalfAverage(TensorWeakRef(twin), self.param, _sample(twin), 0, twin._version)
        state.observers.append(copied)
        return copied

    def __reduce__(self) -> Any:
        return type(None), ()  # what comes from a file is no copy of a running model

    def on_step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Count writes after a step; once there are enough, compare: one host sync."""
        param, original, birth = self.param(), self.original(), self.birth
        if param is not None and original is not None and birth is not None and original.shape == param.shape:
            master = master_of(param)
            if master is None or master.before_writes is not None or param._version != master.seen[0]:
                self.writes += param._version - self.version  # by others: amp's own writes come from the master
            self.version = param._version
            if self.writes < _WRITES:
                return
            now, birth, goal = [t.to(param.device).float() for t in (_sample(param), birth, _sample(original))]
            if (now - birth).abs().sum() < _FOLLOWS * (goal - birth).abs().sum():
                warn_once(
                    "half average",
                    f"A deepcopy of a model whose weights amp.initialize cast to {param.dtype} is being updated over"
                    " its parameters(), as a moving average is - in half small updates round to nothing (a decay of"
                    " 0.9999 cannot move) - average over state_dict() values instead: at O2 these are the float32"
                    " masters.",
                )
        state.observers[:] = [one for one in state.observers if one is not self]


def watch_averages(model: torch.nn.Module) -> None:
    """Have deepcopies of ``model`` looked at: is one updated as a moving average, in half?"""
    half = [
        (param.numel(), module, param)
        for module in model.modules()
        for param in module._parameters.values()
        if param is not None and param.dtype in HALF_DTYPES
    ]
    if half:
        _, module, param = max(half, key=itemgetter(0))
        object.__setattr__(module, "_amp_average", HalfAverage(TensorWeakRef(param), TensorWeakRef(param)))


def _sample(param: torch.Tensor) -> torch.Tensor:
    # Copied as integers: a report counts the floating point ops of the script.
    flat = _torch.bits(param.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)].clone().view(param.dtype)
