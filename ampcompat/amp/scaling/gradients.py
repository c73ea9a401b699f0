"""Gradients of a ``scale_loss`` block: scaled as it begins, unscaled as it ends, added to their masters'.

A half weight gets gradient 2 at scale 1024; then, since the scale has grown, gradient 3 at scale 2048. At levels with
masters:

====================================  ==========================================  =====================================
when                                  ``p.grad`` of the half weight               ``grad`` of its master, unscaled
====================================  ==========================================  =====================================
first block, after ``backward``       2048                                        None
it ends (:func:`unscale_all`)         2048, until it is cleared                   2
second block begins                   None                                        2
after ``backward``                    6144                                        2
it ends                               6144: this pass alone                       5
``step``, made or skipped             as it is, until it is cleared               None
====================================  ==========================================  =====================================

A float32 parameter has ``p.grad`` alone: the head of ``block`` has the same numbers for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._types import HALF_DTYPES
from ampcompat.amp.half.masters import Master
from ampcompat.amp.scaling.adapter import Adapter, adapter_state
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, Leaves, OptimizerState
from ampcompat.amp.scaling.scaler import LossScaler

HalfGradients = dict[Master, torch.Tensor]  # by the master that they belong to
_VALUE = attrgetter("value")
_IS_SPARSE = attrgetter("is_sparse")
_REQUIRES_GRAD = attrgetter("requires_grad")


# -- before a backward pass --------------------------------------------------------------------------------------------
def set_aside(leaves: Leaves, saved: dict[torch.Tensor, torch.Tensor]) -> None:
    """Take older gradients out of ``p.grad``, into ``saved``; the sums of half weights are with their masters.

    So an overflow of the new backward pass is told from one that is there already, as apex told it.
    """
    _note_cleared(leaves.masters)
    for param in leaves.masterless:
        grad = param.grad
        if grad is None:
            continue
        if _torch.is_window(grad):  # DDP's gradient_as_bucket_view overwrites the bucket in the next backward pass
            grad = grad.clone()
        saved[param] = grad
        param.grad = None


def scale_unreduced(leaves: Leaves, scaler: LossScaler, scale: torch.Tensor | None) -> None:
    """Multiply older gradients, those of this process alone, by ``scale``: they are averaged with the new ones."""
    _note_cleared(leaves.masters)
    _show_unreduced(leaves.masters, scale)
    grads = _masterless_grads(leaves.masterless)
    if scale is not None and grads:
        with torch.no_grad():
            scaler.multiply_grads(grads, scale)
        scaler.forget_found_inf()


def _note_cleared(masters: list[Master]) -> None:
    for master in masters:
        half = master.half
        if half.grad is not None:
            half.grad = None
        elif master.grad_shown:
            master.value.grad = None  # a script has cleared it in the model
        master.grad_shown = False


def _show_unreduced(masters: list[Master], scale: torch.Tensor | None) -> None:
    for master in masters:
        older = master.value.grad
        master.value.grad = None
        if older is not None:
            wide = older if scale is None else older * _torch.moved_to(older.device, scale)
            master.half.grad = wide.to(master.dtype)


# -- after a backward pass ---------------------------------------------------------------------------------------------
def unscale_all(leaves: Leaves, scaler: LossScaler, scale: torch.Tensor | None, *, is_shared: bool) -> bool:
    """Unscale the gradients of ``leaves``, and add those of half weights to their masters'.

    Args:
        leaves: Whose gradients.
        scaler: Notes inf and NaN.
        scale: What the gradients were multiplied by; None where nothing was scaled.
        is_shared: Whether all ranks come here, so that they can tell each other of overflows: not after an exception.

    Returns:
        Whether there were any.
    """
    half_gradients = {master: grad for master in leaves.masters if (grad := master.half.grad) is not None}
    masterless_grads = _masterless_grads(leaves.masterless)
    has_gradients = bool(half_gradients or masterless_grads)
    if any(map(_REQUIRES_GRAD, half_gradients.values())) or any(map(_REQUIRES_GRAD, masterless_grads)):
        _unscale_in_graph(leaves, scaler, scale)
        half_gradients = {master: grad for master, grad in half_gradients.items() if not grad.requires_grad}
        masterless_grads = [grad for grad in masterless_grads if not grad.requires_grad]
    if half_gradients:
        for chunk in _in_chunks(half_gradients, scale):
            _add_to_masters(chunk, masterless_grads, scaler, scale)
            masterless_grads = []  # unscaled with the first chunk, in the same kernel
    elif masterless_grads and scale is not None:
        scaler.unscale_grads(masterless_grads, scale)
    if scale is not None and is_shared:
        for adapter in adapter_state.adapters:
            _share_overflow(adapter, scaler, leaves.masterless)
    if len(half_gradients) < len(leaves.masters):
        for master in leaves.masters:  # so that ``p.grad = None`` clears both
            master.show_gradient()
    return has_gradients


def _masterless_grads(params: list[torch.Tensor]) -> list[torch.Tensor]:
    """The numbers of the gradients of ``params``, in dense tensors of this rank; sparse gradients are coalesced."""
    grads = [grad for param in params if (grad := param.grad) is not None]
    if any(map(_IS_SPARSE, grads)):
        grads = _coalesce(params)
    if adapter_state.adapters:
        grads = list(map(_torch.local_part, grads))
    return grads


@torch.enable_grad()
def _unscale_in_graph(leaves: Leaves, scaler: LossScaler, scale: torch.Tensor | None) -> None:
    """Unscale the gradients of ``leaves`` that require a gradient themselves: ``backward(create_graph=True)``.

    They are divided inside their graph, so that what is differentiated through ``p.grad`` is not scaled. Those of half
    weights are added to their masters', which then lead to the half weights. apex divided outside the graph.
    """
    grads: list[torch.Tensor] = []
    for param in leaves.masterless:
        grad = param.grad
        if grad is not None and grad.requires_grad:
            grads.append(grad)
            param.grad = _divided(grad, scale).to(param.dtype)
    for master in leaves.masters:
        grad = master.half.grad
        if grad is not None and grad.requires_grad:
            grads.append(grad)
            unscaled = _divided(grad, scale)
            if unscaled.stride() != master.value.stride():
                unscaled = torch.empty_like(master.value, requires_grad=False).copy_(unscaled)
            accumulated = master.value.grad
            master.value.grad = unscaled if accumulated is None else accumulated + unscaled
            master.grad_shown = True
    if scale is not None:
        scaler.add_found_inf(_torch.any_non_finite(grads))


def _divided(grad: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """``grad`` divided by ``scale``, in float32 where it is half; as it is where there is no scale."""
    wide = grad.float() if grad.dtype in HALF_DTYPES else grad
    if scale is None:
        return wide
    return wide * _torch.inverse_of(_torch.moved_to(grad.device, scale))


@torch.no_grad()
def add_saved(saved: dict[torch.Tensor, torch.Tensor]) -> None:
    """Add the gradients that were ``saved`` to those that came since, and empty ``saved``."""
    sums: list[torch.Tensor] = []
    addends: list[torch.Tensor] = []
    for param, old in saved.items():
        new = param.grad
        if new is None:
            param.grad = old
        elif new.is_sparse or old.is_sparse or new.requires_grad or old.requires_grad:
            param.grad = _torch.sum_of(new, old)
        else:
            sums.append(_torch.local_part(new))
            addends.append(_torch.local_part(old))
    _torch.foreach_accumulate_(sums, addends)
    saved.clear()


def _share_overflow(adapter: Adapter, scaler: LossScaler, params: list[torch.Tensor]) -> None:
    """Share an overflow that a rank has found with every rank that holds a shard of ``params``."""
    flag = adapter.combined_flag(scaler.take_found_inf(), params)
    if flag is not None:
        scaler.add_found_inf(flag)


def _coalesce(params: list[torch.Tensor]) -> list[torch.Tensor]:
    """Make the sparse gradients of ``params`` hold each index once; return the numbers of all gradients."""
    entries = []
    for param in params:
        if param.grad is None:
            continue
        if param.grad.is_sparse:
            param.grad = _torch.coalesced(param.grad)
        entries.append(entries_of(param.grad))
    return entries


def _in_chunks(half_gradients: HalfGradients, scale: torch.Tensor | None) -> Iterable[HalfGradients]:
    """``half_gradients``, at least one, in parts whose float32 copies are made, added and freed together.

    The first stands for all: nearly always they are alike, and only the peak of memory depends on it.
    """
    master, grad = next(iter(half_gradients.items()))
    copies_stay = master.value.grad is None  # as gradients of the masters, so that none is freed chunk by chunk
    needs_no_copies = scale is None and grad.is_cpu
    if copies_stay or needs_no_copies:
        return [half_gradients]
    masters = list(half_gradients)
    chunks = _torch.in_chunks(list(half_gradients.values()))
    return [{masters[index]: half_gradients[masters[index]] for index in indices} for indices in chunks]


def _add_to_masters(
    half_gradients: HalfGradients,
    masterless_grads: list[torch.Tensor],
    scaler: LossScaler,
    scale: torch.Tensor | None,
) -> None:
    """Add ``half_gradients``, in float32 and unscaled, to their masters'; unscale ``masterless_grads`` too."""
    if any(map(_IS_SPARSE, half_gradients.values())):
        grads = _sparse_float32_copies(half_gradients)
        entries = list(map(entries_of, grads))
    elif scale is None and _can_add_half(half_gradients):
        grads = list(half_gradients.values())
        entries = grads
    else:
        # With the strides of the masters, which the model's weights need not have any more.
        grads = _torch.float32_copies(list(half_gradients.values()), list(map(_VALUE, half_gradients)))
        entries = grads
    if scale is not None:
        scaler.unscale_grads(masterless_grads + entries, scale)
    sums: list[torch.Tensor] = []
    addends: list[torch.Tensor] = []
    for master, grad in zip(half_gradients, grads, strict=True):
        master.grad_shown = True
        accumulated = master.value.grad
        if accumulated is None:
            master.value.grad = grad
        elif accumulated.is_sparse or grad.is_sparse:
            master.value.grad = _torch.sum_of(accumulated, grad)
        else:
            sums.append(accumulated)
            addends.append(grad)
    if sums:
        _torch.foreach_accumulate_(sums, addends)


