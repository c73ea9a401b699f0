"""``scale_loss``: one backward pass, from a scaled loss to unscaled gradients.

The gradients of one optimizer are in one of three states (``stash.gradients``, ``stash.pending``): NONE since the last
step or ``zero_grad``; UNSCALED after a block; PENDING where a block has left them scaled, in ``p.grad``. The first
table says what each event does to the gradient of a master, that is, of a half parameter at levels with masters:

===========================  ============================  ============================  ===============================
master's gradient            NONE                          UNSCALED                      PENDING
===========================  ============================  ============================  ===============================
block begins                 what the script put there     kept                          p.grad is rescaled to its scale
block ends                   UNSCALED                      added: UNSCALED               p.grad is added: UNSCALED
block ends with an overflow  the same, and noted           the same, and noted           the same, and noted
block gives no gradient      NONE (EMPTY)                  UNSCALED                      UNSCALED
block raises                 NONE                          as before the block           p.grad is lost; a warning
end of the block raises      LOST                          LOST                          LOST
ends with ``delay_unscale``  PENDING                       kept, beside PENDING          PENDING
ends in DDP's ``no_sync``    PENDING                       kept, beside PENDING          PENDING
``step``                     moves nothing                 used, or skipped: NONE        unscaled first
``zero_grad``                NONE                          NONE                          NONE
``p.grad`` cleared           NONE                          NONE                          what is left is unscaled
``p.grad`` edited            NONE                          kept; a warning               the edited one is unscaled
``load_state_dict``          NONE                          UNSCALED                      PENDING
===========================  ============================  ============================  ===============================

A step, made or skipped, drops the gradients of masters; ``p.grad`` in the model stays as it is until somebody clears
it. The gradient of a float32 parameter (batch norm, and all parameters at levels without masters) *is* ``p.grad``, and
stays as in plain torch. So state NONE has two columns here:

===========================  =======================  ==========================  =====================  ===============
float32 gradient             NONE, step made          NONE, step skipped          UNSCALED               PENDING
===========================  =======================  ==========================  =====================  ===============
block begins                 goes aside               goes aside                  goes aside             is rescaled
block ends                   added to what stayed     added: still not finite     added                  unscaled
block ends with an overflow  the same, and noted      the same, and noted         the same, and noted    the same, noted
block gives no gradient      stays                    stays                       stays                  unscaled
block raises                 as before the block      as before the block         as before the block    lost; a warning
end of the block raises      LOST                     LOST                        LOST                   LOST
ends with ``delay_unscale``  aside; PENDING           aside; PENDING              aside; PENDING         PENDING
ends in DDP's ``no_sync``    aside; PENDING           aside; PENDING              aside; PENDING         PENDING
``step``                     used again               skipped, until it is clean  used, or skipped       unscaled first
``zero_grad``                cleared                  cleared                     cleared                cleared
``p.grad`` cleared           moves nothing            moves nothing               moves nothing          moves nothing
``p.grad`` edited            used as it is            used if it is finite        used as it is          unscaled
``load_state_dict``          stays                    stays                       stays                  stays
===========================  =======================  ==========================  =====================  ===============

What FSDP2 holds back (``set_requires_gradient_sync(False)``) is PENDING like gradients of ``no_sync``, though it is not
in ``p.grad``; ``zero_grad`` drops it too.

Overflows are found in the new gradients alone, and the next ``step`` is skipped. A step is skipped as well while a
gradient is not finite that an earlier overflow has left: after a skipped step, or after a block of another optimizer in
a tensor that both hold. ``GradScaler`` skips then too; apex stepped. LOST gradients are cleared, and the next step is
skipped. "Aside" is ``stash.aside``; masters need none, for new half gradients are unscaled into float32 and added to
theirs. apex did the same in ``apex/amp/handle.py: scale_loss`` and
``apex/amp/_process_optimizer.py: post_backward_with_master_weights``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence, Set, ValuesView
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any, NoReturn

import torch

from ampcompat import _torch
from ampcompat._log import say
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp import misuse, sharded
from ampcompat.amp.autocast import assert_ambience
from ampcompat.amp.ddp import holds_back
from ampcompat.amp.masters import Master, drop_cleared_gradients
from ampcompat.amp.observers import notify
from ampcompat.amp.properties import is_optimizer
from ampcompat.amp.scaler import LossScaler, check_scaler
from ampcompat.amp.session import DISABLED, Session
from ampcompat.amp.sharing import refuse_open_blocks, refuse_pending, sharers_outside, waited_for
from ampcompat.amp.stash import AmpOptimizerState, Gradients, Overflow, Pending

#: Elements that are converted to float32 at once, then added to older gradients and freed: on a device as many as fused
#: kernels take in one launch; on the CPU, which has no launches, what stays in its cache.
CHUNK, CPU_CHUNK = 2**24, 2**17

Halves = dict[Master, torch.Tensor]  # half gradients, by the master that they belong to
_GRAD, _IS_SPARSE = attrgetter("grad"), attrgetter("is_sparse")


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
    ``no_sync`` are lost with those of the failed backward pass, and a warning says so. Where the scale is 1 for ever,
    and there are no masters, what the failed pass has added stays, as in plain torch.
    """
    found, owner = _find(optimizers)
    if not owner.enabled:
        return nullcontext(loss)
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        kind = f"a tensor of {loss.dtype}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(f"scale_loss got {kind} as the loss - it must be a floating tensor - pass the loss itself.")
    if not isinstance(loss_id, int) or not 0 <= loss_id < len(owner.scalers):
        _refuse_loss_id(loss_id, len(owner.scalers))
    scaler = owner.scalers[loss_id]
    if type(scaler) is not LossScaler:  # a script has put it there
        check_scaler(scaler, loss_id)
    scaler.loss_id = loss_id  # it may have been put there by hand
    return Block(loss, found, scaler, delay_unscale, not delay_overflow_check)


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
    """One ``scale_loss`` block: idle, then open, then done."""

    entered = False
    scale: torch.Tensor | None = None  # what the loss was multiplied by; None: by one, for ever
    used: list[bool] | None = None  # empty until the scaled loss is backpropagated; None: not watched

    def __init__(
        self, loss: torch.Tensor, optimizers: list[Optimizer], scaler: LossScaler, delay: bool, check: bool
    ) -> None:
        self.loss = loss
        self.optimizers = optimizers
        self.scaler = scaler
        self.delay = delay
        self.check = check

    @_torch.eager
    def __enter__(self) -> torch.Tensor:
        if self.entered:
            raise RuntimeError(
                "a scale_loss block was entered twice - it is for one backward pass - call amp.scale_loss(loss,"
                " optimizer) for each."
            )
        self.entered = True
        loss, scaler, casts = self.loss, self.scaler, state.casts
        if casts.ambient is not None and casts.device_types and not torch.is_autocast_enabled(casts.device_types[0]):
            assert_ambience()
        unit = self.plain = scaler.is_one
        dropped = False
        for optimizer in self.optimizers:
            stash: AmpOptimizerState = optimizer._amp_stash
            if stash.block is not None:
                if stash.in_block:
                    raise RuntimeError(
                        "scale_loss inside a scale_loss block of the same optimizer - gradients of the two could not be"
                        " told apart - close the first block, or add the losses up."
                    )
                dropped = True  # without its exit
            if stash.pending is not None or stash.overflows:
                unit = self.plain = False
            elif stash.session.policy.master_weights:
                self.plain = False
        several = len(state.optimizers.live) > 1
        if several and not self.plain:
            refuse_open_blocks(self.optimizers)
        if dropped:
            _abandon_dropped()
        if state.observers:
            notify("on_scale_loss", loss, scaler, self.optimizers)
        if self.plain:  # scale one for ever, and no masters: nothing to unscale
            return loss.float()
        if len(state.optimizers.pending) or (self.delay and len(self.optimizers) > 1):
            refuse_pending(self.optimizers, self.delay)
        if several:
            _drop_cleared_of_all()
        try:
            for optimizer in self.optimizers:
                stash = optimizer._amp_stash
                stash.block = weakref.ref(self)
                begin(optimizer, stash, scaler, self.delay)
            if unit:
                return loss.float()
            scaled = scaler.scale_loss(loss)
            self.scale = scaler._scale
            del self.loss  # free its memory with the script's own reference
            if scaler.watched < misuse.WATCHED and scaled.requires_grad:
                scaler.watched += 1
                used = self.used = list[bool]()
                scaled.register_hook(lambda _grad: used.append(True))  # type: ignore[no-untyped-call]
        except BaseException:
            self._give_up()
            raise
        return scaled

    @_torch.eager
    def __exit__(self, kind: object, error: BaseException | None = None, trace: object = None) -> None:
        if kind is not None:
            self._give_up()
            if isinstance(error, Exception):
                if state.observers:
                    notify("on_failure", error)
                _torch.note_cure(error)
            return
        if self.plain:
            for optimizer in self.optimizers:
                optimizer._amp_stash.gradients = Gradients.UNSCALED
        else:
            try:
                models = state.models
                if self.delay or ((models.ddp or models.sharded) and self._is_held_back()):
                    self._leave_pending()
                    return
                reached = end(self.optimizers, self.scaler, self.scale, self.check)
            except BaseException:
                lose(self.optimizers, self.scaler)
                raise
            if reached and self.used is not None and not self.used:
                misuse.warn_of("unscaled loss in a block")
        if state.observers:
            notify("on_gradients", self.scaler, self.optimizers)

    def _is_held_back(self) -> bool:
        """Whether DDP or FSDP2 keeps some of these gradients on their rank, for a later backward pass to reduce."""
        for optimizer in self.optimizers:
            stash: AmpOptimizerState = optimizer._amp_stash
            if holds_back(stash.leaves()) or sharded.holds_back(stash.direct):
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

    def _give_up(self) -> None:
        """Undo the block: it raised."""
        if self.plain:
            return
        self.scaler._found_inf = {}
        begun = [one for one in self.optimizers if (ref := one._amp_stash.block) is not None and ref() is self]
        abandon(begun, self.scale)


