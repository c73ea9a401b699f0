"""What happens to gradients between two blocks: pending ones are unscaled before they are used, and others are cleared.

The head of ``block`` has the table of events.
"""

from __future__ import annotations

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.half.masters import align_written
from ampcompat.amp.observers import notify
from ampcompat.amp.scaling.gradients import Pending, pending_in
from ampcompat.amp.scaling.mistakes import warn_of
from ampcompat.amp.scaling.optimizer_state import OptimizerState
from ampcompat.amp.scaling.unscaling import (
    add_saved,
    adjust_scalers,
    clear_in_model,
    clear_partly_unscaled,
    drop_cleared,
    drop_unreduced,
    unscale_new,
)


# -- pending gradients -------------------------------------------------------------------------------------------------
@_torch.without_grad
def end_pending(pending: Pending) -> None:
    """Unscale ``pending`` gradients before they are used."""
    state.pending.remove(pending)
    try:
        unscale_new(pending.leaves, pending.scalers[0], pending.scale)
        add_saved(pending.saved)
        overflows = adjust_scalers(pending)
    except BaseException:
        clear_partly_unscaled(pending)
        raise
    for optimizer in state.optimizers.listed():
        if pending.overlaps(optimizer._amp_stash.leaves):
            optimizer._amp_stash.note_overflows(overflows)


def clear_pending(pending: Pending) -> None:
    """Clear ``pending`` gradients, which no optimizer under amp will unscale; those saved before them come back."""
    state.pending.remove(pending)
    clear_in_model(pending.leaves)
    add_saved(pending.saved)


# -- a script asks for masters ----------------------------------------------------------------------------------------
def prepare_masters(optimizer: Optimizer) -> None:
    """Make the masters of ``optimizer`` ready for a script that asks for them.

    They follow what it did to the model's weights and gradients. Outside of blocks, pending gradients are unscaled, and
    the scale moves: a script may end an accumulation early, clip, and step.
    """
    if state.observers:
        notify("on_master_params", optimizer)
    stash: OptimizerState = optimizer._amp_stash
    stash.look_up(optimizer)
    drop_cleared(stash.leaves.masters)
    if stash.in_block:
        return
    if not state.open_blocks:
        for pending in pending_in(stash.leaves):
            if pending.is_unreduced:
                warn_of("unreduced gradients read")
            else:
                end_pending(pending)
    align_written(stash.leaves.masters)


# -- gradients are cleared ---------------------------------------------------------------------------------------------
def note_cleared(ids: set[int]) -> None:
    """Forget what is known of the gradients of leaves with these ``ids``, which ``zero_grad`` has cleared or zeroed."""
    for gradients in (*state.open_blocks, *state.pending):
        gradients.saved = {param: grad for param, grad in gradients.saved.items() if id(param) not in ids}
    for pending in list(state.pending):
        if pending.leaves.ids() <= ids:
            drop_unreduced(pending.leaves)
            state.pending.remove(pending)
    for optimizer in state.optimizers.listed():
        stash: OptimizerState = optimizer._amp_stash
        if stash.leaves.ids() <= ids:
            stash.forget_overflows()


def forget_overflows_if_cleared(stash: OptimizerState) -> None:
    """Forget the overflows that an optimizer knows of, where a script has cleared all of its gradients by hand."""
    drop_cleared(stash.leaves.masters)
    if not stash.leaves.gradients():
        stash.forget_overflows()
