"""``scale_loss``: one backward pass, from a scaled loss to unscaled gradients.

The gradients of one optimizer are in one of three states (``stash.gradients``, ``stash.pending``): NONE since the last
step or ``zero_grad``; UNSCALED after a block; PENDING where a block has left them scaled, in ``p.grad``. The first
table says what each event does to the gradient of a master, that is, of a half parameter at levels with masters:

===========================  =========================  ======================  ===============================
master's gradient            NONE                       UNSCALED                PENDING
===========================  =========================  ======================  ===============================
block begins                 what the script put there  kept                    p.grad is rescaled to its scale
block ends                   UNSCALED                   added: UNSCALED         p.grad is added: UNSCALED
block ends with an overflow  the same, and noted        the same, and noted     the same, and noted
block gives no gradient      NONE (EMPTY)               UNSCALED                UNSCALED
block raises                 NONE                       as before the block     p.grad is lost; a warning
end of the block raises      LOST                       LOST                    LOST
ends with ``delay_unscale``  PENDING                    kept, beside PENDING    PENDING
ends in DDP's ``no_sync``    PENDING                    kept, beside PENDING    PENDING
``step``                     moves nothing              used, or skipped: NONE  unscaled first
``zero_grad``                NONE                       NONE                    NONE
``p.grad`` cleared           NONE                       NONE                    what is left is unscaled
``p.grad`` edited            NONE                       kept; a warning         the edited one is unscaled
``load_state_dict``          NONE                       UNSCALED                PENDING
===========================  =========================  ======================  ===============================

State NONE is the same here after a step that was made and after one that was skipped: both drop the gradients of
masters. The half weight's ``p.grad`` stays as it is until it is cleared, and is not used again.

The gradient of a float32 parameter (batch norm, and all parameters at levels without masters) *is* ``p.grad``, and
stays as in plain torch. So state NONE has two columns here:

===========================  ====================  ==========================  ===================  ===============
float32 gradient             NONE, step made       NONE, step skipped          UNSCALED             PENDING
===========================  ====================  ==========================  ===================  ===============
block begins                 goes aside            goes aside                  goes aside           is rescaled
block ends                   added to what stayed  added: still not finite     added                unscaled
block ends with an overflow  the same, and noted   the same, and noted         the same, and noted  the same, noted
block gives no gradient      stays                 stays                       stays                unscaled
block raises                 as before the block   as before the block         as before the block  lost; a warning
end of the block raises      LOST                  LOST                        LOST                 LOST
ends with ``delay_unscale``  aside; PENDING        aside; PENDING              aside; PENDING       PENDING
ends in DDP's ``no_sync``    aside; PENDING        aside; PENDING              aside; PENDING       PENDING
``step``                     used again            skipped, until it is clean  used, or skipped     unscaled first
``zero_grad``                cleared               cleared                     cleared              cleared
``p.grad`` cleared           moves nothing         moves nothing               moves nothing        moves nothing
``p.grad`` edited            used as it is         used if it is finite        used as it is        unscaled
``load_state_dict``          stays                 stays                       stays                stays
===========================  ====================  ==========================  ===================  ===============

What FSDP2 holds back (``set_requires_gradient_sync(False)``) is PENDING like gradients of ``no_sync``, though it is not
in ``p.grad``; ``zero_grad`` drops it too.

Overflows are found in the new gradients alone, and the next ``step`` is skipped. A step is skipped as well while a
gradient is not finite that an earlier overflow has left: after a skipped step, or after a block of another optimizer in
a tensor that both hold. ``GradScaler`` skips then too; apex stepped. LOST gradients are cleared, and the next step is
skipped. What a block adds to gradients of optimizers that it was not given stays scaled; a step that uses it warns.
"Aside" is ``stash.aside``. Masters need none: new half gradients are unscaled into float32 and added to theirs
(``gradients`` says what ``p.grad`` of a half weight holds when). apex did the same in
``apex/amp/handle.py: scale_loss`` and ``apex/amp/_process_optimizer.py: post_backward_with_master_weights``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence, Set, ValuesView
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch

from ampcompat import _torch
from ampcompat._log import say
from ampcompat._state import state
from ampcompat._types import Optimizer, is_optimizer
from ampcompat.amp.adapters import fsdp
from ampcompat.amp.adapters.ddp import holds_back
from ampcompat.amp.casts.ambience import assert_ambience
from ampcompat.amp.half.masters import drop_cleared_gradients
from ampcompat.amp.hints import add_hint
from ampcompat.amp.observers import notify
from ampcompat.amp.scaling import misuse
from ampcompat.amp.scaling.gradients import put_aside, rescale_pending, show, unscale_new
from ampcompat.amp.scaling.scaler import LossScaler, check_scaler
from ampcompat.amp.scaling.session import DISABLED, Session
from ampcompat.amp.scaling.sharing import refuse_open_blocks, refuse_pending, sharers_outside, waited_for
from ampcompat.amp.scaling.stash import AmpOptimizerState, Gradients, Overflow, Pending, WaitingGradient


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
        RuntimeError: ``initialize`` was not called, or not with this optimizer; a block inside a block; scaled
            gradients pending in a tensor that two optimizers share.
        TypeError: ``loss`` is not a floating tensor, or an optimizer is not one.
        IndexError: ``loss_id`` is not below ``num_losses``.

    No host sync. At exit the *new* gradients are unscaled, by the scale of the block's entry, and added to what had
    accumulated; overflow is noted and the scale moves; the step after an overflow is skipped.

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
        _refuse_loss_id(loss_id, len(session.scalers))
    scaler = session.scalers[loss_id]
    if type(scaler) is not LossScaler:  # a script has put it there
        check_scaler(scaler, loss_id)
    scaler.loss_id = loss_id  # it may have been put there by hand
    return Block(loss, used_optimizers, scaler, delay_unscale, moves_scale=not delay_overflow_check)


def _refuse_loss_id(loss_id: object, count: int) -> NoReturn:
    made = f"scalers 0 to {count - 1}" if count else "no scalers"
    if isinstance(loss_id, int) and loss_id >= count:
        fix = f"num_losses={loss_id + 1} there"
    elif count:
        fix = f"a loss_id from 0 to {count - 1}"
    else:
        fix = "num_losses=1 there"
    raise IndexError(
        f"scale_loss got loss_id={loss_id!r} - amp.initialize(num_losses={count}) made {made} - pass {fix}."
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
        waiting: Of each other optimizer that has yet to step, one gradient; none where that is not watched.
    """

    entered = False
    is_plain = False
    scale: torch.Tensor | None = None
    backward_calls: list[bool] | None = None
    waiting: Sequence[tuple[AmpOptimizerState, WaitingGradient]] = ()

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
        """Put older gradients aside for the backward pass; return the scaled loss."""
        if self.entered:
            raise RuntimeError(
                "a scale_loss block was entered twice - it is for one backward pass - call amp.scale_loss(loss,"
                " optimizer) for each."
            )
        self.entered = True
        casts = state.casts
        if casts.device_types and torch.is_autocast_enabled(casts.device_types[0]) != (casts.ambient is not None):
            assert_ambience()
        needs_scale = self._look_at_optimizers()
        if state.observers:
            notify("on_scale_loss", self.loss, self.scaler, self.optimizers)
        if self.is_plain:
            return self.loss.float()
        others_may_share = len(state.optimizers.live) > 1
        if others_may_share:
            refuse_open_blocks(self.optimizers)
        if len(state.optimizers.pending) or (self.delay and len(self.optimizers) > 1):
            refuse_pending(self.optimizers, self.delay)
        if others_may_share:
            _drop_cleared_of_all()
        try:
            for optimizer in self.optimizers:
                stash = optimizer._amp_stash
                stash.block = weakref.ref(self)
                begin(optimizer, stash, self.scaler, self.delay)
            return self._scale_loss() if needs_scale else self.loss.float()
        except BaseException:
            self._undo()
            raise

    def _look_at_optimizers(self) -> bool:
        """Set ``is_plain``, and return whether the loss is multiplied by a scale at all.

        Refuse what cannot be told apart, a block inside a block; clean up after blocks that were dropped without exit.
        """
        is_one = self.scaler.is_one
        has_masters = False
        any_dropped = False
        for optimizer in self.optimizers:
            stash: AmpOptimizerState = optimizer._amp_stash
            if stash.block is not None:
                if stash.in_block:
                    raise RuntimeError(
                        "scale_loss inside a scale_loss block of the same optimizer - gradients of the two could not be"
                        " told apart - close the first block, or add the losses up."
                    )
                any_dropped = True
            if stash.pending is not None or stash.overflows:
                is_one = False
            if stash.session.policy.master_weights:
                has_masters = True
        self.is_plain = is_one and not has_masters
        if any_dropped:
            _undo_dropped_blocks()
        return not is_one

    def _scale_loss(self) -> torch.Tensor:
        """Return the loss times the scale, which the exit divides by; have a backward pass of another loss noticed."""
        scaler = self.scaler
        scaled = scaler.scale_loss(self.loss)
        self.scale = scaler.core.scale
        del self.loss  # free its memory with the script's own reference
        if scaler.watched_blocks < misuse.WATCHED and scaled.requires_grad:
            scaler.watched_blocks += 1
            calls: list[bool] = []
            self.backward_calls = calls
            self.waiting = _waiting_gradients(self.optimizers)
            scaled.register_hook(lambda _grad: calls.append(True))  # type: ignore[no-untyped-call]
        return scaled

    # -- exit ----------------------------------------------------------------------------------------------------------
    @_torch.eager
    def __exit__(self, kind: object, error: BaseException | None = None, trace: object = None) -> None:
        """Unscale the new gradients, or leave them scaled; or, after an exception, undo the block."""
        for stash, gradient in self.waiting:
            if gradient.was_added_to():
                stash.mixed_gradient = gradient
        if kind is not None:
            self._undo()
            if isinstance(error, Exception):
                if state.observers:
                    notify("on_failure", error)
                add_hint(error)
            return
        if self.is_plain:
            for optimizer in self.optimizers:
                optimizer._amp_stash.gradients = Gradients.UNSCALED
        else:
            try:
                if self._leaves_gradients_scaled():
                    self._leave_pending()
                    return
                reached = end(self.optimizers, self.scaler, self.scale, self.moves_scale)
            except BaseException:
                discard_gradients(self.optimizers, self.scaler)
                raise
            is_unused = self.backward_calls is not None and not self.backward_calls
            if reached and is_unused:
                misuse.warn_of("unscaled loss in a block")
        if state.observers:
            notify("on_gradients", self.scaler, self.optimizers)

    def _leaves_gradients_scaled(self) -> bool:
        """Whether a later block unscales: after ``delay_unscale``, or while DDP or FSDP2 keeps gradients on a rank."""
        if self.delay:
            return True
        if not state.models.ddp and not state.models.sharded:
            return False
        for optimizer in self.optimizers:
            stash: AmpOptimizerState = optimizer._amp_stash
            if holds_back(stash.leaves()) or fsdp.holds_back(stash.direct):
                return True
        return False

    def _leave_pending(self) -> None:
        """Leave the gradients as they are, scaled, to a later block or to the step."""
        refuse_pending(self.optimizers, delay=True)
        scale = self.scaler.scale_on() if self.scale is None else self.scale
        pending = Pending(scale, {self.scaler: None})
        for optimizer in self.optimizers:
            stash: AmpOptimizerState = optimizer._amp_stash
            if stash.pending is not None:
                pending.scalers.update(stash.pending.scalers)
            stash.pending = pending
            stash.block = None
            state.optimizers.pending.add(optimizer)

    def _undo(self) -> None:
        """Put gradients back to what they were at entry, as far as they can be: the block raised."""
        if self.is_plain:
            return
        self.scaler.forget_found_inf()
        begun = []
        for optimizer in self.optimizers:
            block = optimizer._amp_stash.block
            if block is not None and block() is self:
                begun.append(optimizer)
        restore_gradients(begun, self.scale)


