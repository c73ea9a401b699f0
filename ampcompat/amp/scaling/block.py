"""``scale_loss``: one backward pass, from a scaled loss to unscaled gradients.

``gradient_sets`` has the table of what a block does to gradients, ``passes`` does it. apex did the same in
``apex/amp/handle.py: scale_loss``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence, Set, ValuesView
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._types import Optimizer, is_optimizer
from ampcompat.amp.casts.ambience import assert_ambience
from ampcompat.amp.hints import add_hint
from ampcompat.amp.observers import notify
from ampcompat.amp.scaling import misuse, passes
from ampcompat.amp.scaling.gradient_sets import GradientSet, GradientState, all_sets, note_scaled, regroup, sets_of
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

    No host sync, but to name a misuse in the first blocks. At exit the *new* gradients are unscaled, by the scale of
    the block's entry, and added to what had accumulated; overflow is noted and the scale moves; the step after an
    overflow is skipped.

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
    return Block(loss, used_optimizers, scaler, delay_unscale, moves_scale=not delay_overflow_check)


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


class Block:
    """One ``scale_loss`` block: idle, then open, then done.

    Attributes:
        loss: The script's loss, until it is scaled.
        optimizers: Those whose parameters the block gives gradients to.
        scaler: Whose scale the loss is multiplied by.
        delay: Whether its end leaves gradients scaled (``delay_unscale``).
        moves_scale: Whether its end moves the scale; else the next transition counts the overflow.
        entered: Whether it was entered.
        is_plain: Whether it leaves gradients to torch: the scale is always one, and there are no masters.
        scale: What the loss was multiplied by; None: nothing was scaled.
        backward_calls: One True for each backward pass of the scaled loss; None where that is not watched.
        bystanders: Of other sets whose gradients wait for a step, one gradient each; none where that is not watched.
    """

    entered = False
    is_plain = False
    scale: torch.Tensor | None = None
    backward_calls: list[bool] | None = None
    bystanders: Sequence[Bystander] = ()

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
        self._update_sets()
        sets = sets_of(self.optimizers)
        needs_scale = self._needs_scale(sets)
        self.is_plain = not needs_scale and not self._has_masters()
        self._refuse_inside_another(sets)
        if state.observers:
            notify("on_scale_loss", self.loss, self.scaler, self.optimizers)
        if self.is_plain:
            for gradient_set in sets:
                gradient_set.begin_block(self)
            return self.loss.float()
        try:
            passes.begin(self.optimizers, self, self.scaler, self.delay)
            return self._scale_loss() if needs_scale else self.loss.float()
        except BaseException:
            self._undo()
            raise

    def _update_sets(self) -> None:
        """Bring gradient sets up to date: groups may have changed, or an optimizer may be gone."""
        for optimizer in self.optimizers:
            optimizer._amp_stash.look_up(optimizer)
        if len(state.optimizers.live) != state.optimizers.grouped:
            regroup()

    def _refuse_inside_another(self, sets: Sequence[GradientSet]) -> None:
        """Refuse a block inside one that gives gradients to the same tensors, unless both are plain."""
        for gradient_set in sets:
            outer = gradient_set.block
            if outer is not None and not (outer.is_plain and self.is_plain):
                _refuse_inner_block(outer.optimizers, self.optimizers)

    def _needs_scale(self, sets: Sequence[GradientSet]) -> bool:
        """Whether the loss is multiplied by a scale at all."""
        if not self.scaler.is_one:
            return True
        return any(each.pending is not None or each.overflows for each in sets)

    def _has_masters(self) -> bool:
        for optimizer in self.optimizers:
            stash = optimizer._amp_stash
            if stash.masters or stash.session.policy.master_weights:
                return True
        return False

    def _scale_loss(self) -> torch.Tensor:
        """Return the loss times the scale, which the exit divides by; have a backward pass of another loss noticed."""
        scaler = self.scaler
        scaled = scaler.scale_loss(self.loss)
        self.scale = scaler.scale
        if scaler.dynamic or scaler.initial_scale != 1.0:
            note_scaled()
        del self.loss  # free its memory with the script's own reference
        if scaler.watched_blocks < misuse.WATCHED and scaled.requires_grad:
            scaler.watched_blocks += 1
            calls: list[bool] = []
            self.backward_calls = calls
            self.bystanders = _bystanders(sets_of(self.optimizers))
            scaled.register_hook(lambda _grad: calls.append(True))  # type: ignore[no-untyped-call]
        return scaled

    # -- exit ----------------------------------------------------------------------------------------------------------
    @_torch.eager
    def __exit__(self, kind: object, error: BaseException | None = None, trace: object = None) -> None:
        """Unscale the new gradients, or leave them scaled; or, after an exception, undo the block."""
        for bystander in self.bystanders:
            bystander.look()
        if kind is not None:
            self._undo()
            if isinstance(error, Exception):
                if state.observers:
                    notify("on_failure", error)
                add_hint(error)
            return
        sets = self._sets()
        if self.is_plain:
            for gradient_set in sets:
                gradient_set.end_block()
                gradient_set.note_new(has_new_grads=True)
            stays_scaled = False
        else:
            stays_scaled = self._end(sets)
        if state.observers and not stays_scaled:
            notify("on_gradients", self.scaler, self.optimizers)

    def _sets(self) -> list[GradientSet]:
        """The sets that the block was opened for; some of their tensors may have gone to other optimizers since."""
        return [each for each in all_sets() if each.block is self]

    def _end(self, sets: Sequence[GradientSet]) -> bool:
        """Unscale the new gradients, or leave them scaled for a later block; return whether they stay scaled."""
        try:
            is_unsynced = any(adapter.defers_sync(each.leaves()) for adapter in state.adapters for each in sets)
            stays_scaled = self.delay or is_unsynced
            if stays_scaled and not any(each.state is GradientState.LOST for each in sets):
                passes.leave_pending(sets, self.scaler, self.scale, is_unsynced)
                return True
            has_new_grads = passes.end(sets, self.optimizers, self.scaler, self.scale, self.moves_scale)
        except BaseException:
            passes.lose(sets, self.scaler)
            raise
        finally:
            passes.note_users(self.optimizers)
        is_unused = self.backward_calls is not None and not self.backward_calls
        if has_new_grads and is_unused:
            misuse.warn_of("unscaled loss in a block")
        return False

    def _undo(self) -> None:
        """Put gradients back to what they were at entry, as far as they can be: the block raised."""
        sets = self._sets()
        if self.is_plain:
            for gradient_set in sets:
                gradient_set.end_block()
            return
        self.scaler.forget_found_inf()
        passes.undo(sets, self.scale)


class Bystander(NamedTuple):
    """A gradient that waits for the step of another optimizer while a block is open, and its version before.

    Only of tensors without masters: a half gradient that is written after its block is noticed at the step.
    """

    gradient_set: GradientSet
    param: torch.Tensor
    grad: torch.Tensor
    version: int

    def look(self) -> None:
        """Note in its set where the block has added to it."""
        is_there = self.param.grad is self.grad
        if is_there and self.grad._version != self.version:
            self.gradient_set.has_foreign_gradients = True


def _bystanders(sets: Sequence[GradientSet]) -> list[Bystander]:
    """One gradient of each set outside ``sets`` that has yet to be stepped with."""
    if len(state.optimizers.live) < 2:
        return []
    bystanders = []
    for other in all_sets():
        if other.state is not GradientState.UNSCALED or other.block is not None or other in sets:
            continue
        for param in other.direct:
            if param.grad is not None:
                bystanders.append(Bystander(other, param, param.grad, param.grad._version))
                break
    return bystanders


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
