"""Mistakes that leave no trace in plain torch: noticed at the step, warned of once, with the fix."""

from __future__ import annotations

import torch

from ampcompat._log import warn_once
from ampcompat.amp.masters import Master
from ampcompat.amp.optimizer_state import AmpOptimizerState
from ampcompat.amp.scaler import LossScaler

#: Of the blocks of a loss, the first so many are watched, and every nth after them: the hook takes a tenth of a
#: millisecond, and who writes this mistake makes it again. A prime, for phases of a script that take turns.
WATCHED_FIRST, WATCHED_EVERY = 16, 17

#: So many blocks in a row before which parameters moved, though no step looked at overflows, are no accident.
MOVES = 8


def watch(masters: list[Master]) -> list[tuple[torch.Tensor, int]]:
    """A half gradient that a block has just folded into its master's, with its version."""
    for master in masters:
        if master.half.grad is not None:
            return [(master.half.grad, master.half.grad._version)]
    return []


def watch_loss(scaler: LossScaler, scaled: torch.Tensor) -> list[bool]:
    """A list that stays empty until ``scaled`` is backpropagated.

    Of a loss that has no gradient, and of most losses once ``scaler`` has scaled many, it never is empty.
    """
    scaler.blocks += 1
    watched = scaler.blocks <= WATCHED_FIRST or scaler.blocks % WATCHED_EVERY == 0
    used: list[bool] = []
    if watched and scaled.requires_grad:
        scaled.register_hook(lambda _grad: used.append(True))  # type: ignore[no-untyped-call]
    else:
        used.append(True)
    return used


def warn_of_unused_loss() -> None:
    """A block gave gradients, and not by the loss that it had scaled."""
    warn_once(
        "unscaled loss in a block",
        "A scale_loss block whose gradients do not come from the scaled loss - they are divided by the loss scale at"
        " its exit, and were never multiplied by it - call backward() on what the block yields, not on the loss.",
    )


def warn_at_step(
    stash: AmpOptimizerState, masters: list[Master], direct: list[torch.Tensor], replaced: bool = False
) -> None:
    """Warn of a block without a backward, of a backward without a block, of edited or ``replaced`` half gradients."""
    if stash.blocks_with_gradients and not stash.seen:
        return  # the rule: nothing to ask
    if stash.session.plain:
        return
    if stash.blocks and not stash.blocks_with_gradients:
        warn_once(
            "block without gradients",
            "optimizer.step() after scale_loss blocks that gave this optimizer no gradient - the scaled loss must be"
            " backpropagated inside the block - write `with amp.scale_loss(loss, optimizer) as scaled:"
            " scaled.backward()`.",
        )
    elif not stash.blocks and _has_unseen_gradients(stash, masters, direct):
        warn_once(
            "unscaled backward",
            "optimizer.step() with gradients that no scale_loss block produced - their loss was not scaled, so small"
            " half gradients vanished - write `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`.",
        )
    if replaced or any(grad._version != version for grad, version in stash.seen):
        warn_once(
            "half gradients edited",
            "Gradients of the model's half parameters were edited after scale_loss (clipped?) - the optimizer steps"
            " with the float32 gradients of the masters, which did not change - clip amp.master_params(optimizer)"
            " instead of model.parameters().",
        )


def _has_unseen_gradients(stash: AmpOptimizerState, masters: list[Master], direct: list[torch.Tensor]) -> bool:
    """Whether a plain backward left gradients. Those that only survived the last step do not count."""
    if masters:
        return any(m.half.grad is not None for m in masters)
    return not stash.stepped and any(p.grad is not None for p in direct)


def heed_moves(stash: AmpOptimizerState, masters: list[Master], direct: list[torch.Tensor]) -> None:
    """A block begins: warn where parameters keep moving while nobody looks at the overflow flags of earlier blocks."""
    last = masters[-1].value if masters else direct[-1] if direct else None
    version = 0 if last is None else last._version
    stash.moves = stash.moves + 1 if stash.overflows and version != stash.param_version else 0
    stash.param_version = version
    if stash.moves == MOVES:
        warn_once(
            "moved past step",
            "Parameters were moved between scale_loss blocks without optimizer.step() - overflows skip optimizer.step()"
            " and nothing else, so inf and NaN gradients reach the weights - step by optimizer.step(); with SAM, by"
            " `optimizer.step(closure)`, which makes both of its steps.",
        )