def _sparse_float32_copies(half_gradients: HalfGradients) -> list[torch.Tensor]:
    """Return float32 copies of gradients, some of them sparse, with each index once: half sums may overflow."""
    copies = []
    for master, grad in half_gradients.items():
        if grad.is_sparse:
            copies.append(_torch.widened(grad))
        else:
            copies += _torch.float32_copies([grad], [master.value])
    return copies


def _can_add_half(half_gradients: HalfGradients) -> bool:
    """Whether half gradients can be added to float32 ones as they are: dense ones on the CPU, to dense ones."""
    if not next(iter(half_gradients.values())).is_cpu:
        return False
    accumulated = [master.value.grad for master in half_gradients]
    return all(grad is not None and not grad.is_sparse for grad in accumulated)


# -- gradients that are cleared ----------------------------------------------------------------------------------------
def drop_cleared(masters: Iterable[Master]) -> None:
    """Drop the gradients of masters where the model showed them, and a script has cleared them there.

    Nothing tells of ``p.grad = None``. So blocks look as they begin, steps, and ``amp.master_params``.
    """
    for master in masters:  # no call for each: models have thousands
        if master.grad_shown and master.half.grad is None:
            master.drop_gradient()


def clear(leaves: Leaves) -> None:
    """Clear the gradients of ``leaves``: optimizers step without what is None."""
    for master in leaves.masters:
        master.half.grad = None
        master.drop_gradient()
    for param in leaves.masterless:
        param.grad = None


