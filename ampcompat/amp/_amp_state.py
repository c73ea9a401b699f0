"""Show the latest session as apex's module-global state (``apex/amp/_amp_state.py``).

``loss_scalers`` are the scalers of the latest session that has optimizers.

Scripts read ``loss_scalers``, ``opt_properties`` and ``handle`` here, test for them with ``hasattr``, and set
``allow_incoming_model_not_fp32``, ``hard_override`` and ``verbosity``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ampcompat._log import say
from ampcompat._state import Part, state
from ampcompat.amp.options import number


def _nothing_initialized() -> dict[str, Any]:
    return {"hard_override": False, "allow_incoming_model_not_fp32": False, "verbosity": 1}


@dataclass(eq=False)
class ViewState(Part):
    """What ``amp._amp_state`` shows.

    Attributes:
        view: Its attributes.
        find_scalers: Returns ``loss_scalers``; None before the first session.
    """

    view: dict[str, Any] = field(default_factory=_nothing_initialized)
    find_scalers: Callable[[], list[Any]] | None = None


view_state = state.add(ViewState())


class AmpState:
    """A view of ``view_state.view``, so that a reset clears its attributes."""

    def __getattr__(self, name: str) -> Any:
        if name == "loss_scalers" and view_state.find_scalers is not None:
            return view_state.find_scalers()
        if name.startswith("__") or name not in view_state.view:
            raise AttributeError(f"_amp_state has no attribute {name!r}; amp.initialize has not set it")
        return view_state.view[name]

    def __setattr__(self, name: str, value: object) -> None:
        if name == "loss_scalers" and view_state.find_scalers is not None:
            raise AttributeError(
                f"amp._amp_state.loss_scalers = {value!r} - the list belongs to the call of amp.initialize - put"
                " scalers into it, one per loss: amp._amp_state.loss_scalers[0] = amp.scaler.LossScaler(128.0)."
            )
        if name == "verbosity":
            value = _checked_verbosity(value)
        view_state.view[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in view_state.view:
            raise AttributeError(name)
        del view_state.view[name]


def _checked_verbosity(value: object) -> int | float:
    verbosity = number(value)
    if math.isnan(verbosity):
        raise ValueError(
            f"amp._amp_state.verbosity = {value!r} - it must be a number - write 0 for silence, 1 for apex's messages."
        )
    return value if isinstance(value, int) else verbosity


_amp_state = AmpState()


def warn_or_err(msg: str) -> None:
    """Raise ``msg`` as a RuntimeError; with ``_amp_state.hard_override`` print it as a warning instead."""
    if not _amp_state.hard_override:
        raise RuntimeError(msg)
    say("Warning:  " + msg)


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print ``msg`` on rank 0 unless ``verbosity`` is 0; ``rank0`` is accepted, as in apex."""
    if _amp_state.verbosity > 0:
        say(msg)


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """Iterate over the parameters that ``optimizer`` steps (``apex/amp/_amp_state.py: master_params``).

    Args:
        optimizer: An optimizer; it need not have been given to ``initialize``.

    Returns:
        An iterator over tensors, float32 masters where the model's weights are half, in the order of
        ``optimizer.param_groups``. Outside of ``scale_loss`` blocks their gradients are unscaled float32: clip these.

    Raises:
        TypeError: ``optimizer`` has no ``param_groups``.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"master_params got {type(optimizer).__name__} - it takes an optimizer - pass the optimizer that"
            " amp.initialize returned."
        )
    prepare = getattr(optimizer, "_amp_prepare_masters", None)
    if prepare is not None:
        prepare()
    return (param for group in optimizer.param_groups for param in group["params"])
