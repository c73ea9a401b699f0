"""``optimizer._amp_stash`` by apex's names, and what else scripts import from ``apex.amp._process_optimizer``."""

from __future__ import annotations

from typing import NoReturn

import torch

from ampcompat._types import HALF_DTYPES
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
        is_delayed = self.unaveraged or any(scaler.pending is not None for scaler in self.session.scalers)
        if is_delayed and any(leaf.grad is not None for leaf in self.leaves.tensors()):
            raise RuntimeError(
                "params_have_scaled_gradients = False after a scale_loss block with delay_unscale=True - the block has"
                " unscaled the gradients already (D55) - do not divide them by the loss scale, and leave this line out."
            )

    @property
    def already_patched(self) -> bool:
        """Whether an overflow skips the next step: one host sync for each flag.

        Writing it changes nothing. apex patched ``step`` to skip, unless a script had written that it was patched.
        """
        return any(flag.item() for _, flag in self.flags())

    @already_patched.setter
    def already_patched(self, value: bool) -> None:
        pass

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """Half params that have masters; all half params where none has."""
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

    def _refuse_without_master_weights(self, name: str) -> None:
        """Raise what ``hasattr`` takes for a no: scripts that find ``name`` take the params there for masters."""
        options = self.session.properties.options
        if not options["master_weights"]:
            raise AttributeError(
                f"optimizer._amp_stash has no {name} at opt_level={options['opt_level']!r} - there are no master"
                " weights without master_weights=True - use amp.master_params(optimizer), which yields what the"
                " optimizer steps at every level."
            )

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

    @property
    def all_fp16_grad_stash(self) -> NoReturn:
        """Refused: apex's lists of gradients from before a block."""
        raise AttributeError(
            "optimizer._amp_stash has no all_fp16_grad_stash, all_fp32_grad_stash or all_fp32_from_fp32_grad_stash -"
            " blocks keep older gradients to themselves - read p.grad before the block, or after it."
        )

    all_fp32_grad_stash = all_fp16_grad_stash
    all_fp32_from_fp32_grad_stash = all_fp16_grad_stash


def post_backward_models_are_masters(*args: object, **kwargs: object) -> NoReturn:
    """Refused: what a script's own ``_post_amp_backward`` called, which blocks never call."""
    raise RuntimeError(
        "post_backward_models_are_masters is not supplied - scale_loss blocks unscale gradients themselves, and call no"
        " _post_amp_backward of the script's - change gradients after the block."
    )
