"""``amp.state_dict`` and ``amp.load_state_dict``: the loss scalers of the latest ``initialize`` call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from typing import Any

from ampcompat._log import say, warn_once
from ampcompat._state import state
from ampcompat.amp._amp_state import maybe_print
from ampcompat.amp.options import is_scale, number
from ampcompat.amp.scaling.scaler import LossScaler

_PREFIX = "loss_scaler"
Entry = tuple[float, int]


def state_dict(destination: Any = None) -> Any:
    """Return scale and clean passes of every loss scaler (``apex/amp/frontend.py: state_dict``).

    Args:
        destination: Dict to fill; None makes a new ``OrderedDict``.

    Returns:
        ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}``: plain numbers, safe for
        ``torch.load(weights_only=True)``. Empty when nothing was initialized, or with ``enabled=False``. One host sync
        per scaler.
    """
    if destination is not None and not isinstance(destination, MutableMapping):
        got = type(destination).__name__
        raise TypeError(f"amp.state_dict got {got} as destination - it must be a dict or None - leave it out.")
    if destination is None:
        destination = OrderedDict()
    scalers = [] if state.session is None else state.session.scalers
    for index, scaler in enumerate(scalers):
        destination[f"{_PREFIX}{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return destination


def load_state_dict(state_dict: Mapping[str, object]) -> None:
    """Restore what :func:`state_dict` saved, here or under apex (``apex/amp/frontend.py: load_state_dict``).

    Before ``initialize`` it is kept for the next call; under apex ``initialize`` had to come first. A
    ``GradScaler.state_dict()`` goes into the first scaler; the inverse is
    ``GradScaler.load_state_dict(amp._amp_state.loss_scalers[0].state_dict())``. Prints what was restored.

    Args:
        state_dict: From ``amp.state_dict()``. With another number of scalers, what fits is loaded, with a message.

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
    session = state.session
    if session is not None and session.enabled:
        apply(entries, session.scalers)
    elif session is not None and entries:
        warn_once("load disabled", "amp.load_state_dict after amp.initialize(enabled=False): nothing to restore.")
    elif entries:
        state.loaded_scalers = entries
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


def apply(entries: list[Entry], scalers: list[LossScaler]) -> None:
    """Restore ``scalers`` from what was loaded."""
    if len(entries) != len(scalers):
        say(
            f"Warning: amp.load_state_dict got {len(entries)} loss scalers where amp.initialize(num_losses="
            f"{len(scalers)}) made {len(scalers)}: loading the first {min(len(entries), len(scalers))}."
        )
    for scaler, (scale, unskipped) in zip(scalers, entries, strict=False):
        scaler._loss_scale = scale
        scaler._unskipped = unskipped
        what = f"loss scaler {scaler.loss_id}: loss_scale {scale}, unskipped {unskipped}"
        maybe_print(f"amp.load_state_dict: restored {what}.", True)


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