def _drop_cleared_of_all() -> None:
    """See which gradients were cleared, of all optimizers: the backward pass may add to them."""
    for optimizer in state.optimizers.listed():
        if optimizer._amp_stash.gradients is Gradients.UNSCALED:
            drop_cleared_gradients(optimizer._amp_stash.masters)


# -- the end of a backward pass ----------------------------------------------------------------------------------------
@_torch.without_grad
def end(optimizers: list[Optimizer], scaler: LossScaler, scale: torch.Tensor | None, check: bool = True) -> bool:
    """Unscale new gradients, add them to accumulated ones, and make the scaler's transition. No host sync.

    With no ``scale`` nothing was scaled. With ``check=False`` the next transition counts the overflow. Returns whether
    there were new gradients.
    """
    delayed: dict[LossScaler, None] = {}  # scalers whose losses have a part in these gradients
    unscaled: set[int] = set()  # a tensor that two optimizers share is unscaled with the first
    reached = False
    for optimizer in optimizers:
        stash: AmpOptimizerState = optimizer._amp_stash
        if stash.pending is not None:
            delayed.update(stash.pending.scalers)
        masters, direct = stash.masters, stash.direct
        if len(optimizers) > 1:
            masters = [master for master in masters if id(master) not in unscaled]
            direct = [param for param in direct if id(param) not in unscaled]
            unscaled.update(map(id, (*masters, *direct)))
        post = replaced(optimizer, "_post_amp_backward", post_amp_backward)
        if post is None:
            reached |= _unscale_new(stash, masters, direct, scaler, scale)
        else:
            reached |= _unscale_by(post, stash, scaler)
    overflows = _make_transitions(scaler, scale, delayed, check)
    for optimizer in optimizers:
        stash = optimizer._amp_stash
        settle(optimizer, stash)
        if stash.gradients is not Gradients.LOST and (reached or stash.gradients is Gradients.NONE):
            stash.gradients = Gradients.UNSCALED if reached else Gradients.EMPTY
        if overflows:
            stash.note_overflows(overflows)
    if overflows and len(state.optimizers.live) > 1:
        for other in sharers_outside(optimizers):
            other._amp_stash.note_earlier_overflows(overflows)
    return reached


