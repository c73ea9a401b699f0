"""A ``scale_loss`` block from its beginning to its end, and what each event does to gradients.

While a block is open, ``p.grad`` holds what its backward pass gives, multiplied by its scale. Older gradients are set
aside in the block, and added as it ends, however it ends. Outside of blocks, ``p.grad`` is unscaled; only what
``fully_shard`` keeps to itself between ``no_sync`` blocks stays multiplied. A float32 parameter gets gradient 2 at
scale 1024; then, since the scale has grown, gradient 3 at scale 2048:

============================  ==========  =======================================  ==============================
moment                        ``p.grad``  elsewhere                                by
============================  ==========  =======================================  ==============================
first block begins            None        the loss is multiplied by 1024           :meth:`Block.__enter__`
``scaled.backward()``         2048                                                 torch
first block ends              2           the scale grows; the optimizer notes     :meth:`Block._end`
                                          the overflow flag, which is not set
second block begins           None        the block has set 2 aside                :meth:`Block.__enter__`
``scaled.backward()``         6144                                                 torch
second block ends             5                                                    :meth:`Block._end`
``optimizer.step()``          5           reads the flag                           ``steps.make_or_skip_step``
============================  ==========  =======================================  ==============================

At levels with masters, the unscaled sum is the gradient of the master: the head of ``unscaling`` has the numbers. What
each event does:

==============================  ====================================================================================
event                           gradients
==============================  ====================================================================================
block begins                    older ones are set aside; unaveraged and delayed ones stay, multiplied by the scale
block ends                      new ones are unscaled, older ones added
block ends with an overflow     the same; each optimizer that holds them skips a step
block gives no gradient         older ones come back
ends with ``delay_unscale``     unscaled, older ones added; the next block adds to them, and moves the scale
ends in DDP's ``no_sync``       unscaled; DDP averages them with the gradients of the next block
block raises                    as it ends, with what the failed pass has added; the scale moves with the next block
end of the block raises         cleared (None), older ones too
``step``                        used; cleared in masters
``step`` after an overflow      not used, once; cleared in masters
``step`` of one of two holders  used; shared masters keep them
``zero_grad``                   cleared; an overflow skips the next step all the same
``p.grad`` cleared              cleared, in masters too; an overflow skips the next step all the same
``p.grad`` edited               used; masters do not see it
``load_state_dict``             as they are
a param joins with a gradient   dropped where its session has scaled losses
==============================  ====================================================================================

Blocks and steps know each tensor once, also where several optimizers hold it. apex kept lists of gradients for each
optimizer (``apex/amp/handle.py: scale_loss``, ``_process_optimizer.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ampcompat import _torch
from ampcompat._log import say
from ampcompat._state import Part, state
from ampcompat.amp.casts.ambience import ensure_ambient_casts
from ampcompat.amp.hints import add_hint
from ampcompat.amp.observers import notify, observer_state
from ampcompat.amp.scaling.adapter import adapter_state
from ampcompat.amp.scaling.found_inf import FoundInf
from ampcompat.amp.scaling.groups import follow_changes
from ampcompat.amp.scaling.leaves import Leaves
from ampcompat.amp.scaling.older_gradients import OlderGradients, rescale_kept, scale_older
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, OptimizerState, optimizer_index
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.unscaling import flag_of_all_ranks, unscale_gradients


@dataclass(eq=False)
class BlockState(Part):
    """The blocks of this process.

    Attributes:
        open_blocks: The ``scale_loss`` blocks that are open, without those that leave gradients to torch.
    """

    open_blocks: list[Block] = field(default_factory=list)


block_state = state.add(BlockState())


def open_block_of(leaves: Leaves) -> Block | None:
    """The open block that gives gradients to any of ``leaves``."""
    if not block_state.open_blocks:
        return None
    ids = leaves.ids()
    return next((block for block in block_state.open_blocks if not ids.isdisjoint(block.leaves.ids())), None)


@dataclass(eq=False)
class Block:
    """The context that ``scale_loss`` returns: idle, then open, then done.

    Attributes:
        scaler: The scaler of its loss.
        optimizers: The optimizers that it was opened for.
        loss: The script's loss, until it is scaled.
        delays_scale: Whether the next block moves the scale, in the place of this one.
        joins_next: Whether the next block adds its gradients to these in ``p.grad`` (``delay_unscale``): what a script
            does there in the block, as an all-reduce by hand, is done to the sum.
        entered: Whether it was entered.
        stashes: What amp keeps with each of its optimizers; looked up when it opens, as the leaves are.
        leaves: The tensors of its optimizers: it unscales their gradients, and no others.
        is_plain: Whether it leaves gradients to torch: the scale is always one, and there are no masters.
        scale: What its loss is multiplied by (0-dim float32); None where that is always one.
        older: Gradients from before it, while it is open.
        has_gradients: Whether its leaves had new gradients at its end, for the watch of ``misuse``; None before, and in
            a plain block.
    """

    scaler: LossScaler
    optimizers: list[AmpOptimizer]
    loss: torch.Tensor
    delays_scale: bool
    joins_next: bool
    entered: bool = field(init=False, default=False)
    stashes: list[OptimizerState] = field(init=False)
    leaves: Leaves = field(init=False)
    is_plain: bool = field(init=False)
    scale: torch.Tensor | None = field(init=False, default=None)
    older: OlderGradients = field(init=False, default_factory=OlderGradients)
    has_gradients: bool | None = field(init=False, default=None)

    # -- the beginning -------------------------------------------------------------------------------------------------
    @_torch.eager
    def __enter__(self) -> torch.Tensor:
        """Set older gradients aside; return the scaled loss."""
        if self.entered:
            raise RuntimeError(
                "a scale_loss block was entered twice - it is for one backward pass - call amp.scale_loss(loss,"
                " optimizer) for each."
            )
        self.entered = True
        ensure_ambient_casts()
        self._find_leaves()
        if block_state.open_blocks:
            _refuse_inside_another(self)
        if observer_state.observers:
            notify("on_scale_loss", self.loss, self.scaler, self.optimizers)
        scaled = self._multiply()
        if observer_state.observers:
            notify("on_scaled_loss", self, scaled)
        if not self.is_plain:  # after what may raise
            self._make_room()
            block_state.open_blocks.append(self)
        return scaled

    def _find_leaves(self) -> None:
        """Find the tensors that get gradients, and whether anything is to be done about these."""
        for optimizer in self.optimizers:
            follow_changes(optimizer)
        self.stashes = [optimizer._amp_stash for optimizer in self.optimizers]
        self.leaves = _leaves_of(self.stashes)
        has_masters = any(stash.leaves.masters or stash.session.policy.master_weights for stash in self.stashes)
        self.is_plain = self.scaler.is_one and not has_masters

    def _multiply(self) -> torch.Tensor:
        """Return the loss times the scale, in float32."""
        scaled = self.loss.float()
        if not self.scaler.is_one:
            self.scale = self.scaler.copy_on(self.loss.device)
            scaled = scaled * self.scale
        del self.loss  # so that it is freed when the script drops it
        return scaled

    def _make_room(self) -> None:
        """Make room for new gradients in ``p.grad``."""
        unaveraged = [stash for stash in self.stashes if stash.unaveraged]
        if not unaveraged and not self._goes_on():
            self.older.set_aside(self.leaves)
            return
        scale_older(self.leaves, self.scale, sparse=bool(unaveraged))
        for stash in unaveraged:
            rescale_kept(stash.leaves, stash.kept_scale, self.scale)

    def _goes_on(self) -> bool:
        """Whether it adds to the gradients of a delayed block; those in a graph of their own it sets aside."""
        if not any(stash.joins_next for stash in self.stashes):
            return False
        return not any(gradient.requires_grad for gradient in self.leaves.gradients())

    # -- the end -------------------------------------------------------------------------------------------------------
    @_torch.eager
    def __exit__(self, kind: object, error: BaseException | None = None, trace: object = None) -> None:
        """Unscale the new gradients and add older ones; after an exception, leave the scale alone."""
        has_failed = kind is not None
        if not self.is_plain:
            block_state.open_blocks.remove(self)
            self._end(has_failed)
        if observer_state.observers:
            notify("on_block_end", self, has_failed)
            if not has_failed:
                notify("on_gradients", self.scaler, self.optimizers)
        if isinstance(error, Exception):
            if observer_state.observers:
                notify("on_failure", error)
            add_hint(error)

    @_torch.without_grad
    def _end(self, has_failed: bool) -> None:
        """Unscale new gradients, add older ones, and count the backward pass; clear all where that raises.

        No host sync.
        """
        found_inf = FoundInf()
        try:
            self.has_gradients = unscale_gradients(self.leaves, found_inf, self.scale)
            self.older.add_to_new()
            for stash in self._holders():
                stash.joins_next = self.joins_next
            if self._must_wait_for_others(has_failed):
                for stash in self._holders():
                    stash.note_unaveraged(self.scaler, self.scale)
            else:
                self._count_pass(found_inf.flag(), moves_scale=not (has_failed or self.delays_scale))
        except BaseException:
            self._clear()  # some may be unscaled, and others not
            raise

    def _clear(self) -> None:
        """Clear all gradients of its leaves, older ones too."""
        self.leaves.clear_gradients()
        self.older = OlderGradients()
        tensors = self.leaves.tensors()
        for adapter in adapter_state.adapters:
            adapter.clear_kept_gradients(tensors)
        say("Unscaling raised: the gradients that were to be unscaled are cleared.")

    def _must_wait_for_others(self, has_failed: bool) -> bool:
        """Whether this pass is left to a later block or step, since other processes may not know of its overflow.

        So it is where gradients were not averaged (``no_sync``), and after an exception: other processes may not come
        here, and would not answer a collective call.
        """
        if not adapter_state.adapters:
            return False
        tensors = self.leaves.tensors()
        return has_failed or any(adapter.defers_reduction(tensors) for adapter in adapter_state.adapters)

    def _count_pass(self, found_inf: torch.Tensor | None, moves_scale: bool) -> None:
        """Have the scaler count the backward pass, and optimizers note its flag; or leave that to the next block.

        Scalers of blocks whose gradients were averaged with these count theirs: whose loss an overflow stems from, no
        process knows.
        """
        if self.scale is not None:
            found_inf = flag_of_all_ranks(found_inf, self.leaves)
        scalers = {self.scaler: None}
        for stash in self.stashes:
            scalers.update(dict.fromkeys(stash.unaveraged))
        holders = self._holders()
        for scaler in scalers:
            flag = scaler.adjust(found_inf) if moves_scale else scaler.delay(found_inf)
            if flag is None:
                continue
            for stash in holders:
                if moves_scale:
                    stash.note_overflow(scaler, flag)
                else:
                    stash.note_delayed_overflow(scaler, flag)
        for stash in holders:
            stash.unaveraged = []

    def _holders(self) -> list[OptimizerState]:
        """The stashes of its optimizers, and of every other optimizer that holds one of its leaves."""
        if not any(stash.shared for stash in self.stashes):
            return self.stashes
        ids = self.leaves.ids()
        stashes = [optimizer._amp_stash for optimizer in optimizer_index.listed()]
        return [stash for stash in stashes if not ids.isdisjoint(stash.leaves.ids())]


def _leaves_of(stashes: list[OptimizerState]) -> Leaves:
    """The leaves of optimizers with these ``stashes``, each once."""
    if len(stashes) == 1:
        return stashes[0].leaves
    masters = {id(master): master for stash in stashes for master in stash.leaves.masters}
    masterless = {id(param): param for stash in stashes for param in stash.leaves.masterless}
    return Leaves(list(masters.values()), list(masterless.values()))


def _refuse_inside_another(block: Block) -> None:
    """Refuse a block inside one that gives gradients to the same tensors."""
    outer = open_block_of(block.leaves)
    if outer is None:
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
