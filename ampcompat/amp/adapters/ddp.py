"""Keep masters and gradients right under ``DistributedDataParallel``.

Its constructor broadcasts rank 0's weights: half ones at O2. Masters must become rank 0's as well, low bits included,
or ranks that started from different seeds drift apart. Under ``no_sync``, each rank keeps its own gradients until a
later backward pass averages them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ampcompat import _torch
from ampcompat._state import Part, state
from ampcompat.amp.half.masters import align_written, master_of
from ampcompat.amp.scaling.adapter import Adapter, use
from ampcompat.amp.scaling.optimizer_state import optimizer_index


@dataclass(eq=False)
class DdpIndex(Part):
    """Models in DDP.

    Attributes:
        wrappers: Every ``DistributedDataParallel``, torch's and apex's, made since the first ``initialize``; None
            before.
    """

    wrappers: weakref.WeakSet[Any] | None = None


ddp_index = state.add(DdpIndex())


def install() -> None:
    """Patch DDP's constructor: from now on every new wrapper is recorded, and broadcasts masters too."""
    if ddp_index.wrappers is not None or not dist.is_available():
        return
    ddp_index.wrappers = weakref.WeakSet()

    def made(wrapper: Any, synchronised: bool) -> None:
        record(wrapper)
        if synchronised:
            broadcast_masters(wrapper.module, wrapper.process_group, set(wrapper.parameters_to_ignore))

    _torch.patch_ddp_constructor(made, state.undo)
    _torch.patch_ddp_join(_joined, state.undo)


def record(wrapper: Any) -> None:
    """Record ``wrapper``, a DDP of torch or of ours, if it was made after the first ``initialize``."""
    if ddp_index.wrappers is None:
        return
    ddp_index.wrappers.add(wrapper)
    use(_Ddp)


def broadcast_masters(module: torch.nn.Module, group: Any, ignored: set[str], rank: int = 0) -> None:
    """Give every rank in ``group`` the masters that ``rank`` has of parameters in ``module`` that optimizers hold.

    Every rank has these masters. Rank 0 may have more, made by a save: they follow their half weights, as after any
    write.
    """
    source = dist.get_global_rank(group, rank)
    held = {id(master) for optimizer in optimizer_index.listed() for master in optimizer._amp_stash.leaves.masters}
    for name, param in module.named_parameters():
        master = master_of(param)
        if master is None or name in ignored:
            continue
        if id(master) in held:
            _torch.broadcast_elements(master.value.detach(), source, group)
            master.push()
        else:
            align_written([master])


def _joined(wrapper: Any, rank: int) -> None:
    """Give every rank what ``rank`` has beside its weights: masters, loss scales and counts of clean passes.

    Ranks that had fewer inputs took no part in the last steps of ``join()``. Left to themselves they would scale by
    another factor than the others, and DDP averages scaled gradients.
    """
    broadcast_masters(wrapper.module, wrapper.process_group, set(wrapper.parameters_to_ignore), rank)
    source = dist.get_global_rank(wrapper.process_group, rank)
    for scaler in _scalers_of(wrapper.module):
        numbers = torch.tensor([scaler.loss_scale(), scaler._unskipped], dtype=torch.float64, device=wrapper.device)
        dist.broadcast(numbers, source, group=wrapper.process_group)
        scale, unskipped = numbers.tolist()
        scaler._loss_scale = scale
        scaler._unskipped = int(unskipped)


def _scalers_of(module: torch.nn.Module) -> list[Any]:
    """The scalers of every optimizer under amp that holds a parameter of ``module``, or its master."""
    held = {id(param) for param in module.parameters()}
    found: dict[Any, None] = {}
    for optimizer in optimizer_index.listed():
        if any(id(leaf) in held for leaf in optimizer._amp_stash.leaves.tensors()):
            found.update(dict.fromkeys(optimizer._amp_stash.session.scalers))
    return list(found)


class _Ddp(Adapter):
    """DDP, which keeps gradients on their rank in ``no_sync``."""

    def defers_reduction(self, leaves: Sequence[torch.Tensor]) -> bool:
        wrappers = [wrapper for wrapper in ddp_index.wrappers or () if _leaves_gradients_unaveraged(wrapper)]
        if not wrappers:
            return False
        ids = set(map(id, leaves))
        return any(id(param) in ids for wrapper in wrappers for param in wrapper.module.parameters())


def _leaves_gradients_unaveraged(wrapper: Any) -> bool:
    """Whether ``wrapper`` leaves gradients on their rank now: in ``no_sync``, or after apex's ``disable_allreduce``."""
    return not wrapper.require_backward_grad_sync or not getattr(wrapper, "allreduce_enabled", True)