def _make_transitions(
    scaler: LossScaler, scale: torch.Tensor | None, delayed: dict[LossScaler, None], check: bool
) -> list[Overflow]:
    """Have every scaler of a backward pass count it; return the flags that steps must look at."""
    flags: list[Overflow] = []
    if scale is None:
        scaler._unskipped += bool(check)
    else:
        flag = scaler.adjust(put_off=not check)
        if flag is not None:
            flags.append((scaler, flag))
    for other in delayed:  # the loss of any of them may have overflowed: the pass counts for each
        if other is not scaler:
            flag = other.adjust(scaler._last_found)
            if flag is not None:
                flags.append((other, flag))
    return flags


def lose(optimizers: list[Optimizer], scaler: LossScaler) -> None:
    """Clear what :func:`end` left half unscaled, and have the next step skipped."""
    scaler._found_inf = {}
    for optimizer in optimizers:
        stash: AmpOptimizerState = optimizer._amp_stash
        for master in stash.masters:
            master.half.grad = None
            master.drop_gradient()
        for param in stash.direct:
            param.grad = None
        settle(optimizer, stash)
        stash.gradients = Gradients.LOST
    for other in sharers_outside(optimizers):
        if other._amp_stash.gradients is Gradients.UNSCALED:
            other._amp_stash.gradients = Gradients.LOST
    say("The end of a scale_loss block raised: its gradients are cleared, and the next step is skipped.")


