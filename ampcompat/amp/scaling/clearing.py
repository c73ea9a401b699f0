"""``zero_grad`` of an optimizer, of a model and of a module in one, and ``p.grad = None``: gradients of masters follow.

An open block has set gradients aside; ``zero_grad`` clears these, too. The head of ``block`` says what clearing does to
flags.

apex cleared both in ``optimizer.zero_grad`` (``apex/amp/_process_optimizer.py``), and the model's alone in
``model.zero_grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.half.masters import Master, master_of
from ampcompat.amp.scaling.adapter import adapter_state
from ampcompat.amp.scaling.block import block_state
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, OptimizerState


# -- p.grad = None -----------------------------------------------------------------------------------------------------
def clear_with_model(masters: Iterable[Master]) -> None:
    """Clear the gradients of masters where the model showed them, and a script has cleared them there.

    Nothing tells of ``p.grad = None``. So blocks look as they begin, and steps and ``amp.master_params`` do.
    """
    for master in masters:  # no call for each: models have thousands
        if master.grad_shown and master.half.grad is None:
            master.clear_gradient()


# -- optimizer.zero_grad() ---------------------------------------------------------------------------------------------
@_torch.eager
def clear_by_optimizer(optimizer: AmpOptimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Clear gradients as asked: of masters, by the ``original`` method, and with them those of the model."""
    stash: OptimizerState = optimizer._amp_stash
    masters = stash.leaves.masters
    clear_with_model(masters)  # before what is None becomes zeros
    original(*args, **kwargs)
    if masters:
        _clear_half_gradients(masters, _asks_for_zeros(*args, **kwargs))
    stash.unaveraged = []
    stash.joins_next = False
    stash.set_aside_by_script.clear_all()
    if block_state.open_blocks or adapter_state.adapters:
        _clear_what_is_elsewhere(stash.leaves.tensors())


def _asks_for_zeros(set_to_none: Any = True, *_: Any, **__: Any) -> bool:
    """Whether these arguments of ``zero_grad`` ask for gradients of zero, and not for None."""
    return set_to_none is False


@_torch.without_grad
def _clear_half_gradients(masters: list[Master], asked_for_zeros: bool) -> None:
    """Clear the model's gradients as ``zero_grad`` has cleared the gradients of masters: to None, or to zero."""
    for master in masters:
        grad = master.half.grad
        if grad is not None and (asked_for_zeros or master.value.grad is not None):
            _zero_(grad)
            _zero_master_gradient(master)
        else:
            master.half.grad = None
            master.grad_shown = False


def _zero_(grad: torch.Tensor) -> None:
    """Zero ``grad`` as torch's ``zero_grad`` does; a view of DDP's bucket cannot be detached in place."""
    if grad.grad_fn is not None:
        grad.detach_()
    else:
        grad.requires_grad_(False)
    grad.zero_()


def _zero_master_gradient(master: Master) -> None:
    """Zero the gradient of ``master``: as in plain torch, momentum and weight decay then move the weight."""
    if master.value.grad is None:
        master.value.grad = torch.zeros_like(master.value)
    else:
        master.value.grad.zero_()
    master.grad_shown = True


# -- model.zero_grad() -------------------------------------------------------------------------------------------------
def watch_modules() -> None:
    """Follow ``zero_grad`` of modules, until a reset."""
    state.patch_once(_torch.watch_zero_grad, _clear_by_module)


@torch.no_grad()
def _clear_by_module(module: torch.nn.Module, set_to_none: bool) -> None:
    """Clear the gradients of masters in ``module``, whose own ``zero_grad`` has cleared the model's."""
    params = list(module.parameters())
    for param in params:
        master = master_of(param)
        if master is None:
            continue
        if set_to_none or master.half.grad is None:  # in an open block it is None, and what had accumulated is cleared
            master.clear_gradient()
        else:
            _zero_master_gradient(master)
    _clear_what_is_elsewhere(params)


# -- gradients that are not in ``p.grad`` ------------------------------------------------------------------------------
def _clear_what_is_elsewhere(tensors: Sequence[torch.Tensor]) -> None:
    """Clear the gradients of ``tensors`` that open blocks have set aside, and that wrappers keep to themselves."""
    ids = set(map(id, tensors))
    for block in block_state.open_blocks:
        block.older.clear(ids)
    for adapter in adapter_state.adapters:
        adapter.clear_kept_gradients(tensors)
