"""What each event does to gradients, from a block's beginning to the step.

Nearly always nothing is pending, and the first column tells all. ``gradients`` says who owns what is scaled,
``unscaling`` where the numbers are.

==============================  ======================================  ==============================================
event                           nothing pending                         pending gradients in its leaves
==============================  ======================================  ==============================================
block begins                    older gradients are saved               rescaled; if not all are the block's, unscaled
block ends                      unscaled, added to older ones           the same, in one pass
block ends with an overflow     a step is skipped; other holders check  the same
block gives no gradient         older ones come back                    unscaled
ends with ``delay_unscale``     new ones are pending                    pending together
ends in DDP's ``no_sync``       new ones are pending                    pending together
block raises                    as it began                             lost, with a warning
end of the block raises         cleared (None), older ones too          cleared
``step``                        used; dropped from masters              unscaled, then used
``step`` after an overflow      skipped; dropped from masters           unscaled, then skipped
``step`` of one of two holders  used; shared masters keep them          unscaled, then used
``zero_grad``                   gone, with what is known of them        gone
``p.grad`` cleared              gone, in masters too                    gone; unscaled ones from before stay
``p.grad`` edited               used; masters do not see it             unscaled as they are now
``load_state_dict``             as they are                             as they are
a param joins with a gradient   dropped where losses are scaled         as they are
==============================  ======================================  ==============================================

A block takes each tensor once, also where several of its optimizers hold it. The gradient of a master that several
optimizers hold stays until it is cleared, as the gradient of a float32 weight does.

apex kept lists of gradients for each optimizer (``apex/amp/_process_optimizer.py``).
"""

from __future__ import annotations

from ampcompat import _torch
from ampcompat._log import say
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.half.masters import sync_written
from ampcompat.amp.scaling.backward_methods import save_or_prepare, unscale_by_scripts
from ampcompat.amp.scaling.device_steps import report_arrived
from ampcompat.amp.scaling.gradients import Block, Overflow, Pending, ScaledGradients, pending_in
from ampcompat.amp.scaling.leaves import Leaves
from ampcompat.amp.scaling.mistakes import warn_of
from ampcompat.amp.scaling.optimizer_state import AmpOptimizerState
from ampcompat.amp.scaling.unscaling import add_saved, drop_cleared, rescale, unscale_new


# -- a block begins ----------------------------------------------------------------------------------------------------
def begin(block: Block, delay: bool) -> None:
    """Make room for the gradients of ``block``; ``delay``: its end leaves them scaled."""
    if len(state.optimizers.live) > 1:
        for other in state.optimizers.listed():
            drop_cleared(other._amp_stash.leaves.masters)  # before the backward pass adds to what was cleared
    scaled = _take_pending(block) if state.pending else set()
    for optimizer in block.optimizers:
        _settle_earlier_gradients(optimizer, are_scaled=bool(scaled))
    for optimizer in block.optimizers:
        save_or_prepare(optimizer, block, scaled, delay)


def _settle_earlier_gradients(optimizer: Optimizer, are_scaled: bool) -> None:
    """Before a block: say what the device has decided, and forget the flags of gradients that were cleared."""
    stash: AmpOptimizerState = optimizer._amp_stash
    if stash.undecided_steps:
        report_arrived(stash)
    if state.watch is not None and not are_scaled:
        state.watch.look_before_block(optimizer)
    if not are_scaled and (stash.overflows or stash.suspect):
        _forget_flags_of_cleared(stash)


def _take_pending(block: Block) -> set[int]:
    """Bring pending gradients within ``block`` to its scale, and unscale those that only overlap it.

    Returns:
        Ids of the leaves that have scaled gradients now.
    """
    scaled: set[int] = set()
    ids = block.leaves.ids()
    for pending in pending_in(block.leaves):
        own = pending.leaves.ids()
        if not own.issubset(ids):
            end_pending(pending)
            continue
        rescale(pending, block.scalers[0])
        state.pending.remove(pending)
        block.took_pending = True
        block.saved.update(pending.saved)
        block.scalers = list(dict.fromkeys([*block.scalers, *pending.scalers]))
        scaled |= own
    return scaled


def _forget_flags_of_cleared(stash: AmpOptimizerState) -> None:
    """Forget overflows of gradients where a script has cleared all of them by hand."""
    drop_cleared(stash.leaves.masters)
    if not stash.leaves.gradients():
        stash.forget_overflows()


# -- it ends -----------------------------------------------------------------------------------------------------------
@_torch.without_grad
def end(block: Block, moves_scale: bool = True) -> bool:
    """Unscale the new gradients of ``block``, add saved ones, and make the scaler's transition. No host sync.

    Args:
        block: An open block.
        moves_scale: Move the scale now; otherwise the next transition counts the overflow.

    Returns:
        Whether there were new gradients.
    """
    has_new_grads, leaves = unscale_by_scripts(block)
    overflows, has_others = _unscale(block, leaves, moves_scale)
    for optimizer in block.optimizers:
        optimizer._amp_stash.note_overflows(overflows)
    if overflows:
        _suspect_other_holders(block)
    return has_new_grads or has_others