def _drop_cleared_of_all() -> None:
    """See which gradients were cleared, of all optimizers: the backward pass may add to them."""
    for optimizer in state.optimizers.listed():
        if optimizer._amp_stash.gradients is Gradients.UNSCALED:
            drop_cleared_gradients(optimizer._amp_stash.masters)


def _waiting_gradients(optimizers: Sequence[Optimizer]) -> list[tuple[AmpOptimizerState, WaitingGradient]]:
    """One gradient of each optimizer outside ``optimizers`` that has yet to step, to see whether a block adds to it.

    Only of params without masters: a half gradient that is written after its block is noticed at the step. Optimizers
    that share tensors with ``optimizers`` are left out: the block unscales what it adds to those.
    """
    if len(state.optimizers.live) <= len(optimizers):
        return []
    left_out = set(map(id, [*optimizers, *sharers_outside(optimizers)]))
    waiting = []
    for other in state.optimizers.listed():
        stash: AmpOptimizerState = other._amp_stash
        if id(other) in left_out or stash.gradients is not Gradients.UNSCALED:
            continue
        if stash.in_block or stash.pending is not None:  # then what is added will be unscaled
            continue
        param = next((param for param in stash.direct if param.grad is not None), None)
        if param is not None:
            waiting.append((stash, WaitingGradient(param)))
    return waiting


