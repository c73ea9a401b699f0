"""A ``scale_loss`` block from its entry to its end, and what each event does to gradients.

A float32 parameter gets gradient 2 at scale 1024; then, since the scale has grown, gradient 3 at scale 2048:

============================  ==========  =======================================  ==============================
moment                        ``p.grad``  elsewhere                                by
============================  ==========  =======================================  ==============================
first block begins            None        the loss is multiplied by 1024           :meth:`Block.__enter__`
``scaled.backward()``         2048                                                 torch
first block ends              2           the optimizer notes the overflow flag,   :meth:`Block._unscale`
                                          and the scale grows
second block begins           None        the block saves 2                        :meth:`Block._begin`
``scaled.backward()``         6144                                                 torch
second block ends             5                                                    :meth:`Block._unscale`
or its body raises            2                                                    :meth:`Block._put_back`
``optimizer.step()``          5           reads the flag                           ``make_or_skip_step``
============================  ==========  =======================================  ==============================

At levels with masters, the unscaled sum is the gradient of the master: the head of ``unscaling`` has the numbers. In
DDP's ``no_sync``, gradients are those of one process until a later block averages them: ``unreduced``. What each event
does:

==============================  ==================================================================================
event                           gradients
==============================  ==================================================================================
block begins                    older ones are saved in the block; those of ``no_sync`` go into ``p.grad``, scaled
block ends                      new ones are unscaled, saved ones added
block ends with an overflow     the same; a step is skipped, other holders check
block gives no gradient         older ones come back
ends with ``delay_unscale``     the same; the next block, step or ``amp.master_params`` moves the scale
ends in DDP's ``no_sync``       the same; the next block brings them back to be averaged
block raises                    as it began
end of the block raises         cleared (None), older ones too
``step``                        used; dropped from masters
``step`` after an overflow      skipped; dropped from masters
``step`` of one of two holders  used; shared masters keep them
``zero_grad``                   gone, with what is known of them
``p.grad`` cleared              gone, in masters too
``p.grad`` edited               used; masters do not see it
``load_state_dict``             as they are
a param joins with a gradient   dropped where losses are scaled
==============================  ==================================================================================

A block takes each tensor once, also where several of its optimizers hold it. The gradient of a master that several
optimizers hold stays until it is cleared, as the gradient of a float32 weight does.

apex kept lists of gradients for each optimizer (``apex/amp/handle.py: scale_loss``, ``_process_optimizer.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ampcompat import _torch
from ampcompat.amp.casts.ambience import follow_ambient_casts
from ampcompat.amp.hints import add_hint
from ampcompat.amp.observers import notify, observer_state
from ampcompat.amp.scaling import backward_methods
from ampcompat.amp.scaling.adapter import adapter_state
from ampcompat.amp.scaling.clearing import forget_overflows_if_cleared
from ampcompat.amp.scaling.groups import follow_changes
from ampcompat.amp.scaling.loss_scale import Transition
from ampcompat.amp.scaling.mistakes import warn_of
from ampcompat.amp.scaling.open_blocks import OpenBlock, block_state, leaves_of, open_block_of
from ampcompat.amp.scaling.optimizer_state import Overflow, optimizer_index
from ampcompat.amp.scaling.steps import report_arrived
from ampcompat.amp.scaling.unreduced import (
    bring_back,
    count_reduced,
    drop_brought,
    kept_by_wrappers,
    note_unreduced,
    waits_for_reduction,
)
from ampcompat.amp.scaling.unscaling import (
    add_saved,
    clear_in_model,
    clear_partly_unscaled,
    drop_cleared,
    save_grads,
    show_sums,
    unscale_new,
)


@dataclass(eq=False)
class Block(OpenBlock):
    """The context that ``scale_loss`` returns: idle, then open, then done.

    Its methods are the phases, in their order: :meth:`_begin` makes room for new gradients; at the end,
    :meth:`_unscale`; after an exception, :meth:`_put_back`.

    Attributes:
        loss: The script's loss, until it is scaled.
        transition: When the scale moves.
        entered: Whether it was entered.
        needs_scale: Whether its loss is multiplied by the scale.
        has_own_methods: Whether a script has replaced ``_prepare_amp_backward`` or ``_post_amp_backward`` of one of its
            optimizers.
    """

    loss: torch.Tensor
    transition: Transition
    entered: bool = field(init=False, default=False)
    needs_scale: bool = field(init=False, default=False)
    has_own_methods: bool = field(init=False, default=False)

    # -- entry ---------------------------------------------------------------------------------------------------------
    @_torch.eager
    def __enter__(self) -> torch.Tensor:
        """Save older gradients for the backward pass; return the scaled loss."""
        if self.entered:
            raise RuntimeError(
                "a scale_loss block was entered twice - it is for one backward pass - call amp.scale_loss(loss,"
                " optimizer) for each."
            )
        self.entered = True
        follow_ambient_casts()
        self._find_leaves()
        if block_state.open_blocks:
            _refuse_inside_another(self)
        if observer_state.observers:
            notify("on_scale_loss", self.loss, self.scaler, self.optimizers)
            notify("on_block", self)
        block_state.open_blocks.append(self)
        try:
            if not self.is_plain:
                self._begin()
            return self._multiply()
        except BaseException:
            block_state.open_blocks.remove(self)
            self._undo_begin()
            self._tell_undone()
            raise

    def _find_leaves(self) -> None:
        """Find the tensors that get gradients, and whether anything is to be done about these."""
        for optimizer in self.optimizers:
            follow_changes(optimizer)
        self.stashes = [optimizer._amp_stash for optimizer in self.optimizers]
        self.leaves = leaves_of(self.optimizers)
        self.needs_scale = not self.scaler.is_one or self._has_flags()
        self.is_plain = not self.needs_scale and not self._has_masters()

    def _has_flags(self) -> bool:
        """Whether steps of its optimizers wait for the flags of other scalers: then :meth:`_begin` has to look."""
        return any(stash.overflows or stash.overflows_for_script for stash in self.stashes)

    def _has_masters(self) -> bool:
        """Whether its optimizers step masters, to which the gradients of half weights are added at the end."""
        return any(stash.leaves.masters or stash.session.policy.master_weights for stash in self.stashes)

    def _begin(self) -> None:
        """Take the scale, and make room for the gradients of the backward pass."""
        if self.needs_scale:
            self.scale = self.scaler.copy_on(self.loss.device)
        # What scripts, earlier blocks and steps have left.
        if len(optimizer_index.live) > 1:
            for other in optimizer_index.listed():
                drop_cleared(other._amp_stash.leaves.masters)  # before the backward pass adds to what was cleared
        for stash in self.stashes:
            report_arrived(stash)
            if stash.overflows or stash.overflows_for_script or stash.checks_gradients:
                forget_overflows_if_cleared(stash)
        # Older gradients go out of ``p.grad``.
        self.has_own_methods = backward_methods.are_replaced(self.optimizers)
        if self.has_own_methods:
            backward_methods.save_by_scripts(self)
        else:
            save_grads(self.leaves, self.saved)
        if adapter_state.adapters:
            bring_back(self)

    def _multiply(self) -> torch.Tensor:
        """Return the loss times the scale, in float32."""
        loss = self.loss.float()
        if self.scale is None:
            return loss
        scaled = loss * self.scale
        if not self.scaler.is_one:
            for stash in self.stashes:
                stash.session.has_scaled = True
        del self.loss  # so that it is freed when the script drops it
        if observer_state.observers:
            notify("on_scaled_loss", self, scaled)
        return scaled

    def _undo_begin(self) -> None:
        """Undo :meth:`_begin`, which has raised, or the scaling of the loss: no new gradients are there."""
        if self.brought is not None:
            self._put_back()
            return
        add_saved(self.saved)
        show_sums(self.leaves.masters)

    # -- exit ----------------------------------------------------------------------------------------------------------
    @_torch.eager
    def __exit__(self, kind: object, error: BaseException | None = None, trace: object = None) -> None:
        """Unscale the new gradients; or, after an exception, undo the block."""
        optimizer_index.gone.clear()  # the block may have added scaled gradients to what collected optimizers held
        if kind is not None:
            self._undo(error)
            return
        try:
            if not self.is_plain:
                self._unscale()
        except BaseException:
            block_state.open_blocks.remove(self)
            clear_partly_unscaled(self)
            self._tell_undone()
            raise
        block_state.open_blocks.remove(self)
        if observer_state.observers:
            notify("on_block_end", self)
            notify("on_gradients", self.scaler, self.optimizers)

    @_torch.without_grad
    def _unscale(self) -> None:
        """Unscale the new gradients, add saved ones, and make the scaler's transition. No host sync."""
        scripts_had_grads = False
        leaves = self.leaves
        drop_brought(self)
        if self.has_own_methods:
            scripts_had_grads, leaves = backward_methods.unscale_by_scripts(self)
        self.has_new_grads = unscale_new(leaves, self.scaler, self.scale) or scripts_had_grads
        if self.saved:
            add_saved(self.saved)
        if self.transition is Transition.AT_STEP:
            for stash in self.stashes:
                stash.scalers_to_move.add(self.scaler)
        if adapter_state.adapters and waits_for_reduction(self.leaves):
            note_unreduced(self)
            return
        found_inf = self.scaler.take_found_inf()
        flag = self.scaler.adjust(found_inf, self.transition)
        if flag is not None:
            for_script = self.scaler.uncounted if self.transition is Transition.BY_SCRIPT else None
            self._note_overflow(Overflow(self.scaler, flag, for_script))
        if adapter_state.adapters:
            for overflow in count_reduced(self, found_inf):
                self._note_overflow(overflow)
        if self.transition is not Transition.AT_STEP:
            for stash in self.stashes:
                stash.move_scales()
                stash.scalers_to_move.clear()

    def _note_overflow(self, overflow: Overflow) -> None:
        """Note ``overflow`` in the optimizers, and have others check that hold a leaf of the block, too."""
        for stash in self.stashes:
            stash.note_overflow(overflow)
            if stash.shared:
                self._make_other_holders_check()

    def _make_other_holders_check(self) -> None:
        """Make other optimizers that hold a leaf of the block look at their gradients before they step.

        Whether the block has overflowed, the host does not know.
        """
        for other in optimizer_index.listed():
            if other not in self.optimizers and self.overlaps(other._amp_stash.leaves):
                other._amp_stash.checks_gradients = True

    # -- exit, after an exception --------------------------------------------------------------------------------------
    def _undo(self, error: BaseException | None) -> None:
        """Close the block after ``error``, and add a hint to it where mixed precision provokes it."""
        block_state.open_blocks.remove(self)
        if not self.is_plain:
            self._put_back()
        self._tell_undone()
        if isinstance(error, Exception):
            if observer_state.observers:
                notify("on_failure", error)
            add_hint(error)

    def _tell_undone(self) -> None:
        """Tell observers that an exception has ended the block, which they have heard begin."""
        if observer_state.observers:
            notify("on_block_undone", self)

    def _put_back(self) -> None:
        """Put back what was saved when the block began; new gradients are cleared."""
        self.scaler.forget_found_inf()
        drop_cleared(self.leaves.masters)
        if adapter_state.adapters and kept_by_wrappers(self.leaves):
            warn_of("unreduced gradients lost")
        clear_in_model(self.leaves)
        add_saved(self.saved)
        show_sums(self.leaves.masters)


# -- what is refused ---------------------------------------------------------------------------------------------------
def _refuse_inside_another(block: OpenBlock) -> None:
    """Refuse a block inside one that gives gradients to the same tensors, unless both are plain."""
    outer = open_block_of(block.leaves)
    if outer is None or (outer.is_plain and block.is_plain):
        return
    if any(optimizer in outer.optimizers for optimizer in block.optimizers):
        raise RuntimeError(
            "scale_loss inside a scale_loss block of the same optimizer - gradients of the two could not be told apart"
            " - close the first block, or add the losses up."
        )
    other = type(outer.optimizers[0]).__name__
    raise RuntimeError(
        f"scale_loss inside the scale_loss block of another optimizer ({other}) that shares"
        " parameters with this one - the gradients of the two losses would be added up in the same tensors, and"
        " unscaled twice - close the first block before, or give both optimizers to one block:"
        " `with amp.scale_loss(loss_a + loss_b, [optimizer_a, optimizer_b])` (D38)."
    )
