"""A ``scale_loss`` block from its entry to its end, and what each event does to gradients.

While a block is open, ``p.grad`` holds what its backward pass gives, multiplied by its scale; older gradients are set
aside in the block, and added as it ends, however it ends. Outside of blocks all gradients are unscaled. A float32 parameter gets gradient 2 at scale 1024; then, since the scale
has grown, gradient 3 at scale 2048:

============================  ==========  =======================================  ==============================
moment                        ``p.grad``  elsewhere                                by
============================  ==========  =======================================  ==============================
first block begins            None        the loss is multiplied by 1024           :meth:`Block.__enter__`
``scaled.backward()``         2048                                                 torch
first block ends              2           the optimizer notes the overflow flag,   :meth:`Block._unscale`
                                          and the scale grows
second block begins           None        the block saves 2                        ``set_aside``
``scaled.backward()``         6144                                                 torch
second block ends             5                                                    :meth:`Block._unscale`
``optimizer.step()``          5           reads the flag                           ``make_or_skip_step``
============================  ==========  =======================================  ==============================

At levels with masters, the unscaled sum is the gradient of the master: the head of ``gradients`` has the numbers. A
block that an exception leaves ends as any other, but for the scale: what the failed pass has added stays, as in plain
torch. Gradients of this process alone, as in DDP's ``no_sync``, need no more than that the scale waits: an overflow
stays in them, multiplied or not, until a block has them averaged, and all processes find it.

apex kept lists of older gradients for each optimizer (``apex/amp/handle.py: scale_loss``, ``_process_optimizer.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ampcompat import _torch
from ampcompat._log import say
from ampcompat._state import Part, state
from ampcompat.amp.casts.ambience import follow_ambient_casts
from ampcompat.amp.hints import add_hint
from ampcompat.amp.observers import notify, observer_state
from ampcompat.amp.scaling.adapter import adapter_state
from ampcompat.amp.scaling.gradients import add_saved, clear, scale_unreduced, set_aside, unscale_all
from ampcompat.amp.scaling.groups import follow_changes
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, Leaves, OptimizerState, optimizer_index
from ampcompat.amp.scaling.scaler import LossScaler


@dataclass(eq=False)
class BlockState(Part):
    """The blocks of this process.

    Attributes:
        open_blocks: The ``scale_loss`` blocks that are open.
    """

    open_blocks: list[Block] = field(default_factory=list)


block_state = state.add(BlockState())


def open_block_of(leaves: Leaves) -> Block | None:
    """The open block that gives gradients to any of ``leaves``; none that leaves gradients to torch."""
    blocks = [block for block in block_state.open_blocks if not block.is_plain]
    return next((block for block in blocks if not block.leaves.ids().isdisjoint(leaves.ids())), None)


@dataclass(eq=False)
class Block:
    """The context that ``scale_loss`` returns: idle, then open, then done.

    Attributes:
        scaler: The scaler of its loss.
        optimizers: The optimizers that it was opened for.
        loss: The script's loss, until it is scaled.
        leaves_scale: Whether the scale is left alone at its end.
        stashes: What amp keeps with each of its optimizers; looked up when it opens, as the leaves are.
        leaves: The tensors that its backward pass gives gradients to.
        scale: What their gradients are multiplied by (0-dim float32); None where nothing is scaled.
        saved: Older gradients of this block's tensors, while it is open.
        is_plain: Whether it leaves gradients to torch: the scale is always one, and there are no masters.
        has_gradients: Whether its tensors had any at its end; None before, and in a plain block.
        entered: Whether it was entered.
    """

    scaler: LossScaler
    optimizers: list[AmpOptimizer]
    loss: torch.Tensor
    leaves_scale: bool
    stashes: list[OptimizerState] = field(init=False)
    leaves: Leaves = field(init=False)
    scale: torch.Tensor | None = field(init=False, default=None)
    saved: dict[torch.Tensor, torch.Tensor] = field(init=False, default_factory=dict)
    is_plain: bool = field(init=False, default=False)
    has_gradients: bool | None = field(init=False, default=None)
    entered: bool = field(init=False, default=False)

    # -- entry ---------------------------------------------------------------------------------------------------------
    @_torch.eager
    def __enter__(self) -> torch.Tensor:
        """Multiply older gradients by the scale; return the scaled loss."""
        if self.entered:
            raise RuntimeError(
                "a scale_loss block was entered twice - it is for one backward pass - call amp.scale_loss(loss,"
                " optimizer) for each."
            )
        self.entered = True
        follow_ambient_casts()
        for optimizer in self.optimizers:
            follow_changes(optimizer)
        self.stashes = [optimizer._amp_stash for optimizer in self.optimizers]
        self.leaves = _leaves_of(self.stashes)
        is_one = self.scaler.is_one
        self.is_plain = is_one and not self._has_masters()
        if block_state.open_blocks:
            _refuse_inside_another(self)
        if observer_state.observers:
            notify("on_scale_loss", self.loss, self.scaler, self.optimizers)
        if not is_one:
            self.scale = self.scaler.copy_on(self.loss.device)
        scaled = self.loss.float() if self.scale is None else self.loss.float() * self.scale
        del self.loss  # so that it is freed when the script drops it
        if not self.is_plain:
            if any(stash.unreduced for stash in self.stashes):
                scale_unreduced(self.leaves, self.scaler, self.scale)
            else:
                set_aside(self.leaves, self.saved)
        block_state.open_blocks.append(self)
        if observer_state.observers:
            notify("on_scaled_loss", self, scaled)
        return scaled

    def _has_masters(self) -> bool:
        """Whether its optimizers step masters, to which the gradients of half weights are added at the end."""
        return any(stash.leaves.masters or stash.session.policy.master_weights for stash in self.stashes)

    # -- exit ----------------------------------------------------------------------------------------------------------
    @_torch.eager
    def __exit__(self, kind: object, error: BaseException | None = None, trace: object = None) -> None:
        """Unscale the gradients; after an exception, leave the scale alone, and add a hint to it."""
        block_state.open_blocks.remove(self)
        if not self.is_plain:
            self._unscale(has_failed=kind is not None)
        if observer_state.observers:
            notify("on_block_end", self)
            if kind is None:
                notify("on_gradients", self.scaler, self.optimizers)
        if isinstance(error, Exception):
            if observer_state.observers:
                notify("on_failure", error)
            add_hint(error)

    @_torch.without_grad
    def _unscale(self, *, has_failed: bool) -> None:
        """Unscale the gradients, and have the scaler and the optimizers note the flag. No host sync."""
        scaler = self.scaler
        moves_scale = not has_failed and not self.leaves_scale
        try:
            self.has_gradients = unscale_all(self.leaves, scaler, self.scale, is_shared=not has_failed) or bool(self.saved)
            add_saved(self.saved)
        except BaseException:
            scaler.forget_found_inf()
            clear(self.leaves)
            self.saved.clear()
            say("Unscaling raised: the gradients that were to be unscaled are cleared.")
            raise
        scalers = [scaler]
        if adapter_state.adapters:
            scalers += [each for stash in self.stashes for each in stash.unreduced]
            if any(adapter.defers_reduction(self.leaves.tensors()) for adapter in adapter_state.adapters):
                scaler.forget_found_inf()  # other processes do not know of it
                for stash in self.stashes:
                    stash.unreduced = list(dict.fromkeys(scalers))
                return
        found_inf = scaler.take_found_inf()
        for each in scalers if len(scalers) == 1 else dict.fromkeys(scalers):
            flag = self._count(each, found_inf, moves_scale)
            for stash in self._holders():
                stash.unreduced = []
                if flag is not None:
                    stash.note_overflow(each, flag)

    def _count(self, scaler: LossScaler, found_inf: torch.Tensor | None, moves_scale: bool) -> torch.Tensor | None:
        """Have ``scaler`` count the pass; return the flag for the step."""
        return scaler.adjust(found_inf) if moves_scale else scaler.put_off(found_inf)

    def _holders(self) -> list[OptimizerState]:
        """Its optimizers' stashes; those of others too where they hold a tensor that got gradients here."""
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