def _undo_dropped_blocks() -> None:
    """Put gradients back that were aside in blocks which were dropped without their exit."""
    dropped = []
    for optimizer in state.optimizers.listed():
        stash = optimizer._amp_stash
        if stash.block is not None and not stash.in_block:
            dropped.append(optimizer)
    restore_gradients(dropped, None)


# -- the end of a backward pass ----------------------------------------------------------------------------------------
@_torch.without_grad
def end(optimizers: list[Optimizer], scaler: LossScaler, scale: torch.Tensor | None, moves_scale: bool = True) -> bool:
    """Unscale new gradients, add them to accumulated ones, and make the scaler's transition. No host sync.

    Args:
        optimizers: Those of the block.
        scaler: That of the block.
        scale: What the loss was multiplied by; None where nothing was scaled.
        moves_scale: Move the scale now; else the next transition counts the overflow.

    Returns:
        Whether there were new gradients.
    """
    pending_scalers: dict[LossScaler, None] = {}  # of earlier blocks whose losses have a part in these gradients
    for optimizer in optimizers:
        pending = optimizer._amp_stash.pending
        if pending is not None:
            pending_scalers.update(pending.scalers)
    reached = _unscale_all(optimizers, scaler, scale)
    overflows = _make_transitions(scaler, scale, pending_scalers, moves_scale)
    for optimizer in optimizers:
        stash: AmpOptimizerState = optimizer._amp_stash
        reset_pass(optimizer, stash)
        _note_gradients(stash, reached)
        if overflows:
            stash.note_overflows(overflows)
    if overflows and len(state.optimizers.live) > 1:
        for other in sharers_outside(optimizers):
            other._amp_stash.note_earlier_overflows(overflows)
    return reached


