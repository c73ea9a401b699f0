"""``zero_grad`` of an optimizer, of a model and of a module in one: the gradients of masters follow.

apex cleared both in ``optimizer.zero_grad`` (``apex/amp/_process_optimizer.py``), and the model's alone in
``model.zero_grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.half.masters import Master, master_of
from ampcompat.amp.scaling.groups import follow_changes
from ampcompat.amp.scaling.open_blocks import block_state
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, OptimizerState, optimizer_index
from ampcompat.amp.scaling.unscaling import drop_cleared, drop_unreduced


@_torch.eager
def clear_by_optimizer(optimizer: AmpOptimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Clear gradients as asked: of masters, by the ``original`` method, and with them those of the model."""
    stash: OptimizerState = optimizer._amp_stash
    follow_changes(optimizer)
    masters = stash.leaves.masters
    if masters:
        drop_cleared(masters)  # before what is None becomes zeros
    original(*args, **kwargs)
    if masters:
        asked_for_zeros = (args and args[0] is False) or kwargs.get("set_to_none") is False
        _clear_half_gradients(masters, bool(asked_for_zeros))
    if stash.shared or block_state.open_blocks or stash.unreduced is not None:
        note_cleared(stash.leaves.ids())
    else:  # no other optimizer and no block has these gradients
        stash.forget_gradients()


@_torch.without_grad
def _clear_half_gradients(masters: list[Master], asked_for_zeros: bool) -> None:
    """Clear the model's gradients as ``zero_grad`` has cleared the gradients of masters: to None, or to zero."""
    zeroed = []
    for master in masters:
        grad = master.half.grad
        if grad is not None and (asked_for_zeros or master.value.grad is not None):
            _zero_(grad)
            zeroed.append(master)
        else:
            master.half.grad = None
            master.grad_shown = False
    if zeroed:
        _zero_masters_gradients(zeroed)


def _zero_(grad: torch.Tensor) -> None:
    """Zero ``grad`` as torch's ``zero_grad`` does; a view of DDP's bucket cannot be detached in place."""
    if grad.grad_fn is not None:
        grad.detach_()
    else:
        grad.requires_grad_(False)
    grad.zero_()


@_torch.without_grad
def _zero_masters_gradients(masters: Iterable[Master]) -> None:
    """Set masters' gradients to zero where ``zero_grad(set_to_none=False)`` has zeroed the model's.

    They are not dropped: as in plain torch, momentum and weight decay move a weight whose gradient is zero.
    """
    for master in masters:
        if master.value.grad is None:
            master.value.grad = torch.zeros_like(master.value)
        else:
            master.value.grad.zero_()
        master.grad_shown = True


def watch_modules() -> None:
    """Follow ``zero_grad`` of modules, until a reset."""
    state.patch_once(_torch.watch_zero_grad, _clear_by_module)


def _clear_by_module(module: torch.nn.Module, set_to_none: bool) -> None:
    """Clear the gradients of masters in ``module``, whose own ``zero_grad`` has cleared the model's."""
    params = list(module.parameters())
    for param in params:
        master = master_of(param)
        if master is None:
            continue
        if set_to_none or master.half.grad is None:  # in an open block it is None, and what had accumulated goes
            master.drop_gradient()
        else:
            _zero_masters_gradients([master])
    note_cleared(set(map(id, params)))


# -- what is known of cleared gradients --------------------------------------------------------------------------------
def note_cleared(ids: set[int]) -> None:
    """Forget what is known of the gradients of leaves with these ``ids``, which ``zero_grad`` has cleared or zeroed."""
    for block in block_state.open_blocks:
        block.saved = {param: grad for param, grad in block.saved.items() if id(param) not in ids}
    for optimizer in optimizer_index.listed():
        stash: OptimizerState = optimizer._amp_stash
        if stash.leaves.ids() <= ids:
            if stash.unreduced is not None:
                drop_unreduced(stash.leaves)
            stash.forget_gradients()


def forget_overflows_if_cleared(stash: OptimizerState) -> None:
    """Forget the overflows that an optimizer knows of, where a script has cleared all of its gradients by hand."""
    drop_cleared(stash.leaves.masters)
    if not stash.leaves.gradients():
        stash.note_overflows_cleared()
