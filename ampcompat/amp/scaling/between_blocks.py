"""What happens to gradients between two blocks: scripts ask for them, and clear them.

The head of ``block`` has the table of events.
"""

from __future__ import annotations

from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.half.masters import align_written
from ampcompat.amp.observers import notify
from ampcompat.amp.scaling.mistakes import warn_of
from ampcompat.amp.scaling.optimizer_state import OptimizerState
from ampcompat.amp.scaling.unreduced import averages_by_script
from ampcompat.amp.scaling.unscaling import drop_cleared, drop_unreduced


# -- a script asks for masters ----------------------------------------------------------------------------------------
def prepare_masters(optimizer: Optimizer) -> None:
    """Make the masters of ``optimizer`` ready for a script that asks for them.

    They follow what it did to the model's weights and gradients. Outside of blocks, a delayed transition is made: a
    script may end an accumulation early, clip, and step.
    """
    if state.observers:
        notify("on_master_params", optimizer)
    stash: OptimizerState = optimizer._amp_stash
    stash.look_up(optimizer)
    drop_cleared(stash.leaves.masters)
    if stash.in_block:
        return
    if not state.open_blocks:
        if stash.unreduced is not None and not averages_by_script(stash.leaves):
            warn_of("unreduced gradients read")
        stash.make_delayed_transitions()
    align_written(stash.leaves.masters)


# -- gradients are cleared ---------------------------------------------------------------------------------------------
def note_cleared(ids: set[int]) -> None:
    """Forget what is known of the gradients of leaves with these ``ids``, which ``zero_grad`` has cleared or zeroed."""
    for block in state.open_blocks:
        block.saved = {param: grad for param, grad in block.saved.items() if id(param) not in ids}
    for optimizer in state.optimizers.listed():
        stash: OptimizerState = optimizer._amp_stash
        if stash.leaves.ids() <= ids:
            if stash.unreduced is not None:
                drop_unreduced(stash.leaves)
            stash.forget_gradients()


def forget_overflows_if_cleared(stash: OptimizerState) -> None:
    """Forget the overflows that an optimizer knows of, where a script has cleared all of its gradients by hand."""
    drop_cleared(stash.leaves.masters)
    if not stash.leaves.gradients():
        stash.forget_overflows()
