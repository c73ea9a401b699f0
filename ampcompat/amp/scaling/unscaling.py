"""What the end of a block does to its new gradients: divide them by the scale, and give masters theirs.

A half weight gets gradient 2 at scale 1024; then, since the scale has grown, gradient 3 at scale 2048:

=====================================  ==========================================  ====================================
when                                   ``p.grad`` of the half weight               ``grad`` of its master
=====================================  ==========================================  ====================================
first block, after ``backward``        2048                                        None
it ends (:func:`unscale_gradients`)    2048, until it is cleared                   2
second block begins                    None                                        2
after ``backward``                     6144                                        2
it ends                                6144: this pass alone                       5
``step``, made or skipped              as it is, until it is cleared               None
=====================================  ==========================================  ====================================

Gradients of masters are never scaled. A float32 parameter has ``p.grad`` alone: the head of ``block`` has the same
numbers for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import torch

from ampcompat import _torch
from ampcompat._types import HALF_DTYPES
from ampcompat.amp.half.masters import Master
from ampcompat.amp.scaling.adapter import adapter_state
from ampcompat.amp.scaling.found_inf import FoundInf
from ampcompat.amp.scaling.leaves import Leaves

HalfGradients = dict[Master, torch.Tensor]  # by the master that they belong to
_VALUE = attrgetter("value")
_IS_SPARSE = attrgetter("is_sparse")
_REQUIRES_GRAD = attrgetter("requires_grad")


def unscale_gradients(leaves: Leaves, found_inf: FoundInf, scale: torch.Tensor | None) -> bool:
    """Unscale the gradients of ``leaves``, and add those of half weights to their masters'. No host sync.

    Args:
        leaves: The tensors whose gradients are unscaled.
        found_inf: Takes note of inf and NaN.
        scale: What the gradients were multiplied by; None where nothing was scaled.

    Returns:
        Whether any leaf had a gradient.
    """
    half_gradients = {master: grad for master in leaves.masters if (grad := master.half.grad) is not None}
    masterless_grads = numbers_of_gradients(leaves.masterless)
    has_gradients = bool(half_gradients or masterless_grads)
    if any(map(_REQUIRES_GRAD, half_gradients.values())) or any(map(_REQUIRES_GRAD, masterless_grads)):
        _unscale_in_graph(leaves, found_inf, scale)
        half_gradients = {master: grad for master, grad in half_gradients.items() if not grad.requires_grad}
        masterless_grads = [grad for grad in masterless_grads if not grad.requires_grad]
    if half_gradients:
        with_first_chunk = masterless_grads  # unscaled in the kernel call of the first chunk
        for chunk in _in_chunks(half_gradients, scale):
            _add_to_masters(chunk, with_first_chunk, found_inf, scale)
            with_first_chunk = []
    elif masterless_grads and scale is not None:
        found_inf.multiply(masterless_grads, _torch.inverse_of(scale))
    all_masters_got_one = len(half_gradients) == len(leaves.masters)
    if not all_masters_got_one:
        for master in leaves.masters:
            master.show_gradient()
    return has_gradients


def flag_of_all_ranks(flag: torch.Tensor | None, leaves: Leaves) -> torch.Tensor | None:
    """Combine ``flag`` of this rank with the flags of all ranks that have a shard of ``leaves``. No host sync.

    All these ranks must call it.
    """
    for adapter in adapter_state.adapters:
        flag = adapter.combined_flag(flag, leaves.masterless)
    return flag


def numbers_of_gradients(params: list[torch.Tensor]) -> list[torch.Tensor]:
    """The numbers of the gradients of ``params``, in dense tensors of this rank; sparse gradients are coalesced."""
    grads = [grad for param in params if (grad := param.grad) is not None]
    if any(map(_IS_SPARSE, grads)):
        grads = _coalesce(params)
    if adapter_state.adapters:
        grads = list(map(_torch.local_part, grads))
    return grads


@torch.enable_grad()
def _unscale_in_graph(leaves: Leaves, found_inf: FoundInf, scale: torch.Tensor | None) -> None:
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
        found_inf.add(_torch.any_non_finite(grads))


def _divided(grad: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """``grad`` divided by ``scale``, in float32 where it is half; as it is where there is no scale."""
    wide = grad.float() if grad.dtype in HALF_DTYPES else grad
    if scale is None:
        return wide
    return wide * _torch.inverse_of(_torch.moved_to(grad.device, scale))


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

    The first gradient decides for all: they are nearly always alike, and only the peak of memory depends on it.
    """
    master, grad = next(iter(half_gradients.items()))
    copies_stay = master.value.grad is None  # they become the masters' gradients, so that chunking would free nothing
    needs_no_copies = scale is None and grad.is_cpu
    if copies_stay or needs_no_copies:
        return [half_gradients]
    masters = list(half_gradients)
    chunks = _torch.in_chunks(list(half_gradients.values()))
    return [{masters[index]: half_gradients[masters[index]] for index in indices} for indices in chunks]


def _add_to_masters(
    half_gradients: HalfGradients,
    masterless_grads: list[torch.Tensor],
    found_inf: FoundInf,
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
        found_inf.multiply(masterless_grads + entries, _torch.inverse_of(scale))
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
