"""``amp.state_dict`` and ``amp.load_state_dict``: the loss scalers of the sessions that are in use.

A session is in use while its optimizers are alive; the later one comes first. The two networks of a GAN may be
initialized by two calls, and so may a model and its average, which has no optimizer. Under apex, the scalers of the
latest call were those of all.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from typing import Any

from ampcompat._log import say, warn_once
from ampcompat.amp._amp_state import maybe_print
from ampcompat.amp.options import is_scale, number
from ampcompat.amp.scaling.optimizer_state import optimizer_index, sessions_in_use
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.session import session_state

_PREFIX = "loss_scaler"
Entry = tuple[float, int]


def state_dict(destination: Any = None) -> Any:
    """Return scale and clean passes of every loss scaler (``apex/amp/frontend.py: state_dict``).

    Args:
        destination: Dict to fill; None makes a new ``OrderedDict``.

    Returns:
        ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``: plain numbers, safe for
        ``torch.load(weights_only=True)``. The scalers are those of each session (one call of ``initialize``) whose
        optimizers are alive, the later one first; where no session has any, the latest one's. Empty when nothing was
        initialized, or with ``enabled=False``. Two host syncs per scaler.
    """
    if destination is not None and not isinstance(destination, MutableMapping):
        got = type(destination).__name__
        raise TypeError(f"amp.state_dict got {got} as destination - it must be a dict or None - leave it out.")
    if destination is None:
        destination = OrderedDict()
    for index, scaler in enumerate(_scalers()):
        destination[f"{_PREFIX}{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return destination


def _scalers() -> list[LossScaler]:
    """The scalers of the sessions that are shown."""
    if optimizer_index.may_hold_dropped and any(session is not session_state.latest for session in sessions_in_use()):
        gc.collect()
        optimizer_index.may_hold_dropped = False
    return [scaler for session in sessions_in_use() for scaler in session.scalers]


def load_state_dict(state_dict: Mapping[str, object]) -> None:
    """Restore what :func:`state_dict` saved, here or under apex (``apex/amp/frontend.py: load_state_dict``).

    The scalers are those that :func:`state_dict` would save, in its order. Before ``initialize`` it is kept for the
    next call that has optimizers, and for that one alone; under apex ``initialize`` had to come first. Where a script
    makes several calls, load after the last. A ``GradScaler.state_dict()`` goes into the first scaler; the inverse is
    ``GradScaler.load_state_dict(amp._amp_state.loss_scalers[0].state_dict())``. Prints what was restored.

    Args:
        state_dict: From ``amp.state_dict()``. With more scalers than there are, or fewer than those of the latest
            session, what fits is loaded, with a message. A scale goes into a static scaler too, as under apex; a
            message says so.

    Raises:
        TypeError: Not a mapping.
        RuntimeError: A key that is none of a loss scaler.
        ValueError: A scale or count that cannot be one. Nothing is loaded by a call that raises.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"amp.load_state_dict got {type(state_dict).__name__} - it takes the dict that amp.state_dict() returned -"
            " for a checkpoint, pass checkpoint['amp']."
        )
    if "scale" in state_dict and "_growth_tracker" in state_dict:  # torch.amp.GradScaler
        maybe_print("amp.load_state_dict: this is a torch.amp.GradScaler's state.", True)
        parts = {"loss_scale": state_dict["scale"], "unskipped": state_dict["_growth_tracker"]}
        entries = [_entry("GradScaler", parts)]
    else:
        names = [f"{_PREFIX}{index}" for index in range(len(state_dict))]
        _refuse_unknown_keys(state_dict, names)
        entries = [_entry(name, state_dict[name]) for name in names]
    session = session_state.latest
    scalers = _scalers()
    if session is not None and (scalers or session.enabled):
        if not optimizer_index.listed():
            session_state.loaded_scalers = entries
        _restore(entries, scalers)
    elif not entries:
        return
    elif session is not None:
        warn_once("load disabled", "amp.load_state_dict after amp.initialize(enabled=False): nothing to restore.")
    else:
        session_state.loaded_scalers = entries
        say("amp.load_state_dict before amp.initialize: the next amp.initialize restores the loss scalers.")