def _unscale_all(optimizers: list[Optimizer], scaler: LossScaler, scale: torch.Tensor | None) -> bool:
    """Unscale new gradients of each optimizer; whether there were any."""
    reached = False
    unscaled: set[int] = set()  # a tensor that two optimizers share is unscaled with the first
    for optimizer in optimizers:
        stash: AmpOptimizerState = optimizer._amp_stash
        masters = stash.masters
        direct = stash.direct
        if len(optimizers) > 1:
            masters = [master for master in masters if id(master) not in unscaled]
            direct = [param for param in direct if id(param) not in unscaled]
            unscaled.update(map(id, masters))
            unscaled.update(map(id, direct))
        post = replaced(optimizer, "_post_amp_backward", post_amp_backward)
        if post is None:
            reached |= unscale_new(stash, masters, direct, scaler, scale)
        else:
            reached |= _unscale_by(post, stash, scaler)
    return reached


def _make_transitions(
    scaler: LossScaler, scale: torch.Tensor | None, pending_scalers: dict[LossScaler, None], moves_scale: bool
) -> list[Overflow]:
    """Have every scaler of a backward pass count it; return the flags that steps must look at."""
    if scale is None:  # a static scale of one
        if moves_scale:
            scaler._unskipped += 1
        return []
    found_inf = scaler.take_found_inf()
    overflows: list[Overflow] = []
    flag = scaler.adjust(found_inf) if moves_scale else scaler.delay(found_inf)
    if flag is not None:
        overflows.append((scaler, flag))
    for other in pending_scalers:  # the loss of any of them may have overflowed: the pass counts for each
        flag = None if other is scaler else other.adjust(found_inf)
        if flag is not None:
            overflows.append((other, flag))
    return overflows


