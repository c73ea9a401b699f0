"""The gradients of one set in a ``scale_loss`` block: saved, rescaled, unscaled, added to their masters'.

What the two copies of a half weight hold, at levels with masters:

====================================  ==========================================  =====================================
when                                  ``p.grad`` of the half weight               ``grad`` of its master, unscaled
====================================  ==========================================  =====================================
block begins (:func:`save_grads`)     None                                        the sum of earlier blocks
backward pass                         the gradient of this pass, half, scaled     the sum of earlier blocks
block ends (:func:`unscale_new`)      as it is: half, scaled, of this pass alone  the sum with this pass, in float32
it gave none (:func:`mirror_to_half`) the sum of earlier blocks, scaled, rounded  the sum of earlier blocks
the pass raises (``passes.undo``)     the sum of earlier blocks, scaled, rounded  the sum of earlier blocks
``step``, made or skipped             as it is, until it is cleared               None
====================================  ==========================================  =====================================

A float32 parameter has ``p.grad`` alone. It is saved while a block is open, and the new one, unscaled in place, is
added to it at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.half.chunks import in_chunks
from ampcompat.amp.half.masters import Master, drop_cleared_gradients
from ampcompat.amp.scaling import misuse
from ampcompat.amp.scaling.adapter import Adapter
from ampcompat.amp.scaling.gradient_sets import GradientSet, Pending
from ampcompat.amp.scaling.scaler import LossScaler

HalfGradients = dict[Master, torch.Tensor]  # by the master that they belong to
_GRAD = attrgetter("grad")
_IS_SPARSE = attrgetter("is_sparse")


def follow_half_gradients(gradient_set: GradientSet) -> None:
    """Clear masters' gradients whose half gradient a script has cleared; warn of one that it edited: they stay."""
    if gradient_set.masters and drop_cleared_gradients(gradient_set.masters):
        misuse.warn_of("half gradients edited")


# -- before a backward pass --------------------------------------------------------------------------------------------
def save_grads(gradient_set: GradientSet) -> None:
    """Take unscaled gradients out of ``param.grad``; those of half params are in their masters already."""
    for master in gradient_set.masters:
        master.added_grad = None
        master.half.grad = None
    for param in gradient_set.direct:
        grad = param.grad
        if grad is None:
            continue
        if _torch.is_window(grad):  # DDP's gradient_as_bucket_view overwrites the bucket in the next backward pass
            grad = grad.clone()
        gradient_set.saved.append((param, grad))
        param.grad = None


def rescale_pending(gradient_set: GradientSet, pending: Pending, scaler: LossScaler) -> None:
    """Bring ``pending`` gradients to the scale of a block that adds to them.

    Where the ratio of the two scales is a power of two, as it is unless a script wrote one, this loses no bit of a
    gradient that stays within the normal range of its dtype.
    """
    is_current = pending.scale is scaler.scale
    is_one = scaler.is_one and pending.scalers.keys() == {scaler}
    if not is_current and not is_one:
        scaled = [_entries(param.grad) for param in gradient_set.leaves() if param.grad is not None]
        if state.adapters:
            scaled = list(map(_torch.local_part, scaled))
        for adapter in state.adapters:
            scaled += adapter.unsynced_gradients(gradient_set.leaves())
        with torch.no_grad():
            for grad in scaled:
                was = pending.scale.to(grad.device, non_blocking=True)
                grad.mul_(scaler.scale_on(grad.device) / was)
    gradient_set.pending = replace(pending, scale=scaler.scale_on(pending.scale.device))


# -- after a backward pass ---------------------------------------------------------------------------------------------
def unscale_new(gradient_set: GradientSet, scaler: LossScaler, scale: torch.Tensor | None) -> bool:
    """Unscale the new gradients of a set, and add them to older ones; return whether there were any.

    Args:
        gradient_set: Its saved gradients are added.
        scaler: Notes inf and NaN.
        scale: What the gradients were multiplied by; None where nothing was scaled.
    """
    masters = gradient_set.masters
    half_gradients = {master: grad for master in masters if (grad := master.half.grad) is not None}
    direct_grads = _direct_grads(gradient_set.direct)
    if state.adapters:
        direct_grads = list(map(_torch.local_part, direct_grads))
    has_new_grads = bool(half_gradients or direct_grads)
    if half_gradients:
        for chunk in _in_chunks(half_gradients, scale):
            _add_to_masters(chunk, direct_grads, scaler, scale)
            direct_grads = []  # unscaled with the first chunk, in the same kernel
    elif direct_grads and scale is not None:
        scaler.unscale_grads(direct_grads, scale)
    if scale is not None:
        for adapter in state.adapters:
            _share_overflow(adapter, scaler, gradient_set.direct)
    if len(half_gradients) < len(masters):
        drop_cleared_gradients(masters)  # a script may zero gradients in the block, and then clear some
        mirror_to_half(masters, scale)
    if gradient_set.saved:
        gradient_set.add_saved()
    return has_new_grads


