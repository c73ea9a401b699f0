"""Passes over all masters of a model or an optimizer: to the model after a step, and restoring the invariant.

Models have thousands of masters and nearly always none of them was moved by others: a pass asks inline, and calls a
method of :class:`Master` only where there is something to do.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ampcompat import _torch
from ampcompat.amp.masters import Master


def push_all(masters: list[Master]) -> None:
    """Write masters that an optimizer stepped into the model, in fused passes."""
    if masters:
        _push_all(masters)


# A decorator, here and elsewhere: Ctrl-C at the end of a ``with`` block keeps it from being left.
@_torch.without_grad
def _push_all(masters: list[Master]) -> None:
    halves: list[torch.Tensor] = [m.half for m in masters]
    values: list[torch.Tensor] = [m.value for m in masters]
    _torch.foreach_copy_(halves, values)
    for master, half, value in zip(masters, halves, values, strict=True):
        if master.early_steps or master.written_unseen or master.comparisons or master.before_writes is not None:
            master.stepped()
        else:
            master.seen = (half._version, value._version, half.data_ptr())
            master.handed_out = None


def reconcile(masters: Iterable[Master], stepping: bool = False) -> None:
    """Restore the invariant for every one of ``masters``; ``stepping``: before a step.

    No host sync, except in the first few rounds of a master's life, where somebody was caught writing a model tensor
    without moving its version counter (``p.data.clamp_()``, ``dist.broadcast(p.data)``) and, unless ``stepping``, of
    masters that were handed out.
    """
    for master in [
        m
        for m in masters
        if (m.half._version, m.value._version, m.half.data_ptr()) != m.seen
        or m.handed_out is not None
        or m.comparisons
        or m.written_unseen
    ]:
        if master.moved():
            master.reconcile(stepping)
        elif not (torch.compiler.is_compiling() or _torch.in_fake_mode()):
            master.compare(stepping)