# -- what happens to one optimizer -------------------------------------------------------------------------------------
def begin(optimizer: Optimizer, stash: AmpOptimizerState, scaler: LossScaler, delay: bool = False) -> None:
    """Take older gradients out of the way of a backward pass; ``delay``: whose end leaves its gradients scaled."""
    stash.look_up(optimizer)
    if stash.reports:
        stash.report(wait=False)
    if stash.left:
        _drop_used_gradients(optimizer, stash)
    if stash.pending is not None:
        _rescale_pending(stash, scaler)
        return
    prepare = None if delay else replaced(optimizer, "_prepare_amp_backward", prepare_amp_backward)
    if prepare is None:
        _put_aside(stash)
    else:
        prepare()
    if stash.earlier_overflows and not stash.gradients_in_use():
        stash.earlier_overflows = []


def _put_aside(stash: AmpOptimizerState) -> None:
    """Take unscaled gradients out of ``param.grad``; those of half params are in their masters already."""
    if stash.masters:
        if drop_cleared_gradients(stash.masters):
            misuse.warn_of("half gradients edited")
        for master in stash.masters:
            master.folded = master.half.grad = None
    for param in stash.direct:
        if (grad := param.grad) is not None:
            # DDP's gradient_as_bucket_view overwrites the bucket in the next backward: such a view needs a copy.
            stash.aside.append((param, grad.clone() if _torch.is_window(grad) else grad))
            param.grad = None


def _drop_used_gradients(optimizer: Optimizer, stash: AmpOptimizerState) -> None:
    """Begin anew in masters whose gradients the last step has used up, though another optimizer waits for them."""
    waited = waited_for(optimizer)
    for master in stash.used_up():
        master.drop_gradient()
        if master in waited:
            misuse.warn_of("shared gradients dropped")
    stash.left = {}


def _rescale_pending(stash: AmpOptimizerState, scaler: LossScaler) -> None:
    """Bring pending gradients to the scale of a block that adds to them: exact where the ratio is a power of two."""
    pending: Pending = stash.pending  # type: ignore[assignment] # the caller has looked
    unmoved = pending.scale is scaler._scale or (scaler.is_one and pending.scalers.keys() == {scaler})
    held = sharded.waiting_gradients(stash.direct) if state.models.sharded and not unmoved else []
    with torch.no_grad():
        for param in () if unmoved else stash.leaves():
            if param.grad is not None:
                held.append(param.grad._values() if param.grad.is_sparse else _torch.local_part(param.grad))
        for grad in held:
            grad.mul_(scaler.scale_on(grad.device) / pending.scale.to(grad.device, non_blocking=True))
    stash.pending = replace(pending, scale=scaler.scale_on(pending.scale.device))


def settle(optimizer: Optimizer, stash: AmpOptimizerState) -> None:
    """Note that nothing of ``optimizer`` is scaled or aside any more."""
    stash.aside, stash.block = [], None
    if stash.pending is not None:
        stash.pending = None
        state.optimizers.pending.discard(optimizer)


