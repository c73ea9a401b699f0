"""Gradients accumulated before a ``scale_loss`` block: put aside for its time, and summed with the new ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ampcompat.amp.masters import Master

Aside = list[tuple[torch.Tensor, torch.Tensor]]


def put_aside(masters: Iterable[Master], direct: Iterable[torch.Tensor], aside: Aside) -> None:
    """Take accumulated gradients off the parameters.

    Args:
        masters: Their half gradients were folded into the masters' by an earlier block (or belong to nobody): dropped.
        direct: Parameters that the optimizer holds themselves.
        aside: Gets the parameters that had a gradient, with it; each before the parameter loses it.
    """
    for master in masters:
        master.folded = None  # first: a half gradient that is gone, and was folded, has been cleared by the user
        if master.half.grad is not None:
            master.half.grad = None
    for param in direct:
        grad = param.grad
        if grad is not None:
            # DDP's gradient_as_bucket_view overwrites the bucket in the next backward: such a view needs a copy.
            aside.append((param, grad.clone() if _is_window(grad) else grad))
            param.grad = None


def give_back(aside: Aside, add: bool = False, copy: bool = False) -> None:
    """Undo :func:`put_aside`, in no-grad mode. What is aside is not written into.

    Args:
        aside: What it filled.
        add: To the gradients that there are now; else these go: a block failed.
        copy: The parameters get no tensor of ``aside`` itself: their gradients will be unscaled in place.
    """
    for param, old in aside:
        if add and param.grad is not None:
            param.grad = summed(param.grad, old)
        else:
            param.grad = old.clone() if copy else old


def _is_window(grad: torch.Tensor) -> bool:
    if grad.layout != torch.strided:
        return False
    return grad._is_view() or grad.untyped_storage().nbytes() != grad.numel() * grad.element_size()


def coalesced(grad: torch.Tensor) -> torch.Tensor:
    """``grad`` with each index once. Half entries are summed in float32: their half sum may overflow."""
    if grad.dtype in (torch.float16, torch.bfloat16):
        wide = sparse(grad._indices(), grad._values().float(), grad.shape).coalesce()
        return sparse(wide.indices(), wide.values().to(grad.dtype), wide.shape, is_coalesced=True)
    return grad.coalesce()


def sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, is_coalesced: bool = False) -> torch.Tensor:
    """A sparse tensor of the parts of another."""
    # The parts come from a sparse tensor: no checks. Saying so keeps torch from warning that there are none.
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced or None, check_invariants=False)


def summed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a + b``, in place in ``a`` where it can be: ``a`` may be a window into a DDP bucket."""
    if a.is_sparse and not b.is_sparse:
        return b + a
    if a.is_sparse:
        # Joined and coalesced, not added: the CPU adds no half sparse tensors.
        indices, values = (torch.cat([a._indices(), b._indices()], 1), torch.cat([a._values(), b._values()]))
        return coalesced(sparse(indices, values, a.shape))
    return a.add_(b)
