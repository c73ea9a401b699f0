"""``scale_loss``: checks what it is given, and finds the scaler and the session of its block.

``block`` has the block itself. apex did the same in ``apex/amp/handle.py: scale_loss``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Set, ValuesView
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch

from ampcompat import _torch
from ampcompat._types import is_optimizer
from ampcompat.amp.scaling.block import Block
from ampcompat.amp.scaling.optimizer_state import optimizer_index, optimizer_under_amp, sessions_in_use
from ampcompat.amp.scaling.scaler import check_scaler
from ampcompat.amp.scaling.session import DISABLED, Session, session_state


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
        delay_unscale: Leave the scale alone: the next block moves it. Gradients are unscaled all the same (D55), and an
            overflow skips the step. The next block begins with these gradients in ``p.grad``, multiplied by its scale,
            so that an all-reduce by hand in it averages the whole sum. No need to use it for accumulation without that.
        delay_overflow_check: Leave the scale alone, as ``delay_unscale`` does. A script that then calls the scaler's
            ``update_scale()`` decides about the step.

    Returns:
        A context that yields ``loss.float() * loss_scale``.

    Raises:
        RuntimeError: ``initialize`` was not called, or not with this optimizer; a block inside a block of an optimizer
            that holds one of its tensors.
        TypeError: ``loss`` is not a floating tensor, or an optimizer is not one.
        IndexError: ``loss_id`` is no index of ``num_losses`` scalers.

    No host sync, except for misuse checks in the first blocks (16 for each loss), and where the loss is on the CPU and
    the model is not: the scale is where its first loss was. At the end of the block its gradients are divided by the
    scale, older ones are added, and the scale moves; the next step after an overflow is skipped. When the block raises,
    what the failed pass has added stays, as in plain torch, and the scale moves with the next block.
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
    check_scaler(scaler, loss_id)  # a script may have put it there
    scaler.loss_id = loss_id  # it may have been put there by hand
    delays_scale = bool(delay_unscale or delay_overflow_check)
    return Block(scaler, used_optimizers, loss, delays_scale, joins_next=bool(delay_unscale))


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


# -- whose block -------------------------------------------------------------------------------------------------------
def _optimizers_and_session(optimizers: Any) -> tuple[list[Any], Session]:
    """The optimizers of a block, each once, and the session that it belongs to."""
    latest = session_state.latest
    if latest is None:
        raise RuntimeError(
            "Invoked 'with amp.scale_loss', but amp has not been initialized - `model, optimizer ="
            " amp.initialize(model, optimizer, opt_level=...)` must come first."
        )
    stash = getattr(optimizers, "_amp_stash", None)
    if stash is not None:  # fast path: one optimizer under amp
        return [optimizer_under_amp(optimizers)], stash.session
    # apex took any iterable
    is_list = isinstance(optimizers, (list, tuple, ValuesView, Set, Iterator)) and not is_optimizer(optimizers)
    given = [optimizer_under_amp(each) for each in (optimizers if is_list else [optimizers])]
    unique = list({id(optimizer): optimizer for optimizer in given}.values())
    for optimizer in unique:
        if is_optimizer(optimizer) and "_amp_stash" in vars(optimizer):
            continue
        if not latest.enabled or (is_optimizer(optimizer) and optimizer in optimizer_index.disabled):
            return [], DISABLED
        _refuse_optimizer(optimizer, given if is_list else optimizers)
    if unique:
        return unique, _session_of_all(unique)
    return [], sessions_in_use()[0] if latest.enabled else latest


def _session_of_all(optimizers: list[Any]) -> Session:
    """The session of the first of ``optimizers``; refuse those whose sessions have another loss scale."""
    session: Session = optimizers[0]._amp_stash.session
    for optimizer in optimizers:
        other = optimizer._amp_stash.session
        if other is session:
            continue
        given, other_given = session.properties.loss_scale, other.properties.loss_scale
        if given != other_given:
            raise RuntimeError(
                f"scale_loss got optimizers of two amp.initialize calls, with loss_scale={given} and"
                f" loss_scale={other_given} - a block has one loss scale - initialize them in one call, or with one"
                " loss_scale."
            )
    return session


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
