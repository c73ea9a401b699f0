"""``optimizer._amp_stash`` by apex's names, and what else scripts import from ``apex.amp._process_optimizer``."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ampcompat._types import HALF_DTYPES
from ampcompat.amp.scaling.open_blocks import open_block_of
from ampcompat.amp.scaling.optimizer_state import OptimizerState

__all__ = ["AmpOptimizerState", "post_backward_models_are_masters"]


class AmpOptimizerState(OptimizerState):
    """What amp keeps with one optimizer, with the attributes that apex had: scripts test for them."""

    lazy_init_called = True  # masters exist from ``initialize`` on

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether gradients are scaled outside of blocks: never.

        Scripts write False when they have cleared the gradients of a block with ``delay_unscale``, or divided them by
        the scale. The latter raises: the block has divided them already.
        """
        return False

    @params_have_scaled_gradients.setter
    def params_have_scaled_gradients(self, value: bool) -> None:
        if value:
            raise RuntimeError(
                "params_have_scaled_gradients = True - only a scale_loss block knows by what gradients are scaled -"
                " write `with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled: scaled.backward()`."
            )
        if self.scalers_to_move and any(leaf.grad is not None for leaf in self.leaves.tensors()):
            raise RuntimeError(
                "params_have_scaled_gradients = False after a scale_loss block with delay_unscale=True - the block has"
                " unscaled the gradients already (D55) - do not divide them by the loss scale, and leave this line out."
            )

    @property
    def already_patched(self) -> bool:
        """Whether an overflow skips the next step: one host sync for each flag.

        Writing it changes nothing. apex patched ``step`` to skip, and skipped none of those that a script had marked as
        patched.
        """
        return any(flag.item() for _, flag in self.skipping_flags())

    @already_patched.setter
    def already_patched(self, value: bool) -> None:
        pass

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """Half params: those with masters; all of them where there are no masters."""
        with_masters = [master.half for master in self.leaves.masters]
        return with_masters or [param for param in self.leaves.masterless if param.dtype in HALF_DTYPES]

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """Masters; AttributeError without master weights."""
        self._refuse_without_master_weights("all_fp32_from_fp16_params")
        return [master.value for master in self.leaves.masters]

    @property
    def all_fp32_from_fp32_params(self) -> list[torch.Tensor]:
        """Params that are float32 in the model; AttributeError without master weights."""
        self._refuse_without_master_weights("all_fp32_from_fp32_params")
        return self.all_fp32_params

    @property
    def all_fp32_params(self) -> list[torch.Tensor]:
        """Params that are float32 in the model."""
        return [param for param in self.leaves.masterless if param.dtype == torch.float32]

    @property
    def all_fp16_grad_stash(self) -> list[torch.Tensor | None]:
        """Unscaled gradients of half params from before the block, for a script's own ``_post_amp_backward``."""
        return self._take_saved(self.all_fp16_params)

    @property
    def all_fp32_grad_stash(self) -> list[torch.Tensor | None]:
        """The same of float32 params."""
        return self._take_saved(self.all_fp32_params)

    @property
    def all_fp32_from_fp32_grad_stash(self) -> list[torch.Tensor | None]:
        """The same of float32 params; AttributeError without master weights."""
        self._refuse_without_master_weights("all_fp32_from_fp32_grad_stash")
        return self.all_fp32_grad_stash

    def _refuse_without_master_weights(self, name: str) -> None:
        """Raise what ``hasattr`` takes for a no: scripts that find ``name`` take the params there for masters."""
        options = self.session.properties.options
        if not options["master_weights"]:
            raise AttributeError(
                f"optimizer._amp_stash has no {name} at opt_level={options['opt_level']!r} - there are no master"
                " weights without master_weights=True - use amp.master_params(optimizer), which yields what the"
                " optimizer steps at every level."
            )

    def _take_saved(self, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """The saved gradients of ``params``; the caller adds them."""
        block = open_block_of(self.leaves)
        if block is None:
            return [None] * len(params)
        if block.scripts_part is not None:
            block.scripts_part.saved_grads_taken = True
        return [block.saved.get(param) for param in params]

    @property
    def fp16_groups(self) -> NoReturn:
        """Refused: apex's lists of params by group."""
        raise AttributeError(
            "optimizer._amp_stash has no fp16_groups, fp32_from_fp16_groups or fp32_from_fp32_groups - amp keeps no"
            " lists by group - use all_fp16_params and all_fp32_from_fp16_params, or optimizer.param_groups, which hold"
            " the masters."
        )

    fp32_from_fp16_groups = fp16_groups
    fp32_from_fp32_groups = fp16_groups


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