def _refuse_unknown_keys(state_dict: Mapping[str, object], names: list[str]) -> None:
    """Raise for keys that are none of ``names``: those of a whole checkpoint, for example."""
    unknown = sorted(str(key) for key in state_dict if key not in names)
    if not unknown:
        return
    keys = ", ".join(f'"{key}"' for key in unknown)
    raise RuntimeError(
        f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {keys} - the keys are loss_scaler0,"
        " loss_scaler1, ... - pass what amp.state_dict() returned, and not a whole checkpoint: checkpoint['amp']."
    )


def restore_after_initialize() -> None:
    """Restore the scalers of the latest session from what was loaded before it, if that has yet to reach one in use."""
    entries = session_state.loaded_scalers
    session = sessions_in_use()[0]
    if entries is None or session is not session_state.latest:
        return
    if optimizer_index.listed():
        session_state.loaded_scalers = None
    _restore(entries, session.scalers)


def _restore(entries: list[Entry], scalers: list[LossScaler]) -> None:
    """Restore ``scalers`` from ``entries``.

    The scalers of the latest session are those that a script misses if they are not restored. An earlier one may be
    another run: a notebook's cell that was run before, a model that is compared with the one that is resumed.
    """
    of_latest_session = len(sessions_in_use()[0].scalers)
    fitting = min(len(entries), len(scalers))
    if fitting < max(len(entries), of_latest_session):
        there_are = len(scalers) if len(entries) > fitting else of_latest_session
        say(
            f"Warning: amp.load_state_dict got {len(entries)} loss scalers where there are {there_are}: loading the"
            f" first {fitting}. Call it after the last amp.initialize."
        )
    for scaler, (scale, unskipped) in zip(scalers, entries, strict=False):
        remark = _of_another_kind(scaler, scale, unskipped)
        scaler._loss_scale = scale
        scaler._unskipped = unskipped
        scaler.pending = None
        what = f"loss scaler {scaler.loss_id}: loss_scale {scale}, unskipped {unskipped}"
        maybe_print(f"amp.load_state_dict: restored {what}.{remark}", True)


def _of_another_kind(scaler: LossScaler, scale: float, unskipped: int) -> str:
    """Say where what was saved is of another kind of scale than ``scaler``, static or dynamic; "" where nothing tells.

    apex saved no kind. A static scaler keeps its scale; a dynamic one moves it after a window of clean passes.
    """
    fix = "to its _loss_scale (amp._amp_state.loss_scalers) to start from that"
    if not scaler.dynamic:
        own = scaler.loss_scale()
        if scale == own:
            return ""
        return f" This scaler is static, at {own} before: the saved one may have been dynamic - write {own} {fix}."
    looks_static = scale == 1.0 or unskipped >= scaler._scale_seq_len
    if not looks_static:
        return ""
    return f" This scaler is dynamic, and the saved one looks static - write 2.0**16 {fix}."


def _entry(name: str, parts: object) -> Entry:
    """Scale and clean passes in ``parts``, which stand under ``name``; a ValueError where they cannot be these."""
    if not isinstance(parts, Mapping) or not {"loss_scale", "unskipped"} <= set(parts):
        raise ValueError(
            f"amp.load_state_dict: {name}={parts!r} - it must be a dict with 'loss_scale' and 'unskipped' - pass what"
            " amp.state_dict() returned."
        )
    scale = number(parts["loss_scale"])
    unskipped = number(parts["unskipped"])
    is_count = unskipped.is_integer() and 0 <= unskipped < 2**31
    if not is_scale(scale) or not is_count:
        raise ValueError(
            f"amp.load_state_dict: {name} has loss_scale={parts['loss_scale']!r}, unskipped={parts['unskipped']!r} - a"
            " positive finite number and a count are needed - the checkpoint is damaged; leave the amp part out to"
            " start from the defaults."
        )
    return scale, int(unskipped)