def _note_gradients(stash: AmpOptimizerState, reached: bool) -> None:
    """Note what a block has left: gradients, if it ``reached`` any parameter."""
    if stash.gradients is Gradients.LOST:
        return
    if reached:
        stash.gradients = Gradients.UNSCALED
    elif stash.gradients is Gradients.NONE:
        stash.gradients = Gradients.EMPTY


def discard_gradients(optimizers: list[Optimizer], scaler: LossScaler) -> None:
    """Clear what :func:`end` left half unscaled when it raised, and have the next step skipped."""
    scaler.forget_found_inf()
    for optimizer in optimizers:
        stash: AmpOptimizerState = optimizer._amp_stash
        for master in stash.masters:
            master.half.grad = None
            master.drop_gradient()
        for param in stash.direct:
            param.grad = None
        reset_pass(optimizer, stash)
        stash.gradients = Gradients.LOST
    for other in sharers_outside(optimizers):
        if other._amp_stash.gradients is Gradients.UNSCALED:
            other._amp_stash.gradients = Gradients.LOST
    say("The end of a scale_loss block raised: its gradients are cleared, and the next step is skipped.")


# -- what happens to one optimizer -------------------------------------------------------------------------------------
def begin(optimizer: Optimizer, stash: AmpOptimizerState, scaler: LossScaler, delay: bool = False) -> None:
    """Put older gradients aside for a backward pass; ``delay``: its end leaves its gradients scaled."""
    stash.look_up(optimizer)
    if stash.undecided_steps:
        stash.report_arrived()
    if stash.last_step.left_to_others:
        _drop_used_gradients(optimizer, stash)
    if stash.pending is not None:
        rescale_pending(stash, stash.pending, scaler)
        return
    prepare = None if delay else replaced(optimizer, "_prepare_amp_backward", prepare_amp_backward)
    if prepare is None:
        put_aside(stash)
    else:
        prepare()
    if stash.earlier_overflows and not stash.gradients_for_step():
        stash.earlier_overflows = []


def _drop_used_gradients(optimizer: Optimizer, stash: AmpOptimizerState) -> None:
    """Begin anew in masters whose gradients the last step has used, though another optimizer waits for them."""
    waited = waited_for(optimizer)
    for master in stash.used_gradients():
        master.drop_gradient()
        if master in waited:
            misuse.warn_of("shared gradients dropped")
    stash.last_step.left_to_others = {}