def _share_overflow(adapter: Adapter, scaler: LossScaler, params: list[torch.Tensor]) -> None:
    """Have every rank that holds a shard of ``params`` find the overflow that any of them has found."""
    flag = adapter.combined_flag(scaler.take_found_inf(), params)
    if flag is not None:
        scaler.add_found_inf(flag)


def _direct_grads(direct: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of ``direct`` to unscale in place: their entries, each index once, where they are sparse."""
    grads = [grad for grad in map(_GRAD, direct) if grad is not None]
    if not any(map(_IS_SPARSE, grads)):
        return grads
    entries = []
    for param in direct:
        if param.grad is None:
            continue
        if param.grad.is_sparse:
            param.grad = _torch.coalesced(param.grad)
        entries.append(_entries(param.grad))
    return entries


def _in_chunks(half_gradients: HalfGradients, scale: torch.Tensor | None) -> Iterable[HalfGradients]:
    """``half_gradients`` in parts whose float32 copies are made, added and freed together."""
    master, grad = next(iter(half_gradients.items()))
    copies_stay = master.value.grad is None  # they become the masters' gradients
    needs_no_copies = scale is None and grad.is_cpu
    if copies_stay or needs_no_copies:
        return [half_gradients]
    masters = list(half_gradients)
    chunks = in_chunks(list(half_gradients.values()))
    return [{masters[index]: half_gradients[masters[index]] for index in indices} for indices in chunks]


def _add_to_masters(
    half_gradients: HalfGradients,
    direct_grads: list[torch.Tensor],
    scaler: LossScaler,
    scale: torch.Tensor | None,
) -> None:
    """Add ``half_gradients``, in float32 and unscaled, to their masters' gradients; unscale ``direct_grads`` too."""
    if any(map(_IS_SPARSE, half_gradients.values())):
        grads = _sparse_float32_copies(half_gradients)
        entries = list(map(_entries, grads))
    elif scale is None and _can_add_half(half_gradients):
        grads = list(half_gradients.values())
        entries = grads
    else:
        # With the strides of the masters, which the model's weights need not have any more.
        grads = _torch.float32_copies(list(half_gradients.values()), [master.value for master in half_gradients])
        entries = grads
    if scale is not None:
        scaler.unscale_grads(direct_grads + entries, scale)
    sums: list[torch.Tensor] = []
    addends: list[torch.Tensor] = []
    for (master, half), grad in zip(half_gradients.items(), grads, strict=True):
        master.note_added(half)
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
    """Float32 copies of gradients some of which are sparse, with each index once: half sums may overflow."""
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


def mirror_to_half(masters: Sequence[Master], scale: torch.Tensor | None) -> None:
    """Show in the model, where there is no gradient, what its master has accumulated; a script may clear it there."""
    for master in masters:
        grad = master.value.grad
        if grad is not None and master.half.grad is None:
            scaled = grad if scale is None else grad * scale.to(grad.device)
            shown = scaled.to(master.dtype)
            master.half.grad = shown
            master.note_added(shown)


def _entries(grad: torch.Tensor) -> torch.Tensor:
    """The numbers that ``grad`` holds: the stored ones of a sparse gradient."""
    return grad._values() if grad.is_sparse else grad


def any_non_finite(grads: list[torch.Tensor]) -> torch.Tensor:
    """Whether one of ``grads`` (at least one) holds an inf or NaN, on any rank that has a shard: a 0-dim float32 flag.

    No host sync.
    """
    if not state.adapters:
        return _torch.any_non_finite(grads)
    flag: torch.Tensor | None = _torch.any_non_finite(list(map(_torch.local_part, grads)))
    for adapter in state.adapters:
        flag = adapter.combined_flag(flag, grads)
    return flag  # type: ignore[return-value] # adapters do not lose a flag
