"""From scaled gradients to unscaled ones: what a ``scale_loss`` block does with the gradients of one optimizer.

At entry the gradients accumulated so far are put aside, so that the block sees only what its own backward adds; at exit
that is unscaled, checked, and added to what was there. Half gradients of weights with masters go to the float32
gradients of the masters. An overflow is therefore found in the new gradients alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ampcompat import _torch
from ampcompat.amp.masters import Master
from ampcompat.amp.scaler import LossScaler

Aside = list[tuple[torch.Tensor, torch.Tensor]]

#: Elements that are converted to float32 at once, where they are then added to older gradients and freed: as many as
#: torch's fused kernels take in one launch.
CHUNK = 2**24


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
    if not aside:
        return
    with torch.no_grad():
        for param, old in aside:
            param.grad = _sum(param.grad, old) if add and param.grad is not None else old


def _is_window(grad: torch.Tensor) -> bool:
    if grad.layout != torch.strided:
        return False
    return grad._is_view() or grad.untyped_storage().nbytes() != grad.numel() * grad.element_size()


def take_new(
    scaler: LossScaler,
    masters: Iterable[Master],
    direct: Iterable[torch.Tensor],
    aside: Aside,
    scale: torch.Tensor | None = None,
) -> bool:
    """Unscale the new gradients, note overflows on ``scaler``, and add them to the accumulated ones. No host sync.

    Args:
        scaler: The scaler of their loss.
        masters: Masters whose half tensors they belong to.
        direct: Other parameters that they belong to.
        aside: What :func:`put_aside` returned.
        scale: What they are scaled by; None for the scaler's current scale.

    Returns:
        Whether there was any new gradient.
    """
    with torch.no_grad():
        fresh: list[torch.Tensor] = []
        for param in direct:
            grad = param.grad
            if grad is not None:
                if grad.is_sparse:
                    grad = param.grad = _coalesced(grad)
                fresh.append(grad._values() if grad.is_sparse else grad)
        seen = bool(fresh)
        for chunk in _chunks(masters):
            wide = _to_float32(chunk, fresh)
            scaler.unscale_(fresh, scale)
            _fold(chunk, wide)
            seen, fresh = True, []
            del wide  # before the next chunk is made
        scaler.unscale_(fresh, scale)
        give_back(aside, add=True)
    return seen


def take_unscaled(masters: Iterable[Master]) -> None:
    """Give half gradients of a plain ``backward()``, outside any block, to the masters as they are."""
    with torch.no_grad():
        for chunk in _chunks(masters):
            _fold(chunk, _to_float32(chunk, []))


def _chunks(masters: Iterable[Master]) -> Iterator[list[Master]]:
    """The masters whose half tensor has a gradient, at most :data:`CHUNK` elements at a time."""
    chunk: list[Master] = []
    room = CHUNK
    for master in masters:
        if master.half.grad is not None:
            room -= master.numel
            if room < 0 and chunk:
                yield chunk
                chunk, room = [], CHUNK - master.numel
            chunk.append(master)
    if chunk:
        yield chunk


def _to_float32(masters: list[Master], fresh: list[torch.Tensor]) -> list[torch.Tensor]:
    """Float32 copies of the half gradients, in fused passes; appends what must be unscaled to ``fresh``."""
    grads: list[torch.Tensor] = [m.half.grad for m in masters]  # type: ignore[misc] # chunks have only those
    if any(g.is_sparse for g in grads):
        # Duplicate entries are summed in float32: their half sum may overflow.
        folds = [
            _sparse(g._indices(), g._values().float(), g.shape).coalesce() if g.is_sparse else g.float() for g in grads
        ]
        fresh += [g._values() if g.is_sparse else g for g in folds]
        return folds
    folds = [torch.empty_like(g, dtype=torch.float32) for g in grads]
    _torch.foreach_copy_(folds, grads)
    fresh += folds
    return folds


def _fold(masters: list[Master], grads: list[torch.Tensor]) -> None:
    for master, grad in zip(masters, grads, strict=True):
        old = master.value.grad
        master.value.grad = grad if old is None else _sum(old, grad)


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
        # Joined and coalesced, not added: the CPU adds no half sparse tensors.
        indices, values = (torch.cat([a._indices(), b._indices()], 1), torch.cat([a._values(), b._values()]))
        return _coalesced(_sparse(indices, values, a.shape))
    return a.add_(b)
