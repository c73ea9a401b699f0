"""What ``state_dict`` and ``load_state_dict`` of a half model do, on every module of it.

``state_dict()`` is float32: the masters themselves, detached, where there are masters (so that a resumed run is bitwise
the uninterrupted one, and an in-place average over ``state_dict()`` values takes effect), copies at O3.
``load_state_dict()`` puts the incoming float32 into the master and the rounded value into the model.
"""

from __future__ import annotations

from typing import Any

import torch

from ampcompat import _torch
from ampcompat.amp import master_index


def install(module: torch.nn.Module, half: torch.dtype, master_weights: bool) -> None:
    """Hook ``module`` (not its children). Called again, it only changes what the hooks do."""
    object.__setattr__(module, "_amp_half", (half, master_weights))
    if "_amp_state_hooks" not in module.__dict__:
        handles: list[Any] = []
        object.__setattr__(module, "_amp_state_hooks", handles)
        _torch.register_state_dict_hooks(module, _hand_out, _take_in, _loaded, handles)


def remove(module: torch.nn.Module) -> None:
    """Undo :func:`install`."""
    for handle in module.__dict__.get("_amp_state_hooks", ()):
        handle.remove()
    module.__dict__.pop("_amp_state_hooks", None)
    module.__dict__.pop("_amp_half", None)


def put_back(module: torch.nn.Module, before: tuple[torch.dtype, bool] | None, held: dict[str, Any]) -> None:
    """Restore the hooks and masters that ``module`` had."""
    remove(module)
    if before is not None:
        install(module, *before)
    master_index.drop_all(module)
    if held:
        master_index.masters_in(module).update(held)
        master_index.forget_lists()


def _hand_out(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    half, master_weights = module.__dict__.get("_amp_half", (None, False))
    for name, tensor in master_index.own_tensors(module):
        handed = state_dict.get(prefix + name)
        if half is None or not isinstance(handed, torch.Tensor) or tensor.dtype != half or handed.dtype != half:
            continue
        if not master_weights:
            state_dict[prefix + name] = handed.float()
            continue
        master = master_index.ensure_master(module, name)
        master.absorb()
        keep_vars = handed is tensor
        state_dict[prefix + name] = master.value if keep_vars else master.hand_out()


@torch.no_grad()
def _take_in(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *_: Any) -> None:
    half, master_weights = module.__dict__.get("_amp_half", (None, False))
    for name, tensor in master_index.own_tensors(module):
        incoming = state_dict.get(prefix + name)
        if half is None or tensor.dtype != half or not isinstance(incoming, torch.Tensor):
            continue
        if incoming.shape != tensor.shape or not incoming.is_floating_point():
            continue  # torch reports the mismatch
        if incoming.layout != torch.strided or incoming.is_meta:
            continue  # torch reports that it cannot be copied
        if local_metadata.get("assign_to_params_buffers", False):
            state_dict[prefix + name] = incoming.to(half)
        if master_weights:
            master = master_index.ensure_master(module, name)
            address = incoming.data_ptr()  # none in a tensor that is a shell around others
            if not address or address != master.value.data_ptr():
                master.value.copy_(incoming)


def _loaded(module: torch.nn.Module, incompatible_keys: Any) -> None:
    watch = module.__dict__.get("_amp_watch")
    if watch is not None:
        watch.forgive()
    for name, master in module.__dict__.get("_amp_masters", {}).items():
        now = module._parameters.get(name, module._buffers.get(name))
        if now is None:
            continue
        if now is not master.half:  # load_state_dict(assign=True)
            master_index.rebind(master, now)
        elif master.value._version != master.seen[1]:
            master.push()