@_torch.eager
def clear_by_optimizer(optimizer: AmpOptimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Clear gradients as asked: of masters, by the ``original`` method, and with them those of the model.

    As apex did (``apex/amp/_process_optimizer.py``). ``model.zero_grad()`` clears those of the model: a block or step
    finds None there.
    """
    stash: OptimizerState = optimizer._amp_stash
    original(*args, **kwargs)
    stash.unreduced = []
    masters = stash.leaves.masters
    asked_for_zeros = (args and args[0] is False) or kwargs.get("set_to_none") is False
    if masters and asked_for_zeros:
        _zero_half_gradients(masters)
        return
    for master in masters:
        master.half.grad = None
        master.grad_shown = False


@_torch.without_grad
def _zero_half_gradients(masters: list[Master]) -> None:
    """Zero half gradients; their masters get zeros: as in plain torch, momentum and weight decay move such weights."""
    for master in masters:
        grad = master.half.grad
        if grad is None:
            continue
        if grad.grad_fn is not None:  # a view of DDP's bucket cannot be detached in place
            grad.detach_()
        grad.requires_grad_(False).zero_()
        if master.value.grad is None:
            master.value.grad = torch.zeros_like(master.value)
        master.grad_shown = True


# -- by a script's own block -------------------------------------------------------------------------------------------
def prepare_amp_backward(optimizer: AmpOptimizer) -> None:
    """Put gradients aside (``apex/amp/_process_optimizer.py: prepare_backward_with_master_weights``).

    For scripts that scale a loss themselves, and call :func:`post_amp_backward` then. Blocks call neither.
    """
    stash: OptimizerState = optimizer._amp_stash
    for master in stash.leaves.masters:
        master.half.grad = None
        master.grad_shown = False
    for param in stash.leaves.masterless:
        if param.grad is not None:
            stash.put_aside[param] = param.grad
            param.grad = None


@_torch.without_grad
def post_amp_backward(optimizer: AmpOptimizer, scaler: LossScaler) -> None:
    """Unscale new gradients, and add those put aside; the caller moves the scale, by ``scaler.update_scale()``."""
    stash: OptimizerState = optimizer._amp_stash
    unscale_all(stash.leaves, scaler, scaler.current_scale())
    for param, older in stash.put_aside.items():
        param.grad = older if param.grad is None else _torch.sum_of(param.grad, older)
    stash.put_aside = {}


# -- what gradients hold -----------------------------------------------------------------------------------------------
def entries_of(grad: torch.Tensor) -> torch.Tensor:
    """The numbers that ``grad`` holds: the stored ones of a sparse gradient."""
    return grad._values() if grad.is_sparse else grad


def any_non_finite(grads: list[torch.Tensor]) -> torch.Tensor:
    """Whether one of ``grads`` (at least one) holds an inf or NaN, on any rank that has a shard: a 0-dim float32 flag.

    No host sync.
    """
    if not adapter_state.adapters:
        return _torch.any_non_finite(grads)
    flag: torch.Tensor | None = _torch.any_non_finite(list(map(_torch.local_part, grads)))
    for adapter in adapter_state.adapters:
        flag = adapter.combined_flag(flag, grads)
    return flag  # type: ignore[return-value] # adapters do not lose a flag
