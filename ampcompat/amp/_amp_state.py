"""apex's module-global state, as a view of the latest ``initialize`` call.

Scripts read ``loss_scalers``, ``opt_properties`` and ``handle`` here, test for them with ``hasattr``, and set
``allow_incoming_model_not_fp32``, ``hard_override`` and ``verbosity``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ampcompat._log import rank, say
from ampcompat._state import state


class AmpState:
    """Attributes live in ampcompat's one state object, so that a reset clears them."""

    def _values(self) -> dict[str, Any]:
        if not state.view:
            state.view.update(hard_override=False, allow_incoming_model_not_fp32=False, verbosity=1)
        return state.view

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        values = self._values()
        if name in values:
            return values[name]
        raise AttributeError(f"_amp_state has no attribute {name!r}; amp.initialize has not set it")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scalers" and state.session is not None and state.session.enabled:
            state.session.replace_scalers(value)
        self._values()[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self._values():
            raise AttributeError(name)
        del self._values()[name]


_amp_state = AmpState()


def warn_or_err(message: str) -> None:
    """Raise ``message`` as a RuntimeError; with ``_amp_state.hard_override`` print it as a warning instead."""
    if _amp_state.hard_override:
        say("Warning:  " + message)
    else:
        raise RuntimeError(message)


def maybe_print(message: str, rank0: bool = False) -> None:
    """Print ``message`` unless ``verbosity`` is 0; on rank 0."""
    if _amp_state.verbosity > 0 and (not rank0 or rank() == 0):
        say(message)


def master_params(optimizer: Any) -> Iterator[torch.Tensor]:
    """Iterate over the parameters that ``optimizer`` steps: float32 masters where the model's weights are half.

    Args:
        optimizer: An optimizer; it need not have been given to ``initialize``.

    Returns:
        An iterator over tensors, in the order of ``optimizer.param_groups``; of a ``ZeroRedundancyOptimizer``, half
        weights where another rank has the master. Right after a ``scale_loss`` block their gradients are unscaled
        float32: clip these.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"master_params got {type(optimizer).__name__} - it takes an optimizer - pass the optimizer that"
            " amp.initialize returned."
        )
    stash = getattr(optimizer, "_amp_stash", None)
    if stash is not None:
        stash.hand_out_masters(optimizer)
        sharded = {id(master.half): master.value for master in stash.masters}  # other optimizers' groups hold masters
        return (sharded.get(id(param), param) for group in optimizer.param_groups for param in group["params"])
    return (param for group in optimizer.param_groups for param in group["params"])