def _unscale(gradients: ScaledGradients, leaves: Leaves, moves_scale: bool) -> tuple[list[Overflow], bool]:
    """Unscale ``gradients`` of ``leaves``; return the overflow flags of all, and whether these had any."""
    first, *others = gradients.scalers
    has_new_grads = unscale_new(leaves, first, gradients.scale)
    if gradients.saved:
        add_saved(gradients.saved)
    if gradients.scale is None:  # a static scale of one
        if moves_scale:
            first.count_clean_pass()
        return [], has_new_grads
    found_inf = first.take_found_inf()
    flags = [(first, first.adjust(found_inf) if moves_scale else first.delay(found_inf))]
    flags += [(other, other.adjust(found_inf)) for other in others]
    return [Overflow(scaler, flag) for scaler, flag in flags if flag is not None], has_new_grads


def _suspect_other_holders(block: Block) -> None:
    """Make other optimizers that hold a leaf of ``block`` look at their gradients before they step."""
    if not any(optimizer._amp_stash.shared for optimizer in block.optimizers):
        return
    for other in state.optimizers.listed():
        if other not in block.optimizers and block.overlaps(other._amp_stash.leaves):
            other._amp_stash.suspect = True


def leave_pending(block: Block, is_unsynced: bool) -> None:
    """Leave the gradients of ``block`` scaled, to a later block or to the step."""
    scale = block.scalers[0].scale_on() if block.scale is None else block.scale
    state.pending.append(Pending(block.leaves, block.scalers, scale, block.saved, is_unsynced))


# -- it raises ---------------------------------------------------------------------------------------------------------
def undo_begin(block: Block) -> None:
    """Undo :func:`begin`, which has raised, or the scaling of the loss: no new gradients are there."""
    if block.took_pending:
        put_back(block)
        return
    add_saved(block.saved)


def put_back(block: Block) -> None:
    """Put back what was saved when ``block`` began; new gradients, and pending ones, are cleared."""
    block.scalers[0].forget_found_inf()
    drop_cleared(block.leaves.masters)
    _clear_scaled(block.leaves)
    add_saved(block.saved)
    if block.took_pending:
        warn_of("pending gradients lost")


def clear_partly_unscaled(gradients: ScaledGradients) -> None:
    """Clear what an exception has left partly unscaled. Optimizers step without what is None."""
    gradients.scalers[0].forget_found_inf()
    _clear_scaled(gradients.leaves)
    for master in gradients.leaves.masters:
        master.drop_gradient()
    gradients.saved.clear()
    say("The end of a scale_loss block raised: its gradients are cleared.")


def _clear_scaled(leaves: Leaves) -> None:
    """Clear the gradients of ``leaves`` in the model, and those that a wrapper keeps for a later backward pass."""
    for leaf in leaves.tensors():
        leaf.grad = None
    _drop_unsynced(leaves)


def _drop_unsynced(leaves: Leaves) -> None:
    for adapter in state.adapters:
        adapter.drop_unsynced_gradients(leaves.tensors())


# -- pending gradients -------------------------------------------------------------------------------------------------
@_torch.without_grad
def end_pending(pending: Pending) -> None:
    """Unscale ``pending`` gradients before they are used."""
    state.pending.remove(pending)
    try:
        overflows, _ = _unscale(pending, pending.leaves, moves_scale=True)
    except BaseException:
        clear_partly_unscaled(pending)
        raise
    for optimizer in state.optimizers.listed():
        if pending.overlaps(optimizer._amp_stash.leaves):
            optimizer._amp_stash.note_overflows(overflows)


def clear_pending(pending: Pending) -> None:
    """Clear ``pending`` gradients, which no optimizer under amp will unscale."""
    state.pending.remove(pending)
    _clear_scaled(pending.leaves)


def prepare_masters(optimizer: Optimizer) -> None:
    """Make the masters of ``optimizer`` ready for a script that asks for them.

    They follow what it did to the model's weights and gradients. Outside of blocks, pending gradients are unscaled, and
    the scale moves: a script may end an accumulation early, clip, and step.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    stash.look_up(optimizer)
    drop_cleared(stash.leaves.masters)
    if stash.in_block:
        return
    if not state.open_blocks:
        for pending in pending_in(stash.leaves):
            if pending.is_unsynced:
                warn_of("unsynced gradients read")
            else:
                end_pending(pending)
    sync_written(stash.leaves.masters)


# -- gradients are cleared ---------------------------------------------------------------------------------------------
def note_cleared(ids: set[int]) -> None:
    """Forget what is known of the gradients of leaves with these ``ids``, which ``zero_grad`` has cleared or zeroed."""
    for gradients in (*state.open_blocks, *state.pending):
        gradients.saved = {param: grad for param, grad in gradients.saved.items() if id(param) not in ids}
    for pending in list(state.pending):
        if pending.leaves.ids() <= ids:
            _drop_unsynced(pending.leaves)
            state.pending.remove(pending)
    for optimizer in state.optimizers.listed():
        stash: AmpOptimizerState = optimizer._amp_stash
        if stash.knows_of_gradients and stash.leaves.ids() <= ids:
            stash.note_cleared()
