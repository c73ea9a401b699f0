"""``optimizer._prepare_amp_backward`` and ``_post_amp_backward``, for scripts with their own copy of ``scale_loss``.

apex called them at the beginning and the end of a block (``apex/amp/handle.py: scale_loss``). Blocks of amp call
neither: one that a script has put in the place of these is not called by them.
"""

from __future__ import annotations

from ampcompat import _torch
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer, OptimizerState
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.unscaling import unscale_gradients


def prepare_amp_backward(optimizer: AmpOptimizer) -> None:
    """Set older gradients aside (``apex/amp/_process_optimizer.py: prepare_backward_with_master_weights``)."""
    stash: OptimizerState = optimizer._amp_stash
    stash.set_aside_by_script.set_aside(stash.leaves)


@_torch.without_grad
def post_amp_backward(optimizer: AmpOptimizer, scaler: LossScaler) -> None:
    """Unscale new gradients, and add older ones.

    As in apex (``apex/amp/_process_optimizer.py: post_backward_with_master_weights``). The scale does not move, and no
    step is skipped: the caller sees to that, by ``scaler.update_scale()``.
    """
    stash: OptimizerState = optimizer._amp_stash
    unscale_gradients(stash.leaves, scaler.found_inf, scaler.current_scale())
    stash.set_aside_by_script.add_to_new()


def are_replaced(optimizers: list[AmpOptimizer]) -> bool:
    """Whether a script has put a method of its own in the place of one of these, on one of ``optimizers``."""
    own = {"_prepare_amp_backward": prepare_amp_backward, "_post_amp_backward": post_amp_backward}
    for optimizer in optimizers:
        for name, function in own.items():
            method = vars(optimizer).get(name)
            if getattr(method, "__func__", None) is not function:
                return True
    return False
