"""``model.to(device)`` and ``.float()`` after ``initialize``: what becomes of a half weight and its master."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ampcompat._log import warn_once

if TYPE_CHECKING:
    from ampcompat.amp.masters import Master


def keep_dtype(master: Master) -> None:
    """``model.float()``: the model's dtype is amp's business at O2."""
    warn_once(
        "master dtype",
        f"A weight that amp.initialize had cast to {master.dtype} was {master.half.dtype} - at O2 the dtype of the"
        " model is amp's business, so the weight is cast back - take amp.unwrap(model) for a float32 copy, or"
        " initialize again at another opt_level.",
    )
    grad, master.half.grad = master.half.grad, None
    with torch.no_grad():
        exact = master.half.detach().float()
        # What the conversion alone did is no write: keep the low bits there.
        keep = exact == master.value.to(master.dtype).float()
        master.value.copy_(torch.where(keep, master.value, exact))
        master.half.data = master.value.detach().to(master.dtype)
    master.half.grad = None if grad is None else grad.to(master.dtype)
    master.settle()


def follow_device(master: Master) -> None:
    """``module.to(device)`` moves the model's side only; the master keeps its identity and moves after."""
    warn_once(
        "master device",
        f"The model moved from {master.value.device} to {master.half.device} after amp.initialize - its master weights"
        " follow, but optimizer state does not - move the model before amp.initialize.",
    )
    version = master.value._version
    moved = master.value.data.to(master.half.device)
    try:
        master.value.data = moved
    except RuntimeError as error:
        raise RuntimeError(
            f"The model moved from {master.value.device} to {moved.device} after amp.initialize - tensors there are of"
            " another kind, and the masters that the optimizer holds cannot become such - move the model before the"
            " optimizer is made and amp.initialize is called."
        ) from error
    if master.value.grad is not None:
        master.value.grad = master.value.grad.to(master.half.device)
    master.seen = (
        master.seen[0],
        master.value._version if master.seen[1] == version else master.seen[1],
        master.seen[2],
    )
