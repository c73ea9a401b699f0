"""FusedSGD."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim.optimizer import required

from ampcompat._types import ParamGroup, Params
from ampcompat.multi_tensor_apply._rules import Hyper, sgd_
from ampcompat.multi_tensor_apply.updates import multi_tensor_sgd
from ampcompat.optimizers._base import Bucket, FusedOptimizer


class FusedSGD(FusedOptimizer):
    """Run SGD with momentum on torch's fused kernel.

    Reproduces ``apex/optimizers/fused_sgd.py: FusedSGD``.

    Args:
        params: Params or groups.
        lr: Learning rate; required here or in every group.
        momentum: Momentum.
        dampening: Dampening of the momentum, from the second step of a param on.
        weight_decay: Weight decay.
        nesterov: Nesterov momentum; needs a momentum and no dampening.
        wd_after_momentum: Add the weight decay to the update instead of to the gradient.
        materialize_master_grads: Without effect: under amp the optimizer always reads float32 master gradients.
        set_grad_none: ``zero_grad()`` sets gradients to None.

    State: ``momentum_buffer`` a param, in the dtype of the param, where there is a momentum.

    Raises:
        ValueError: ``lr`` is missing or negative, ``momentum`` or ``weight_decay`` is negative, or ``nesterov`` goes
            with no momentum or with dampening.
    """

    _kept = (*FusedOptimizer._kept, "wd_after_momentum", "materialize_master_grads")
    _state_names = ("momentum_buffer",)
    _reads = "FusedSGD"
    _counts_steps = False
    _rule_unscales = True
    multi_tensor_sgd = staticmethod(multi_tensor_sgd)

    def __init__(
        self,
        params: Params,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if lr is not required and lr < 0.0:
            raise ValueError(f"Invalid learning rate: {lr}: it must be 0 or more.")
        if momentum < 0.0:
            raise ValueError(f"Invalid momentum value: {momentum}: it must be 0 or more.")
        if weight_decay < 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}: it must be 0 or more.")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"Nesterov momentum requires a momentum and zero dampening, not {momentum} and {dampening}: "
                "pass momentum=0.9, say, or nesterov=False."
            )
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        super().__init__(
            params,
            set_grad_none,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )

    def get_momentums(self, params: Iterable[Tensor]) -> tuple[list[Tensor], bool]:
        """Return the momentum buffers of ``params``, made where they are missing, for a ``step`` of a subclass's own.

        Reproduces ``apex/optimizers/fused_sgd.py: FusedSGD.get_momentums``.

        Returns:
            The buffers, and whether the last one was made now: ``first_run`` of ``amp_C.multi_tensor_sgd``, which takes
            it for the whole list.
        """
        momentums: list[Tensor] = []
        first_run = True
        for param in params:
            state = self.state[param]
            first_run = state.get("momentum_buffer") is None
            if first_run:
                state["momentum_buffer"] = self._new_state("momentum_buffer", param, {})
            momentums.append(state["momentum_buffer"])
        return momentums, first_run

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Decline with dampening: which step is a param's first is then known to the host alone."""
        return not any(group["momentum"] and group["dampening"] for group in self.param_groups)

    def _names(self, group: ParamGroup) -> tuple[str, ...]:
        return self._state_names if group["momentum"] else ()

    @property
    def _decoupled(self) -> bool:
        return self.wd_after_momentum

    def _update(self, group: ParamGroup, bucket: Bucket) -> None:
        if not group["momentum"] or not group["dampening"]:
            self._apply(bucket, range(len(bucket.params)), bucket.hyper)
            return
        undamped = replace(bucket.hyper, dampening=0.0)
        self._apply(bucket, [i for i, new in enumerate(bucket.is_new) if new], undamped)
        self._apply(bucket, [i for i, new in enumerate(bucket.is_new) if not new], bucket.hyper)

    def _apply(self, bucket: Bucket, chosen: Sequence[int], hyper: Hyper) -> None:
        if not chosen:
            return
        buffers = bucket.state.get("momentum_buffer")
        sgd_(
            [bucket.params[i] for i in chosen],
            [bucket.grads[i] for i in chosen],
            [buffers[i] for i in chosen] if buffers else [],
            hyper,
            grad_scale=bucket.grad_scale,
        )
