"""``scale_loss``: one backward pass, from a scaled loss to unscaled gradients.

The gradients of one optimizer are in one of three states (``stash.gradients``, ``stash.pending``). Each event:

===========================  ============================  ============================  ===============================
event                        NONE                          UNSCALED                      PENDING (scaled, in p.grad)
===========================  ============================  ============================  ===============================
block begins                 what is there goes aside      accumulated ones go aside     rescaled in place to its scale
block ends                   UNSCALED                      added: UNSCALED               all unscaled, added: UNSCALED
block ends with an overflow  the same, and noted           the same, and noted           the same, and noted
block gives no gradient      NONE (EMPTY)                  UNSCALED                      UNSCALED
block raises                 as before the block           as before the block           lost; a warning
end of the block raises      LOST                          LOST                          LOST
ends with ``delay_unscale``  PENDING                       PENDING, the others aside     PENDING
ends in DDP's ``no_sync``    PENDING                       PENDING, the others aside     PENDING
``step``                     moves no masters              steps or skips: NONE          unscaled first: UNSCALED
``zero_grad``                NONE                          NONE                          NONE
``p.grad`` cleared           NONE                          the master's is cleared too   what is left is unscaled
``load_state_dict``          NONE                          UNSCALED                      PENDING
===========================  ============================  ============================  ===============================

Overflows are found in the new gradients alone, and the next ``step`` is skipped. LOST gradients are cleared, and the
next step is skipped as well. "Aside" is ``stash.aside`` for params that the optimizer holds itself, and the master's
gradient for half params: new half gradients are unscaled into float32 and added there. apex did the same in
``apex/amp/handle.py: scale_loss`` and ``apex/amp/_process_optimizer.py: post_backward_with_master_weights``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence, Set, ValuesView
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any, NoReturn

import torch

from ampcompat import _torch
from ampcompat._log import say
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp import misuse
from ampcompat.amp.autocast import assert_ambience
from ampcompat.amp.ddp import holds_back
from ampcompat.amp.masters import Master, heed_cleared
from ampcompat.amp.observers import notify
from ampcompat.amp.properties import is_optimizer
from ampcompat.amp.scaler import MANY, LossScaler, any_of, check_scaler
from ampcompat.amp.session import DISABLED, Session
from ampcompat.amp.stash import AmpOptimizerState, Gradients, Pending

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
        self.loss, self.optimizers, self.scaler, self.delay, self.check = loss, optimizers, scaler, delay, check

    @_torch.eager
    def __enter__(self) -> torch.Tensor:
        if self.entered:
            raise RuntimeError(
                "a scale_loss block was entered twice - it is for one backward pass - call amp.scale_loss(loss,"
                " optimizer) for each."
            )
        self.entered = True
        loss, scaler, room = self.loss, self.scaler, state.casts
        if room.ambient is not None and room.device_types and not torch.is_autocast_enabled(room.device_types[0]):
            assert_ambience()
        unit = self.plain = scaler.is_one
        for one in self.optimizers:
            stash: AmpOptimizerState = one._amp_stash
            if stash.block is not None:
                if stash.in_block:
                    raise RuntimeError(
                        "scale_loss inside a scale_loss block of the same optimizer - gradients of the two could not be"
                        " told apart - close the first block, or add the losses up."
                    )
                abandon(one, stash, None)  # dropped without its exit
            if stash.pending is not None or stash.overflows:
                unit = self.plain = False
            elif stash.session.policy.master_weights:
                self.plain = False
        if state.observers:
            notify("on_scale_loss", loss, scaler, self.optimizers)
        if self.plain:  # scale one for ever, and no masters: nothing to unscale
            return loss.float()
        if len(state.optimizers.pending) or (self.delay and len(self.optimizers) > 1):
            refuse_shared(self.optimizers, among_themselves=self.delay)
        if len(state.optimizers.live) > 1:  # its backward pass may add to what was cleared
            for one in state.optimizers.listed():
                if one._amp_stash.gradients is Gradients.UNSCALED:
                    heed_cleared(one._amp_stash.masters)
        try:
            for one in self.optimizers:
                stash = one._amp_stash
                stash.block = weakref.ref(self)
                begin(one, stash, scaler)
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
            for one in self.optimizers:
                one._amp_stash.gradients = Gradients.UNSCALED
        else:
            try:
                if self.delay or (state.models.ddp and any(holds_back(s._amp_stash.leaves()) for s in self.optimizers)):
                    refuse_shared(self.optimizers, among_themselves=True)
                    scale = self.scaler.scale_on() if self.scale is None else self.scale
                    pending = Pending(scale, {self.scaler: None})
                    for one in self.optimizers:
                        stash: AmpOptimizerState = one._amp_stash
                        pending.scalers.update(stash.pending.scalers if stash.pending is not None else {})
                        stash.pending, stash.block = pending, None
                        state.optimizers.pending.add(one)
                    return
                reached = end(self.optimizers, self.scaler, self.scale, self.check)
            except BaseException:
                lose(self.optimizers, self.scaler)
                raise
            if reached and self.used is not None and not self.used:
                misuse.warn_of("unscaled loss in a block")
        if state.observers:
            notify("on_gradients", self.scaler, self.optimizers)

    def _give_up(self) -> None:
        """Undo the block: it raised."""
        if self.plain:
            return
        self.scaler._found_inf = {}
        for one in self.optimizers:
            stash: AmpOptimizerState = one._amp_stash
            if stash.block is not None and stash.block() is self:
                abandon(one, stash, self.scale)


# -- the end of a backward pass ----------------------------------------------------------------------------------------
@_torch.without_grad
def end(optimizers: list[Optimizer], scaler: LossScaler, scale: torch.Tensor | None, check: bool | None = True) -> bool:
    """Unscale new gradients, add them to accumulated ones, and make the scaler's transition. No host sync.

    With no ``scale`` nothing was scaled. With ``check=False`` the next transition counts the overflow; with None the
    caller updates the scaler itself and decides about the step. Returns whether there were new gradients.
    """
    seen: set[int] = set()
    others: dict[LossScaler, None] = {}
    reached = False
    for one in optimizers:
        stash: AmpOptimizerState = one._amp_stash
        masters, direct = stash.masters, stash.direct
        if len(optimizers) > 1:  # gradients that two optimizers share are unscaled with the first
            masters = [m for m in masters if id(m) not in seen]
            direct = [p for p in direct if id(p) not in seen]
            seen.update(map(id, (*masters, *direct)))
        halves = {master: grad for master in masters if (grad := master.half.grad) is not None}
        reached |= unscale(halves, direct, scaler, scale)
        if len(halves) < len(masters):
            _show(masters, scale)
        others.update(stash.pending.scalers if stash.pending else {})
        for param, old in stash.aside:
            param.grad = old if param.grad is None else _torch.sum_of(param.grad, old)
    noted: list[tuple[LossScaler, torch.Tensor]] = []
    if scale is None:
        scaler._unskipped += bool(check)
    elif check is not None and (found := scaler.adjust(put_off=not check)) is not None:
        noted.append((scaler, found))
    for other in others:  # the loss of any of them may have overflowed: the pass counts for each
        if other is not scaler and (found := other.adjust(scaler._last_found)) is not None:
            noted.append((other, found))
    for one in optimizers:
        stash = one._amp_stash
        settle(one, stash)
        if stash.gradients is not Gradients.LOST and (reached or stash.gradients is Gradients.NONE):
            stash.gradients = Gradients.UNSCALED if reached else Gradients.EMPTY
        stash.overflows = [*stash.overflows, *noted]
        if len(stash.overflows) > MANY:  # a script may never step
            held = stash.overflows
            stash.overflows = [(one, any_of([flag for owner, flag in held if owner is one])) for one in dict(held)]
    return reached


def lose(optimizers: list[Optimizer], scaler: LossScaler) -> None:
    """Clear what :func:`end` left half unscaled, and have the next step skipped."""
    scaler._found_inf = {}
    for one in optimizers:
        stash: AmpOptimizerState = one._amp_stash
        for master in stash.masters:
            master.folded = master.half.grad = master.value.grad = None
        for param in stash.direct:
            param.grad = None
        settle(one, stash)
        stash.gradients = Gradients.LOST
    say("The end of a scale_loss block raised: its gradients are cleared, and the next step is skipped.")


# -- what happens to one optimizer -------------------------------------------------------------------------------------
def begin(optimizer: Optimizer, stash: AmpOptimizerState, scaler: LossScaler) -> None:
    """Make room for new gradients (``apex/amp/_process_optimizer.py: prepare_backward_with_master_weights``)."""
    stash.look_up(optimizer)
    if stash.reports:
        stash.report(wait=False)
    pending = stash.pending
    if pending is not None:  # rescale in place, which is exact while half gradients keep their range
        as_they_are = pending.scale is scaler._scale or (scaler.is_one and pending.scalers.keys() == {scaler})
        with torch.no_grad():
            for param in () if as_they_are else stash.leaves():
                if param.grad is not None:
                    held = param.grad._values() if param.grad.is_sparse else param.grad
                    held.mul_(scaler.scale_on(held.device) / pending.scale.to(held.device, non_blocking=True))
        stash.pending = replace(pending, scale=scaler.scale_on(pending.scale.device))
        return
    if stash.masters:
        heed_cleared(stash.masters, afresh=True)
    for param in stash.direct:
        if (grad := param.grad) is not None:
            # DDP's gradient_as_bucket_view overwrites the bucket in the next backward: such a view needs a copy.
            stash.aside.append((param, grad.clone() if _torch.is_window(grad) else grad))
            param.grad = None


def settle(optimizer: Optimizer, stash: AmpOptimizerState) -> None:
    """Note that nothing of ``optimizer`` is scaled or aside any more."""
    stash.aside, stash.block = [], None
    if stash.pending is not None:
        stash.pending = None
        state.optimizers.pending.discard(optimizer)


def abandon(optimizer: Optimizer, stash: AmpOptimizerState, scale: torch.Tensor | None) -> None:
    """Put back what was aside when a block began; new gradients, and those pending, are cleared."""
    for param in stash.leaves():
        param.grad = None
    _show(stash.masters, scale)
    for param, old in stash.aside:
        param.grad = old
    if stash.pending is not None:
        misuse.warn_of("pending gradients lost")
    settle(optimizer, stash)


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


def refuse_shared(optimizers: Sequence[Optimizer], among_themselves: bool = False) -> None:
    """Refuse scaled gradients pending (or about to be: ``among_themselves``) in a tensor that two optimizers hold."""
    mine = set(map(id, optimizers))
    held: dict[int, Any] = {}
    for one in (*[one for one in state.optimizers.pending if id(one) not in mine], *optimizers):
        for leaf in one._amp_stash.leaves():
            other = held.setdefault(id(leaf), one)
            if other is not one and (among_themselves or id(other) not in mine):
                raise RuntimeError(
                    f"scaled gradients are pending (delay_unscale, or DDP's no_sync) in a parameter that"
                    f" {type(other).__name__} and {type(one).__name__} share - one of them would step with gradients"
                    " still multiplied by the loss scale - leave out delay_unscale (gradients accumulate without it),"
                    " or give each optimizer its own parameters (D30)."
                )


# -- gradients ---------------------------------------------------------------------------------------------------------
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