def abandon(optimizers: Sequence[Optimizer], scale: torch.Tensor | None) -> None:
    """Put back what was aside when a block began; new gradients, and those pending, are cleared."""
    for optimizer in optimizers:
        for param in optimizer._amp_stash.leaves():
            param.grad = None
    # Only now: what is aside for the first optimizer may be in a tensor that the second holds too.
    for optimizer in optimizers:
        stash: AmpOptimizerState = optimizer._amp_stash
        _show(stash.masters, scale)
        for param, old in stash.aside:
            param.grad = old
        if stash.pending is not None:
            if state.models.sharded:
                sharded.drop_waiting_gradients(stash.direct)
            misuse.warn_of("pending gradients lost")
        settle(optimizer, stash)


def _abandon_dropped() -> None:
    """Abandon all blocks that were dropped without their exit."""
    stashes = [(optimizer, optimizer._amp_stash) for optimizer in state.optimizers.listed()]
    abandon([optimizer for optimizer, stash in stashes if stash.block is not None and not stash.in_block], None)


def unscale_pending(optimizer: Optimizer) -> None:
    """End the backward pass that ``delay_unscale`` has left, before its gradients are stepped with."""
    pending: Pending = optimizer._amp_stash.pending  # type: ignore[assignment] # the caller has looked
    scaler = next(iter(pending.scalers))
    together = [one for one in state.optimizers.pending if one._amp_stash.pending is pending]
    try:
        end(together, scaler, pending.scale)
    except BaseException:
        lose(together, scaler)
        raise


# -- apex's methods of an optimizer, which scripts replace -------------------------------------------------------------
def prepare_amp_backward(optimizer: Optimizer) -> None:
    """Put unscaled gradients aside (``apex/amp/_process_optimizer.py: prepare_backward_with_master_weights``)."""
    stash: AmpOptimizerState = optimizer._amp_stash
    stash.look_up(optimizer)
    _put_aside(stash)


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
    reached = _unscale_new(stash, stash.masters, stash.direct, scaler, scale)
    settle(optimizer, stash)
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
        _add_aside(stash)
    for master in stash.masters:
        grad = master.half.grad
        if grad is not None and master.value.grad is not None:
            master.folded = grad, grad._version
    return reached


# -- gradients ---------------------------------------------------------------------------------------------------------
def _unscale_new(
    stash: AmpOptimizerState,
    masters: list[Master],
    direct: list[torch.Tensor],
    scaler: LossScaler,
    scale: torch.Tensor | None,
) -> bool:
    """Unscale new gradients of ``masters`` and ``direct``, and add them to older ones; whether there were any."""
    halves = {master: grad for master in masters if (grad := master.half.grad) is not None}
    reached = unscale(halves, direct, scaler, scale)
    if state.models.sharded and scale is not None:
        sharded.share_overflow(scaler, direct)
    if len(halves) < len(masters):
        _show(masters, scale)
    if stash.aside:
        _add_aside(stash)
    return reached


def _add_aside(stash: AmpOptimizerState) -> None:
    """Add the gradients that were put aside to those that came since."""
    for param, old in stash.aside:
        param.grad = old if param.grad is None else _torch.sum_of(param.grad, old)
    stash.aside = []


