"""From scaled gradients to unscaled ones: what a ``scale_loss`` block does with the gradients of one optimizer.

At entry the gradients accumulated so far are put aside, so that the block sees only what its own backward adds; at exit
that is unscaled, checked, and added to what was there. Half gradients of weights with masters go to the float32
gradients of the masters. An overflow is therefore found in the new gradients alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ampcompat import _torch
from ampcompat.amp.aside import Aside, coalesced, give_back, sparse, summed
from ampcompat.amp.masters import Master
from ampcompat.amp.scaler import LossScaler

#: Elements that are converted to float32 at once, where they are then added to older gradients and freed: as many as
#: torch's fused kernels take in one launch.
CHUNK = 2**24


class Intake:
    """The new gradients of one optimizer: unscaled and checked, then added to the accumulated ones; under ``no_grad``.

    Args:
        masters: Masters whose half gradients are new.
        direct: Parameters, without master, whose gradients are new.
    """

    __slots__ = ("accumulated", "added", "any", "chunks", "direct", "fold")

    def __init__(self, masters: Iterable[Master], direct: Iterable[torch.Tensor]) -> None:
        self.direct = direct
        self.chunks = _chunks(masters)
        self.added = 0  # chunks that are in their masters' gradients
        self.accumulated = False  # some master had a gradient: an addition in place cannot be taken back
        self.fold: _Fold | None = None
        self.any = bool(self.chunks)

    def unscale(self, scaler: LossScaler, scale: torch.Tensor | None, aside: Aside) -> None:
        """Unscale, note overflows on ``scaler``, and add what is ``aside``. No host sync.

        Args:
            scaler: The scaler of their loss.
            scale: What they are scaled by; None for the scaler's current scale.
            aside: What was put aside of these parameters.

        Undone by giving back what is aside: accumulated gradients are not written into yet.
        """
        fresh = [grad for param in self.direct if (grad := param.grad) is not None]
        if any([grad.is_sparse for grad in fresh]):  # noqa: C419 - faster
            fresh = _coalesce(self.direct)
        self.any = self.any or bool(fresh)
        if self.chunks:  # in one pass with the others
            self.fold = _Fold(self.chunks[0], fresh)
        scaler.unscale_(fresh, scale)
        give_back(aside, add=True)

    def add(self, scaler: LossScaler | None, scale: torch.Tensor | None = None) -> None:
        """Add to the masters' gradients; again, it goes on where it was interrupted. No host sync.

        Args:
            scaler: Unscales them; None: they were not scaled.
            scale: As in :meth:`unscale`.
        """
        while self.added < len(self.chunks):
            if self.fold is None:
                self.fold = _unscaled(self.chunks[self.added], scaler, scale)
            self.accumulated = self.fold.plan() or self.accumulated
            self.fold.apply()
            self.added, self.fold = self.added + 1, None

    def undo(self) -> None:
        """Take back what :meth:`add` did, as far as that can be."""
        for chunk in self.chunks:
            for master in chunk:
                master.folded = None
        if self.accumulated:
            return
        planned = self.fold is not None and self.fold.planned
        for chunk in self.chunks[: self.added + planned]:
            for master in chunk:
                master.value.grad = None


def _coalesce(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Make every index of sparse gradients occur once; returns the dense tensors that hold the gradients' values."""
    held: list[torch.Tensor] = []
    for param in params:
        grad = param.grad
        if grad is not None:
            if grad.is_sparse:
                grad = param.grad = coalesced(grad)
            held.append(grad._values() if grad.is_sparse else grad)
    return held


def _unscaled(chunk: list[Master], scaler: LossScaler | None, scale: torch.Tensor | None) -> _Fold:
    fresh: list[torch.Tensor] = []
    fold = _Fold(chunk, fresh)
    if scaler is not None:
        scaler.unscale_(fresh, scale)
    return fold


@torch.no_grad()
def take_unscaled(masters: Iterable[Master]) -> None:
    """Give half gradients of a plain ``backward()``, outside any block, to the masters as they are."""
    masters = list(masters)
    intake = Intake(masters, ())
    try:
        intake.add(None)
        drop_half(masters)
    except BaseException:
        intake.add(None)
        drop_half(masters)
        raise


