"""The contributed ``FusedSGD``: steps float32 params by half gradients that are still scaled, and copies to half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from ampcompat import optimizers
from ampcompat._types import ParamGroup, Params
from ampcompat.contrib.optimizers._arguments import OfParams, Row, rows_of
from ampcompat.multi_tensor_apply._working import math_dtype
from ampcompat.optimizers._base import evaluated

__all__ = ["FusedSGD"]


class FusedSGD(optimizers.FusedSGD):
    """Run :class:`ampcompat.optimizers.FusedSGD`, on gradients from outside if ``step`` gets some.

    Reproduces ``apex/contrib/optimizers/fused_sgd.py: FusedSGD``, which took gradients from outside only, and refused
    to run under amp.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum, materialize_master_grads: As there.

    Raises:
        ValueError: As there.
    """

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
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            wd_after_momentum,
            materialize_master_grads,
        )

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], object] | None = None,
        grads: OfParams = None,
        output_params: OfParams = None,
        scale: float = 1.0,
        grad_norms: Sequence[Tensor | float | None] | None = None,
    ) -> Any:
        """Update the params.

        Args:
            closure: Re-evaluates the model and returns the loss; called once, with gradients enabled.
            grads: Gradients to use in the place of those of the params, half or float32, multiplied by ``scale``: a
                list for the one group, or a list of lists.
            output_params: Tensors that get the new values too, in their own dtype: lists as ``grads``.
            scale: What the gradients are divided by.
            grad_norms: Without effect, as in apex.

        Returns:
            What the closure returned, else None.

        Raises:
            ValueError: A list does not match the groups.
            RuntimeError: A gradient is sparse; nothing has been changed then.
        """
        if grads is None and output_params is None and scale == 1.0:
            return super().step(closure)
        loss = evaluated(closure)
        for group, rows in rows_of(type(self).__name__, self.param_groups, grads, output_params):
            alike: dict[object, list[Row]] = {}
            for row in rows:
                is_first = "momentum_buffer" not in self.state[row.param]
                kind = (is_first, row.param.device, math_dtype(row.param.dtype), row.output is not None)
                alike.setdefault(kind, []).append(row)
            for chosen in alike.values():
                self._update_rows(group, chosen, scale)
        return loss

    def _update_rows(self, group: ParamGroup, rows: list[Row], scale: float) -> None:
        params = [row.param for row in rows]
        momentums, is_first_run = self.get_momentums(params)
        lists = [[row.grad for row in rows], params, momentums]
        outputs = [row.output for row in rows if row.output is not None]
        if outputs:
            lists.append(outputs)
        self.multi_tensor_sgd(
            0,
            torch.zeros(1, dtype=torch.int32, device=params[0].device),
            lists,
            group["weight_decay"],
            group["momentum"],
            group["dampening"],
            group["lr"],
            group["nesterov"],
            is_first_run,
            self.wd_after_momentum,
            1.0 / scale,
        )
