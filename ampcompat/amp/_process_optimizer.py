"""Home of names that scripts import from ``apex.amp._process_optimizer``."""

from __future__ import annotations

from typing import Any

import torch

from ampcompat.amp.scaling.optimizer_state import AmpOptimizerState

__all__ = ["AmpOptimizerState", "post_backward_models_are_masters"]


def post_backward_models_are_masters(
    scaler: Any,
    params: list[torch.Tensor],
    stashed_grads: list[torch.Tensor | None],
    scale_override: tuple[float, float, float] | None = None,
) -> None:
    """Unscale the gradients of ``params`` in place and add ``stashed_grads``, which are emptied.

    As in apex (``apex/amp/_process_optimizer.py: post_backward_models_are_masters``), for scripts that have written a
    ``_post_amp_backward`` of their own. Up to two host syncs.

    Args:
        scaler: The loss scaler; it notes inf and NaN.
        params: Parameters that the optimizer itself steps; those without a gradient get the stashed one.
        stashed_grads: What each had accumulated before this backward pass, or None.
        scale_override: The scales of new gradients, of stashed ones and of the sum, instead of the scaler's, 1 and 1.
    """
    new: list[torch.Tensor] = []
    added_to: list[torch.Tensor] = []
    addends: list[torch.Tensor] = []
    for param, stashed in zip(params, stashed_grads, strict=True):
        if param.grad is None:
            param.grad = stashed
        elif stashed is None:
            new.append(param.grad)
        else:
            added_to.append(param.grad)
            addends.append(stashed)
    scale = None
    if scale_override is not None:
        grads_scale, _, out_scale = scale_override
        scale = grads_scale / out_scale
    if new:
        scaler.unscale(new, new, None, models_are_masters=True, scale_override=scale)
    if added_to:
        scaler.unscale_with_stashed(added_to, addends, added_to, scale_override)
    stashed_grads[:] = [None] * len(stashed_grads)