def reset_pass(optimizer: Optimizer, stash: AmpOptimizerState) -> None:
    """Note that no gradient of ``optimizer`` is scaled or aside any more, and that no block of it is open."""
    stash.aside = []
    stash.block = None
    if stash.pending is not None:
        stash.pending = None
        state.optimizers.pending.discard(optimizer)


def restore_gradients(optimizers: Sequence[Optimizer], scale: torch.Tensor | None) -> None:
    """Put back what was aside when a block began; new gradients, and those pending, are cleared."""
    for optimizer in optimizers:
        drop_cleared_gradients(optimizer._amp_stash.masters)
        for param in optimizer._amp_stash.leaves():
            param.grad = None
    # Only now: what is aside for the first optimizer may be in a tensor that the second holds too.
    for optimizer in optimizers:
        stash: AmpOptimizerState = optimizer._amp_stash
        show(stash.masters, scale)
        for param, old in stash.aside:
            param.grad = old
        if stash.pending is not None:
            if state.models.sharded:
                fsdp.drop_waiting_gradients(stash.direct)
            misuse.warn_of("pending gradients lost")
        reset_pass(optimizer, stash)


def unscale_pending(optimizer: Optimizer) -> None:
    """End the backward pass that ``delay_unscale`` has left, before its gradients are stepped with."""
    pending: Pending = optimizer._amp_stash.pending  # type: ignore[assignment] # the caller has looked
    scaler = next(iter(pending.scalers))
    together = [other for other in state.optimizers.pending if other._amp_stash.pending is pending]
    try:
        end(together, scaler, pending.scale)
    except BaseException:
        discard_gradients(together, scaler)
        raise


# -- apex's methods of an optimizer, which scripts replace -------------------------------------------------------------
def prepare_amp_backward(optimizer: Optimizer) -> None:
    """Put unscaled gradients aside (``apex/amp/_process_optimizer.py: prepare_backward_with_master_weights``)."""
    stash: AmpOptimizerState = optimizer._amp_stash
    stash.look_up(optimizer)
    put_aside(stash)


@_torch.without_grad
def post_amp_backward(optimizer: Optimizer, scaler: LossScaler) -> None:
    """Unscale new gradients (``apex/amp/_process_optimizer.py: post_backward_with_master_weights``).

    The scale does not move, and no step is skipped: the caller sees to that, by the scaler's ``update_scale()``; or the
    block does whose end calls the method that a script has put in the place of this one.
    """
    stash: AmpOptimizerState = optimizer._amp_stash
    block = None if stash.block is None else stash.block()
    if block is not None:
        scale = block.scale
    elif stash.pending is not None:
        scale = stash.pending.scale
    else:
        scale = scaler.scale_on()
    reached = unscale_new(stash, stash.masters, stash.direct, scaler, scale)
    reset_pass(optimizer, stash)
    if stash.gradients is not Gradients.LOST and reached:
        stash.gradients = Gradients.UNSCALED


def replaced(optimizer: Optimizer, name: str, own: Callable[..., None]) -> Callable[..., None] | None:
    """What a script has put in the place of ``optimizer``'s method ``name``; None where that is our ``own``."""
    method: Callable[..., None] | None = vars(optimizer).get(name)
    return None if getattr(method, "__func__", None) is own else method


def _unscale_by(post: Callable[..., None], stash: AmpOptimizerState, scaler: LossScaler) -> bool:
    """Unscale by ``post``, a script's ``_post_amp_backward``; whether there were any gradients."""
    reached = any(leaf.grad is not None for leaf in stash.leaves())
    stash.aside_taken = False
    post(scaler)
    if not stash.aside_taken:
        stash.add_aside()
    for master in stash.masters:
        grad = master.half.grad
        if grad is not None and master.value.grad is not None:
            master.added_grad = (grad, grad._version)
    return reached


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
