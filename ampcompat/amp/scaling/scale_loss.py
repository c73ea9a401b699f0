"""``scale_loss``: one backward pass, from a scaled loss to unscaled gradients.

``gradient_rules`` has the table of what a block does to gradients. apex did the same in
``apex/amp/handle.py: scale_loss``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence, Set, ValuesView
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._types import Optimizer, is_optimizer
from ampcompat.amp.casts.ambience import assert_ambience
from ampcompat.amp.hints import add_hint
from ampcompat.amp.observers import notify
from ampcompat.amp.scaling import gradient_rules
from ampcompat.amp.scaling.gradients import Block, open_block_of, pending_in
from ampcompat.amp.scaling.leaves import Leaves, leaves_of
from ampcompat.amp.scaling.scaler import LossScaler, check_scaler
from ampcompat.amp.scaling.session import DISABLED, Session


@_torch.eager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[torch.Tensor]:
    """Scale ``loss`` for the backward pass inside the block; afterwards gradients are unscaled and may be clipped.

    As in apex (``apex/amp/handle.py: scale_loss``), and for several losses, models and optimizers, accumulated or not.

    Args:
        loss: Floating tensor of any shape, on any device.
        optimizers: The optimizer, or list (dict values, set, iterator) of optimizers, whose parameters the block gives
            gradients to. An empty list: only other gradients are wanted (of an input); nothing is unscaled.
        loss_id: Which of the ``num_losses`` scalers to use.
        model: Ignored, as under apex.
        delay_unscale: Leave gradients scaled; a later block without it unscales what has accumulated. No need to use it
            for accumulation: gradients accumulate correctly without.
        delay_overflow_check: Leave the scale alone; an overflow still skips the step and is counted by the next block,
            unless the script calls the scaler's ``update_scale()``, and so decides about the step itself.

    Returns:
        A context that yields ``loss.float() * loss_scale``.

    Raises:
        RuntimeError: ``initialize`` was not called, or not with this optimizer; a block inside a block of an optimizer
            that holds one of its tensors.
        TypeError: ``loss`` is not a floating tensor, or an optimizer is not one.
        IndexError: ``loss_id`` is no index of ``num_losses`` scalers.

    No host sync, except for misuse checks in the first 16 blocks. At exit the *new* gradients are unscaled, by the
    scale of the block's entry, and added to what had accumulated; overflow is noted and the scale moves; the step after
    an overflow is skipped.

    When the block raises, unscaled gradients are as at its entry. Scaled ones of ``delay_unscale`` or of DDP's
    ``no_sync`` are lost with those of the failed backward pass, and a warning says so. Where the scale is always 1,
    and there are no masters, what the failed pass has added stays, as in plain torch.
    """
    used_optimizers, session = _optimizers_and_session(optimizers)
    if not session.enabled:
        return nullcontext(loss)
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        kind = f"a tensor of {loss.dtype}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(f"scale_loss got {kind} as the loss - it must be a floating tensor - pass the loss itself.")
    if not isinstance(loss_id, int) or not 0 <= loss_id < len(session.scalers):
        loss_id = _index_of_scaler(loss_id, len(session.scalers))
    scaler = session.scalers[loss_id]
    if type(scaler) is not LossScaler:  # a script has put it there
        check_scaler(scaler, loss_id)
    scaler.loss_id = loss_id  # it may have been put there by hand
    return ScaleLoss(loss, used_optimizers, scaler, delay_unscale, moves_scale=not delay_overflow_check)


def _index_of_scaler(loss_id: Any, count: int) -> int:
    """The index of the scaler in a list of ``count`` that ``loss_id`` means: apex indexed its list with it."""
    try:
        index = operator.index(loss_id)
    except TypeError:
        _refuse_loss_id(loss_id, count)
    if not -count <= index < count:
        _refuse_loss_id(loss_id, count)
    return index % count


def _refuse_loss_id(loss_id: object, count: int) -> NoReturn:
    made = f"scalers 0 to {count - 1}" if count else "no scalers"
    raise IndexError(
        f"scale_loss got loss_id={loss_id!r} - amp.initialize(num_losses={count}) made {made} - pass one of these, or a"
        " larger num_losses there."
    )


class ScaleLoss:
    """The context of one ``scale_loss`` block: idle, then open, then done.

    Attributes:
        loss: The script's loss, until it is scaled.
        optimizers: The optimizers whose parameters the block gives gradients to.
        scaler: The loss is multiplied by its scale.
        delay: Whether the end leaves gradients scaled (``delay_unscale``).
        moves_scale: Whether the end moves the scale; otherwise the next transition counts the overflow.
        entered: Whether it was entered.
        block: What it owns, once it was entered.
    """

    entered = False
    block: Block

    def __init__(
        self, loss: torch.Tensor, optimizers: list[Optimizer], scaler: LossScaler, delay: bool, moves_scale: bool
    ) -> None:
        self.loss = loss
        self.optimizers = optimizers
        self.scaler = scaler
        self.delay = delay
        self.moves_scale = moves_scale

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
        casts = state.casts
        if casts.device_types and torch.is_autocast_enabled(casts.device_types[0]) != (casts.ambient is not None):
            assert_ambience()
        for optimizer in self.optimizers:
            optimizer._amp_stash.look_up(optimizer)
        block = Block(leaves_of(self.optimizers), [self.scaler], optimizers=self.optimizers)
        needs_scale = self._needs_scale(block.leaves)
        block.is_plain = not needs_scale and not self._has_masters()
        if state.open_blocks:
            _refuse_inside_another(block)
        if state.pending:
            _refuse_part_of_unsynced(block)
        if state.observers:
            notify("on_scale_loss", self.loss, self.scaler, self.optimizers)
        self.block = block
        state.open_blocks.append(block)
        if block.is_plain:
            if state.watch is not None:
                state.watch.note_block(block)
            return self.loss.float()
        try:
            gradient_rules.begin(block, self.delay)
            return self._scale_loss(block) if needs_scale else self.loss.float()
        except BaseException:
            state.open_blocks.remove(block)
            gradient_rules.undo_begin(block)
            raise

    def _needs_scale(self, leaves: Leaves) -> bool:
        """Whether the loss is multiplied by a scale at all."""
        if not self.scaler.is_one or pending_in(leaves):
            return True
        return any(optimizer._amp_stash.overflows for optimizer in self.optimizers)

    def _has_masters(self) -> bool:
        for optimizer in self.optimizers:
            stash = optimizer._amp_stash
            if stash.leaves.masters or stash.session.policy.master_weights:
                return True
        return False

    def _scale_loss(self, block: Block) -> torch.Tensor:
        """Return the loss times the scale, which the exit divides by."""
        scaler = self.scaler
        scaled = scaler.scale_loss(self.loss)
        block.scale = scaler.scale
        if not scaler.is_one:
            for optimizer in self.optimizers:
                optimizer._amp_stash.session.has_scaled = True
        del self.loss  # so that it is freed when the script drops it
        if state.watch is not None:
            state.watch.look_at_loss(block, scaled)
        return scaled

    # -- exit ----------------------------------------------------------------------------------------------------------
    @_torch.eager
    def __exit__(self, kind: object, error: BaseException | None = None, trace: object = None) -> None:
        """Unscale the new gradients, or leave them scaled; or, after an exception, undo the block."""
        block = self.block
        if kind is not None:
            state.open_blocks.remove(block)
            if not block.is_plain:
                gradient_rules.put_back(block)
                if state.watch is not None:
                    state.watch.note_failed(block)
            if isinstance(error, Exception):
                if state.observers:
                    notify("on_failure", error)
                add_hint(error)
            return
        stays_scaled = not block.is_plain and self._end(block)
        if block.is_plain:
            state.open_blocks.remove(block)
        if state.observers and not stays_scaled:
            notify("on_gradients", self.scaler, self.optimizers)

    def _end(self, block: Block) -> bool:
        """Unscale the new gradients, or leave them scaled for a later block; return whether they stay scaled."""
        try:
            is_unsynced = False
            stays_scaled = self.delay
            if state.adapters:
                leaves = block.leaves.tensors()
                is_unsynced = any(adapter.defers_sync(leaves) for adapter in state.adapters)
                waits_for_script = any(adapter.leaves_sync_to_script(leaves) for adapter in state.adapters)
                stays_scaled = self.delay or is_unsynced or waits_for_script
            if stays_scaled:
                gradient_rules.leave_pending(block, is_unsynced)
            else:
                has_new_grads = gradient_rules.end(block, self.moves_scale)
        except BaseException:
            gradient_rules.clear_partly_unscaled(block)
            raise
        finally:
            state.open_blocks.remove(block)
        if state.watch is not None:
            if stays_scaled:
                state.watch.note_delayed(block)
            else:
                state.watch.look_after_block(block, has_new_grads)
        return stays_scaled


def _refuse_part_of_unsynced(block: Block) -> None:
    """Refuse a block that has some of the tensors of a ``no_sync`` pass, whose gradients it could not average."""
    ids = block.leaves.ids()
    for pending in pending_in(block.leaves):
        if pending.is_unsynced and not pending.leaves.ids() <= ids:
            raise RuntimeError(
                "scale_loss of some of the optimizers whose gradients no_sync() has left on this process - the rest"
                " would never be averaged - give the block all of them: amp.scale_loss(loss, [optimizer_a,"
                " optimizer_b])."
            )


def _refuse_inside_another(block: Block) -> None:
    """Refuse a block inside one that gives gradients to the same tensors, unless both are plain."""
    outer = open_block_of(block.leaves)
    if outer is None or (outer.is_plain and block.is_plain):
        return
    _refuse_inner_block(outer.optimizers, block.optimizers)


def _refuse_inner_block(outer: Sequence[Optimizer], inner: Sequence[Optimizer]) -> NoReturn:
    """Raise for a block of ``inner`` inside one of ``outer`` that gives gradients to the same tensors."""
    if any(optimizer in outer for optimizer in inner):
        raise RuntimeError(
            "scale_loss inside a scale_loss block of the same optimizer - gradients of the two could not be told apart"
            " - close the first block, or add the losses up."
        )
    raise RuntimeError(
        f"scale_loss inside the scale_loss block of another optimizer ({type(outer[0]).__name__}) that shares"
        " parameters with this one - the gradients of the two losses would be added up in the same tensors, and"
        " unscaled twice - close the first block before, or give both optimizers to one block:"
        " `with amp.scale_loss(loss_a + loss_b, [optimizer_a, optimizer_b])` (D38)."
    )


# -- whose block -------------------------------------------------------------------------------------------------------
def _optimizers_and_session(optimizers: Any) -> tuple[list[Any], Session]:
    """The optimizers of a block, each once, and the ``initialize`` call that it belongs to."""
    latest = state.session
    if latest is None:
        raise RuntimeError(
            "Invoked 'with amp.scale_loss', but amp has not been initialized - `model, optimizer ="
            " amp.initialize(model, optimizer, opt_level=...)` must come first."
        )
    stash = getattr(optimizers, "_amp_stash", None)
    if stash is not None:  # fast path: one optimizer under amp
        return [optimizers], stash.session
    # apex took any iterable
    is_list = isinstance(optimizers, (list, tuple, ValuesView, Set, Iterator)) and not is_optimizer(optimizers)
    given = [under_amp(each) for each in (optimizers if is_list else [optimizers])]
    unique = list({id(optimizer): optimizer for optimizer in given}.values())
    for optimizer in unique:
        if is_optimizer(optimizer) and "_amp_stash" in vars(optimizer):
            continue
        if not latest.enabled or (is_optimizer(optimizer) and optimizer in state.optimizers.disabled):
            return [], DISABLED
        _refuse_optimizer(optimizer, given if is_list else optimizers)
    return unique, unique[0]._amp_stash.session if unique else latest


def _refuse_optimizer(optimizer: Any, given: Any) -> NoReturn:
    """Raise for ``optimizer``, which is not under amp; ``given``: what ``scale_loss`` got."""
    if not is_optimizer(optimizer):
        raise TypeError(
            f"scale_loss got {type(given).__name__} as optimizers - it takes an optimizer or a list of them - pass what"
            " amp.initialize returned."
        )
    raise RuntimeError(
        f"scale_loss got a {type(optimizer).__name__} that was not given to amp.initialize - its parameters would not"
        " be unscaled - pass the optimizer to amp.initialize (in a list with the others)."
    )


def under_amp(optimizer: Any) -> Any:
    """The initialized optimizer in ``optimizer``, a LARC that was built around one; else ``optimizer`` itself."""
    inner = getattr(optimizer, "optim", None)
    if inner is None or hasattr(optimizer, "_amp_stash"):
        return optimizer
    is_initialized = hasattr(inner, "_amp_stash") or inner in state.optimizers.disabled
    return inner if is_initialized else optimizer
