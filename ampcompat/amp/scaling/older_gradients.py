"""Gradients from before a block: set aside while it is open, and added as it ends.

Otherwise an overflow that is already there would count again with each pass. As in apex, two overflows in one
accumulation halve the scale twice.

*Unaveraged* gradients, which blocks in DDP's ``no_sync`` leave, are not set aside. DDP averages ``p.grad`` as a
backward pass leaves it. So unaveraged gradients stay there, multiplied by the scale, and are averaged with the new
ones. An overflow in one process makes that average inf or NaN: every process finds it then, and none before, so that
their scales stay equal.

Gradients of blocks with ``delay_unscale`` stay in the same way. As under apex, the last block of an accumulation then
has the whole sum in ``p.grad``, and scripts average it over all ranks there by hand (UNITER, HERO).
"""

from __future__ import annotations

import torch

from ampcompat import _torch
from ampcompat.amp.half.masters import Master
from ampcompat.amp.scaling.adapter import adapter_state
from ampcompat.amp.scaling.found_inf import FoundInf
from ampcompat.amp.scaling.leaves import Leaves
from ampcompat.amp.scaling.unscaling import numbers_of_gradients


class OlderGradients:
    """Gradients that an open block has set aside, each with its version then."""

    def __init__(self) -> None:
        # Parameter, gradient and version; no dict, since torch hashes a tensor in Python.
        self._entries: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def set_aside(self, leaves: Leaves) -> None:
        """Take the gradients of ``leaves`` out of ``p.grad``; what was set aside before is forgotten.

        The sums of half weights are with their masters. Where memory runs out, ``p.grad`` is as it was.
        """
        found: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        for param in leaves.masterless:
            grad = param.grad
            if grad is None:
                continue
            if _torch.is_window(grad):  # DDP's gradient_as_bucket_view overwrites the bucket in the next backward pass
                grad = grad.clone()
            found.append((param, grad, grad._version))
        self._entries = found
        clear_half_gradients(leaves.masters)
        for param, _, _ in found:
            param.grad = None

    def clear_all(self) -> None:
        """Clear all of them."""
        self._entries = []

    def clear(self, ids: set[int]) -> None:
        """Clear the gradients of tensors with these ``ids``, as ``zero_grad`` asks."""
        self._entries = [entry for entry in self._entries if id(entry[0]) not in ids]

    @torch.no_grad()
    def add_to_new(self) -> None:
        """Add them to the gradients that came since.

        Raises:
            RuntimeError: One of them was written while the block was open.
        """
        sums: list[torch.Tensor] = []
        addends: list[torch.Tensor] = []
        for param, old, version in self._entries:
            if old._version != version:
                _refuse_written(param)
            new = param.grad
            if new is None:
                param.grad = old
            elif new.is_sparse or old.is_sparse or new.requires_grad or old.requires_grad:
                param.grad = _torch.sum_of(new, old)
            else:
                sums.append(_torch.local_part(new))
                addends.append(_torch.local_part(old))
        _torch.foreach_accumulate_(sums, addends)
        self._entries = []


def _refuse_written(param: torch.Tensor) -> None:
    shape = tuple(param.shape)
    raise RuntimeError(
        f"scale_loss: the gradient that a parameter of shape {shape} had before the block was written while the block"
        " was open - a block keeps older gradients apart from new ones - write to gradients before the block or after"
        " it; if the script writes to none, gradients of others are views of one flat tensor (contiguous_params): give"
        " amp.initialize an optimizer of model.parameters()."
    )


def clear_half_gradients(masters: list[Master]) -> None:
    """Clear the gradients of half weights before a backward pass; the sums in their masters stay.

    Where a script has cleared one in the model, the sum is cleared, too.
    """
    for master in masters:
        half = master.half
        if half.grad is not None:
            half.grad = None
        elif master.grad_shown:
            master.value.grad = None
        master.grad_shown = False


# -- gradients that a block adds to in p.grad --------------------------------------------------------------------------
@torch.no_grad()
def scale_older(leaves: Leaves, scale: torch.Tensor | None, sparse: bool) -> None:
    """Put the gradients of ``leaves`` into ``p.grad``, multiplied by the ``scale`` of a block that adds to them there.

    Args:
        leaves: The tensors whose gradients are unaveraged, or come from delayed blocks.
        scale: The scale of the block; None where it is 1.
        sparse: Whether to put sparse gradients into half weights too. On the CPU torch cannot add to them there.
    """
    clear_half_gradients(leaves.masters)
    for master in leaves.masters:
        older = master.value.grad
        if older is not None and (sparse or not older.is_sparse):
            scaled = older if scale is None else older * _torch.moved_to(older.device, scale)
            master.half.grad = scaled.to(master.dtype)
            master.value.grad = None
    grads = numbers_of_gradients(leaves.masterless)
    if scale is not None and grads:
        FoundInf().multiply(grads, scale)  # each process finds an overflow in the average


@torch.no_grad()
def rescale_kept(leaves: Leaves, before: torch.Tensor | None, scale: torch.Tensor | None) -> None:
    """Bring gradients of ``leaves`` that ``fully_shard`` keeps to itself from the scale ``before`` to ``scale``.

    Such gradients may be half, so they stay multiplied between blocks. Where the ratio of the scales is a power of two,
    as it is unless a script wrote one of them, no bit of a gradient in the normal range of its dtype is lost.
    """
    tensors = leaves.tensors()
    for adapter in adapter_state.adapters:
        for grad in adapter.kept_gradients(tensors):
            ratio = torch.ones((), dtype=torch.float32, device=grad.device)
            if scale is not None:
                ratio = _torch.moved_to(grad.device, scale)
            if before is not None:
                ratio = ratio / _torch.moved_to(grad.device, before)
            grad.mul_(ratio)