def drop_half(masters: Iterable[Master]) -> None:
    """Half gradients that lie in their masters', or belong to nobody, are of no more use."""
    for master in masters:
        master.folded = master.half.grad = None


def heed_cleared(masters: Iterable[Master]) -> bool:
    """What the user took off the model since a block (``p.grad = None``, ``model.zero_grad()``) leaves the masters too.

    Returns:
        Whether a half gradient has been replaced by another instead.
    """
    # Thousands of masters, and nearly always none: one pass finds them.
    changed = [master for master in masters if master.folded is not None and master.half.grad is not master.folded]
    for master in changed:
        if master.half.grad is None:
            master.value.grad = master.folded = None
    return any([master.folded is not None for master in changed])  # noqa: C419 - faster


def _chunks(masters: Iterable[Master]) -> list[list[Master]]:
    """The masters whose half tensor has a gradient, at most :data:`CHUNK` elements at a time."""
    fresh = [master for master in masters if master.half.grad is not None]
    if sum([master.numel for master in fresh]) <= CHUNK:
        return [fresh] if fresh else []
    chunks: list[list[Master]] = [[]]
    room = CHUNK
    for master in fresh:
        room -= master.numel
        if room < 0 and chunks[-1]:
            chunks.append([])
            room = CHUNK - master.numel
        chunks[-1].append(master)
    return chunks


def _to_float32(masters: list[Master], fresh: list[torch.Tensor]) -> list[torch.Tensor]:
    """Float32 copies of the half gradients, in fused passes; appends what must be unscaled to ``fresh``."""
    grads: list[torch.Tensor] = [m.half.grad for m in masters]  # type: ignore[misc] # chunks have only those
    if any([g.is_sparse for g in grads]):  # noqa: C419 - faster
        # Duplicate entries are summed in float32: their half sum may overflow.
        folds = [
            sparse(g._indices(), g._values().float(), g.shape).coalesce() if g.is_sparse else g.float() for g in grads
        ]
        fresh += [g._values() if g.is_sparse else g for g in folds]
        return folds
    folds = [torch.empty_like(g, dtype=torch.float32) for g in grads]
    _torch.foreach_copy_(folds, grads)
    fresh += folds
    return folds


class _Fold:
    """Float32 copies of the half gradients of one chunk, on their way into the masters' gradients."""

    __slots__ = ("grads", "masters", "new", "old", "planned", "version")

    def __init__(self, masters: list[Master], fresh: list[torch.Tensor]) -> None:
        self.masters = masters
        self.new = _to_float32(masters, fresh)
        self.planned = False

    def plan(self) -> bool:
        """Decide, once, what is added in place and what is set. Returns whether any master has a gradient."""
        if not self.planned:
            earlier = [master.value.grad for master in self.masters]
            nothing = all([grad is None for grad in earlier])  # noqa: C419 - faster
            grads, old, new = (self.new, [], []) if nothing else _planned(earlier, self.new)
            version = old[0]._version if old else 0
            self.grads, self.old, self.new, self.version, self.planned = grads, old, new, version, True
        return len(self.old) > 0

    def apply(self) -> None:
        """Do it; again, it does no harm: the version tells whether the addition, which is one call, was made."""
        if self.old and self.old[0]._version == self.version:
            _torch.foreach_add_(self.old, self.new)
        for master, grad in zip(self.masters, self.grads, strict=True):
            master.value.grad, master.folded, master.spent = grad, master.half.grad, False


def _planned(
    earlier: list[torch.Tensor | None], fresh: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """What is set, what is added to in place before that, and what is added to it."""
    grads: list[torch.Tensor] = []
    old: list[torch.Tensor] = []
    new: list[torch.Tensor] = []
    for before, grad in zip(earlier, fresh, strict=True):
        if before is None:
            grads.append(grad)
        elif before.is_sparse or grad.is_sparse:
            grads.append(summed(before, grad) if before.is_sparse else before + grad)
        else:
            grads.append(before)
            old.append(before)
            new.append(grad)
    return grads, old, new
