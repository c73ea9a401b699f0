"""Mistakes that leave no trace in plain torch: each is warned of once, with the fix."""

from __future__ import annotations

from ampcompat._log import warn_once

#: Blocks of each scaler whose loss is watched: the hook takes a tenth of a millisecond of a backward pass.
WATCHED = 16

_FIX = "write `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`"

_MISTAKES = {
    "unscaled loss in a block": "A scale_loss block whose gradients do not come from the scaled loss - they are divided"
    " by the loss scale at its exit, and were never multiplied by it - call backward() on what the block yields, not on"
    " the loss.",
    "pending gradients lost": "A scale_loss block raised in its backward pass while scaled gradients of delay_unscale,"
    " or gradients of DDP's no_sync() were waiting - they are in the same tensors as the failed ones, and are cleared"
    " with them - start the accumulation of this step again (D31).",
    "block without gradients": "optimizer.step() after scale_loss blocks that gave this optimizer no gradient - the"
    f" scaled loss must be backpropagated inside the block - {_FIX}.",
    "unscaled backward": "optimizer.step() with gradients that no scale_loss block produced - their loss was not"
    f" scaled, so small half gradients vanished - {_FIX} (D34).",
    "stray gradients": "optimizer.step() without a scale_loss block of this optimizer, on gradients that a block of"
    " another one has left - they are still multiplied by the loss scale; half gradients of weights with masters are"
    f" not used - give this optimizer a block of its own, or clear its gradients: {_FIX} (D34).",
    "half gradients edited": "Gradients of the model's half parameters were edited after scale_loss (clipped?) - the"
    " optimizer steps with the float32 gradients of the masters, which did not change - clip"
    " amp.master_params(optimizer) instead of model.parameters().",
}


def warn_of(mistake: str) -> None:
    """Warn of ``mistake``, one of those above, the first time."""
    warn_once(mistake, _MISTAKES[mistake])
