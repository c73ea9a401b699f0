"""From scaled gradients to unscaled ones: what a ``scale_loss`` block does with the gradients of one optimizer.

At entry the gradients accumulated so far are put aside, so that the block sees only what its own backward adds; at exit
that is unscaled, checked, and added to what was there. Half gradients of weights with masters go to the float32
gradients of the masters. An overflow is therefore found in the new gradients alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ampcompat.amp.masters import Master
from ampcompat.amp.scaler import LossScaler

Aside = list[tuple[torch.Tensor, torch.Tensor]]


def put_aside(masters: Iterable[Master], direct: Iterable[torch.Tensor]) -> Aside:
    """Take accumulated gradients off the parameters.

    Args:
        masters: Their half gradients were folded into the masters' by an earlier block (or belong to nobody): dropped.
        direct: Parameters that the optimizer holds themselves.

    Returns:
        The parameters that had a gradient, with it.
    """
    for master in masters:
        if master.half.grad is not None:
            master.half.grad = None
    aside = []
    for param in direct:
        grad = param.grad
        if grad is not None:
            # DDP's gradient_as_bucket_view overwrites the bucket in the next backward: such a view needs a copy.
            aside.append((param, grad.clone() if _is_window(grad) else grad))
            param.grad = None
    return aside


def give_back(aside: Aside, add: bool = False) -> None:
    """Undo :func:`put_aside`.

    Args:
        aside: What it returned.
        add: To the gradients that there are now; else these go: a block failed.
    """
    with torch.no_grad():
        for param, old in aside:
            param.grad = _sum(param.grad, old) if add and param.grad is not None else old


def _is_window(grad: torch.Tensor) -> bool:
    if grad.layout != torch.strided:
        return False
    return grad._is_view() or grad.untyped_storage().nbytes() != grad.numel() * grad.element_size()


def take_new(scaler: LossScaler, masters: Iterable[Master], direct: Iterable[torch.Tensor], aside: Aside) -> bool:
    """Unscale the new gradients, note overflows on ``scaler``, and add them to the accumulated ones. No host sync.

    Returns:
        Whether there was any new gradient.
    """
    with torch.no_grad():
        fresh: list[torch.Tensor] = []
        folds = _to_float32([m for m in masters if m.half.grad is not None], fresh)
        seen = bool(folds)
        for param in direct:
            grad = param.grad
            if grad is not None:
                seen = True
                if grad.is_sparse:
                    grad = param.grad = _coalesced(grad)
                fresh.append(grad._values() if grad.is_sparse else grad)
        scaler.unscale_(fresh)
        for master, grad in folds:
            old = master.value.grad
            master.value.grad = grad if old is None else _sum(old, grad)
        give_back(aside, add=True)
    return seen


def take_unscaled(masters: Iterable[Master]) -> None:
    """Give half gradients of a plain ``backward()``, outside any block, to the masters as they are."""
    with torch.no_grad():
        for master, grad in _to_float32([m for m in masters if m.half.grad is not None], []):
            old = master.value.grad
            master.value.grad = grad if old is None else _sum(old, grad)


def _to_float32(masters: list[Master], fresh: list[torch.Tensor]) -> list[tuple[Master, torch.Tensor]]:
    """Float32 copies of the half gradients, in fused passes; appends what must be unscaled to ``fresh``."""
    folds: list[tuple[Master, torch.Tensor]] = []
    sources, targets = [], []
    for master in masters:
        grad = master.half.grad
        if grad is None:
            continue
        if grad.is_sparse:
            # Duplicate entries are summed in float32: their half sum may overflow.
            wide = _sparse(grad._indices(), grad._values().float(), grad.shape).coalesce()
            folds.append((master, wide))
            fresh.append(wide._values())
            continue
        wide = torch.empty_like(grad, dtype=torch.float32)
        sources.append(grad)
        targets.append(wide)
        folds.append((master, wide))
    if targets:
        torch._foreach_copy_(targets, sources)
        fresh.extend(targets)
    return folds


def _coalesced(grad: torch.Tensor) -> torch.Tensor:
    if grad.dtype in (torch.float16, torch.bfloat16):
        wide = _sparse(grad._indices(), grad._values().float(), grad.shape).coalesce()
        return _sparse(wide.indices(), wide.values().to(grad.dtype), wide.shape, is_coalesced=True)
    return grad.coalesce()


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, is_coalesced: bool = False) -> torch.Tensor:
    # The parts come from a sparse tensor: no checks. Saying so keeps torch from warning that there are none.
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced or None, check_invariants=False)


def _sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a + b``, in place in ``a`` where it can be: ``a`` may be a window into a DDP bucket."""
    if a.is_sparse and not b.is_sparse:
        return b + a
    if a.is_sparse:
        return (a + b).coalesce()
    return a.add_(b)