def unscale(halves: Halves, direct: list[torch.Tensor], scaler: LossScaler, scale: torch.Tensor | None) -> bool:
    """Unscale gradients of ``direct`` in place and half gradients into their masters; whether there were any.

    Only where there is a ``scale``. Needs grad mode off.
    """
    fresh = [grad for grad in map(_GRAD, direct) if grad is not None]
    if any(map(_IS_SPARSE, fresh)):
        for param in direct:
            if param.grad is not None and param.grad.is_sparse:
                param.grad = _torch.coalesced(param.grad)
        fresh = [g._values() if g.is_sparse else g for param in direct if (g := param.grad) is not None]
    if state.models.sharded:
        fresh = list(map(_torch.local_part, fresh))
    if not halves:
        if fresh and scale is not None:
            scaler.unscale_grads(fresh, scale)
        return bool(fresh)
    chunks: dict[int, Halves] = {}
    first, grad = next(iter(halves.items()))
    if first.value.grad is None or (scale is None and grad.is_cpu):  # no temporaries: all at once
        chunks[0] = halves
    else:
        size = 0
        for master, grad in halves.items():
            size += grad.numel()
            chunks.setdefault(size // (CPU_CHUNK if grad.is_cpu else CHUNK), {})[master] = grad
    for chunk in chunks.values():
        _fold(chunk, fresh, scaler, scale)
        fresh = []
    return True


def _fold(halves: Halves, fresh: list[torch.Tensor], scaler: LossScaler, scale: torch.Tensor | None) -> None:
    """Add ``halves``, unscaled and widened (on the CPU by adding), to their masters' gradients; unscale ``fresh``."""
    before, wide = [master.value.grad for master in halves], list(halves.values())
    if any(map(_IS_SPARSE, wide)):
        # Sum duplicate entries in float32: their half sum may overflow.
        wide = [
            _torch.widened(grad) if grad.is_sparse else _torch.float32_copies([grad], [master.value])[0]
            for master, grad in halves.items()
        ]
        fresh += [grad._values() if grad.is_sparse else grad for grad in wide]
    elif scale is not None or not (wide[0].is_cpu and all(old is not None and not old.is_sparse for old in before)):
        # With the strides of the masters, which the model's weights need not have any more.
        wide = _torch.float32_copies(wide, [master.value for master in halves])
        fresh += wide
    if scale is not None:
        scaler.unscale_grads(fresh, scale)
    sums: list[tuple[torch.Tensor, torch.Tensor]] = []
    for (master, half), old, grad in zip(halves.items(), before, wide, strict=True):
        if old is None:
            master.value.grad = grad
        elif old.is_sparse or grad.is_sparse:
            master.value.grad = _torch.sum_of(old, grad)
        else:
            sums.append((old, grad))
        master.folded = half, half._version
    if sums:
        _torch.foreach_add_(*map(list, zip(*sums, strict=True)))


def _show(masters: Sequence[Master], scale: torch.Tensor | None) -> None:
    """Show in the model, where there is no gradient, what its master has accumulated; a script may clear it there."""
    for master in masters:
        grad = master.value.grad
        if grad is not None and master.half.grad is None:
            scaled = grad if scale is None else grad * scale.to(grad.device)
            shown = master.half.grad = scaled.to(master.dtype)
            master.folded = shown, shown._version


# -- whose block -------------------------------------------------------------------------------------------------------
def _find(optimizers: Any) -> tuple[list[Any], Session]:
    """The optimizers of a block, each once, and the ``initialize`` call that it belongs to."""
    stash, latest = getattr(optimizers, "_amp_stash", None), state.session
    if stash is not None and latest is not None:  # fast path: one optimizer under amp
        return [optimizers], stash.session
    if latest is None:
        raise RuntimeError(
            "Invoked 'with amp.scale_loss', but amp has not been initialized - `model, optimizer ="
            " amp.initialize(model, optimizer, opt_level=...)` must come first."
        )
    several = isinstance(optimizers, (list, tuple, ValuesView, Set, Iterator)) and not is_optimizer(optimizers)
    given = list(map(known, optimizers)) if several else [known(optimizers)]  # apex took any iterable
    unique = {id(one): one for one in given}
    for one in unique.values():
        if is_optimizer(one) and "_amp_stash" in vars(one):
            continue
        if not latest.enabled or (is_optimizer(one) and one in state.optimizers.disabled):
            return [], DISABLED
        if not is_optimizer(one):
            got = type(given if several else optimizers).__name__
            raise TypeError(
                f"scale_loss got {got} as optimizers - it takes an optimizer or a list of them - pass what"
                " amp.initialize returned."
            )
        raise RuntimeError(
            f"scale_loss got a {type(one).__name__} that was not given to amp.initialize - its parameters would not be"
            " unscaled - pass the optimizer to amp.initialize (in a list with the others)."
        )
    return list(unique.values()), next((one._amp_stash.session for one in unique.values()), latest)


def known(optimizer: Any) -> Any:
    """``optimizer``; but for a LARC that was built around an initialized optimizer, that one."""
    inner = getattr(optimizer, "optim", None)
    if inner is None or hasattr(optimizer, "_amp_stash"):
        return optimizer
    return inner if hasattr(inner, "_amp_stash") or inner in state.optimizers.disabled else optimizer
