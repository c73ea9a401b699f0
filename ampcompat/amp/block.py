"""``scale_loss``: one backward pass from a scaled loss to unscaled gradients."""

from __future__ import annotations

from collections.abc import Iterator, Set, ValuesView
from contextlib import contextmanager
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp import misuse, overflow, session
from ampcompat.amp.arguments import is_optimizer
from ampcompat.amp.backward_pass import BackwardPass
from ampcompat.amp.casts import assert_ambience
from ampcompat.amp.ddp import holds_back_gradients
from ampcompat.amp.observers import notify
from ampcompat.amp.scale_move import LeftToScript, ScaleMove
from ampcompat.amp.scaler import LossScaler


@contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """Scale ``loss`` for the backward pass inside the block; afterwards gradients are unscaled and may be clipped.

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

    Yields:
        ``loss.float() * loss_scale``.

    Raises:
        RuntimeError: ``initialize`` was not called, or not with this optimizer; a block inside a block.
        TypeError: ``loss`` is not a floating tensor, or an optimizer is not one.
        IndexError: ``loss_id`` is not below ``num_losses``.

    No host sync. At exit the *new* gradients are unscaled, by the scale of the block's entry, and added to what had
    accumulated; overflow is noted and the scale moves; the step after an overflow is skipped.

    When the block raises, what had accumulated is as it was at its entry: the gradients of ``amp.master_params``, and
    scaled ones of ``delay_unscale``. Half gradients that an earlier block has folded into the masters' are cleared, as
    at any entry. Gradients of DDP's ``no_sync`` are lost with a backward pass that fails after them: a warning says so.
    """
    found, owner = _found(optimizers)
    if not owner.enabled:
        yield loss
        return
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        kind = f"a tensor of {loss.dtype}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(f"scale_loss got {kind} as the loss - it must be a floating tensor - pass the loss itself.")
    scaler = _scaler(owner, loss_id)
    assert_ambience()
    if owner.plain:
        notify("on_scale_loss", loss, scaler, found)
        yield loss.float()
        notify("on_gradients", scaler, found)
        return
    for one in found:
        if one._amp_stash.in_block:
            raise RuntimeError(
                "scale_loss inside a scale_loss block of the same optimizer - gradients of the two could not be told"
                " apart - close the first block, or add the losses up."
            )
    notify("on_scale_loss", loss, scaler, found)
    backward_pass = BackwardPass(found, scaler)
    try:
        try:
            backward_pass.begin()
            scaled = scaler.scale_loss(loss)
            backward_pass.scale = scaler._scale
            used = misuse.watch_loss(scaler, scaled)
            yield scaled
            # Under DDP's no_sync gradients are local: a later block unscales them, once they are averaged.
            local = [one for one in backward_pass.optimizers if holds_back_gradients(one)]
            if delay_unscale or local:
                backward_pass.end_scaled(local)
                return
            reached = backward_pass.end(LeftToScript if delay_overflow_check else ScaleMove)
        except BaseException:
            backward_pass.fail()
            raise
    except BaseException:
        backward_pass.fail()  # again does no harm: Ctrl-C may have struck in the first
        raise
    if reached and not used:
        misuse.warn_of_unused_loss()
    notify("on_gradients", scaler, found)


def _found(optimizers: Any) -> tuple[list[Any], session.Session]:
    """The optimizers of a block, each once, and the ``initialize`` call that it belongs to."""
    stash = getattr(optimizers, "_amp_stash", None)
    if stash is not None and session.latest() is not None:  # the rule: one optimizer, and ours
        return [optimizers], stash.session
    found = [optimizers] if is_optimizer(optimizers) else optimizers
    if isinstance(found, (ValuesView, Set, Iterator)):  # apex took any iterable
        found = list(found)
    if isinstance(found, (list, tuple)):
        found = [_known(one) for one in found]
    owner = _owner(found)
    return list({id(one): one for one in found}.values()) if owner.enabled else [], owner


def _known(optimizer: Any) -> Any:
    """``optimizer``; but for a LARC that was built around an initialized optimizer, that one."""
    inner = getattr(optimizer, "optim", None)
    if inner is None or hasattr(optimizer, "_amp_stash"):
        return optimizer
    return inner if hasattr(inner, "_amp_stash") or inner in _torch.disabled_optimizers(state) else optimizer


def _owner(optimizers: Any) -> session.Session:
    """The ``initialize`` call that a block on ``optimizers`` belongs to."""
    latest = session.latest()
    if latest is None:
        raise RuntimeError(
            "Invoked 'with amp.scale_loss', but amp has not been initialized - `model, optimizer ="
            " amp.initialize(model, optimizer, opt_level=...)` must come first."
        )
    if not isinstance(optimizers, (list, tuple)) or not all(is_optimizer(one) for one in optimizers):
        if not latest.enabled:
            return latest
        raise TypeError(
            f"scale_loss got {type(optimizers).__name__} as optimizers - it takes an optimizer or a list of them -"
            " pass what amp.initialize returned."
        )
    owners = []
    for one in optimizers:
        stash = getattr(one, "_amp_stash", None)
        if stash is not None:
            owners.append(stash.session)
        elif one in _torch.disabled_optimizers(state) or not latest.enabled:
            return latest if not latest.enabled else session.DISABLED
        else:
            raise RuntimeError(
                f"scale_loss got a {type(one).__name__} that was not given to amp.initialize - its parameters would not"
                " be unscaled - pass the optimizer to amp.initialize (in a list with the others)."
            )
    return owners[0] if owners else latest


def _scaler(owner: session.Session, loss_id: int) -> LossScaler:
    if not isinstance(loss_id, int) or not 0 <= loss_id < len(owner.scalers):
        last = len(owner.scalers) - 1
        larger = isinstance(loss_id, int) and loss_id > last
        raise IndexError(
            f"scale_loss got loss_id={loss_id!r} - amp.initialize(num_losses={last + 1}) made scalers 0 to {last} -"
            + (f" pass num_losses={loss_id + 1} there." if larger else f" pass a loss_id from 0 to {last}.")
        )
    scaler = owner.scalers[loss_id]
    if not isinstance(scaler, LossScaler):
        raise TypeError(
            f"amp._amp_state.loss_scalers[{loss_id}] is {type(scaler).__name__} - a scaler has the scale of each loss -"
            " put a amp.scaler.LossScaler there."
        )
    scaler.loss_id = loss_id  # it may have been put there by hand
    return scaler


def step_was_skipped(optimizer: Any) -> bool:
    """Whether the last ``optimizer.step()`` was skipped for an overflow.

    Reads the device if only that knows: one host sync, with an optimizer that takes ``found_inf``.
    """
    stash = getattr(_known(optimizer), "_amp_stash", None)
    if stash is None:
        return False
    overflow.report(stash)
    return bool(stash.skipped)
