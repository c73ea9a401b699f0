"""The contributed ``FusedAdam``: steps float32 params by half gradients that are still scaled, and copies to half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from ampcompat import fused_adam_cuda
from ampcompat._types import ParamGroup, Params
from ampcompat.contrib.optimizers._arguments import OfParams, Row, rows_of
from ampcompat.multi_tensor_apply._working import math_dtype
from ampcompat.multi_tensor_apply.lists import number_on
from ampcompat.multi_tensor_apply.norms import multi_tensor_l2norm
from ampcompat.optimizers._base import evaluated, load_state_in, refuse_unsupported
from ampcompat.optimizers._saved_forms import in_own_form

__all__ = ["FusedAdam"]


class FusedAdam(torch.optim.Optimizer):
    """Run the Adam that apex had before amp, for scripts that keep half params and float32 masters themselves.

    Its rule is that of :func:`ampcompat.fused_adam_cuda.adam`: the weight decay is added to the update, and the bias
    corrections are part of the learning rate. Reproduces ``apex/contrib/optimizers/fused_adam.py: FusedAdam``, whose
    arguments after ``eps`` are others than those of :class:`ampcompat.optimizers.FusedAdam`. Under amp it steps like
    any other optimizer.

    Args:
        params: Params or groups.
        lr: Learning rate.
        bias_correction: Correct the moments for their start at zero.
        betas: Decay of the first and of the second moment.
        eps: Added to the denominator.
        eps_inside_sqrt: Add ``eps`` under the root.
        weight_decay: Weight decay.
        max_grad_norm: Clip the gradients of each group to this norm; 0 does not.
        amsgrad: Not supported, as in apex.
        use_mt: Without effect: many tensors are always updated at once.
        amp_scale_adjustment: Without effect: the loss scale is amp's.

    State: ``step``, ``exp_avg``, ``exp_avg_sq`` a param, the moments float32 for half params too. apex's took no half
    params.

    Raises:
        RuntimeError: ``amsgrad=True``.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        if amsgrad:
            raise RuntimeError(
                "FusedAdam does not support the AMSGrad variant (amsgrad=True): leave the argument out, or use"
                " torch.optim.AdamW(..., amsgrad=True, fused=True)."
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        self.eps_mode = fused_adam_cuda.EPS_INSIDE_SQRT if eps_inside_sqrt else 1
        super().__init__(params, defaults)  # type: ignore[arg-type] # as torch takes them

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], object] | None = None,
        grads: OfParams = None,
        output_params: OfParams = None,
        scale: float | Tensor = 1.0,
        grad_norms: Sequence[Tensor | float | None] | None = None,
    ) -> Any:
        """Update the params. No host sync.

        Args:
            closure: Re-evaluates the model and returns the loss; called once, with gradients enabled.
            grads: Gradients to use in the place of those of the params, half or float32, multiplied by ``scale``: a
                list for the one group, or a list of lists.
            output_params: Tensors that get the new values too, in their own dtype: lists as ``grads``.
            scale: What the gradients are divided by.
            grad_norms: The norm of each group's gradients, ``scale`` included, for ``max_grad_norm``. Without it, the
                norm is computed here; apex raised.

        Returns:
            What the closure returned, else None.

        Raises:
            ValueError: A list does not match the groups.
            RuntimeError: A gradient is sparse, or a param is complex; nothing has been changed then.
        """
        loss = evaluated(closure)
        groups = rows_of(type(self).__name__, self.param_groups, grads, output_params)
        refuse_unsupported(type(self).__name__, [row.param for _, rows in groups for row in rows], False)
        norms = [None] * len(groups) if grad_norms is None else list(grad_norms)
        for (group, rows), norm in zip(groups, norms, strict=True):
            if rows:
                self._update_group(group, rows, self._divisor(group, rows, scale, norm))
        return loss

    def _divisor(
        self, group: ParamGroup, rows: list[Row], scale: float | Tensor, norm: Tensor | float | None
    ) -> float | Tensor:
        """Return what the gradients of ``group`` are divided by: the scale, and what clips them."""
        max_norm = group["max_grad_norm"]
        if max_norm <= 0:
            return scale
        grads = [row.grad for row in rows]
        if norm is None:
            norm = multi_tensor_l2norm(0, torch.zeros(1, dtype=torch.int32, device=grads[0].device), [grads])[0]
        excess = (number_on(grads[0].device, norm) / scale + 1e-6) / max_norm
        return torch.where(excess > 1, excess, 1.0) * scale

    def _update_group(self, group: ParamGroup, rows: list[Row], divisor: float | Tensor) -> None:
        alike: dict[object, list[Row]] = {}
        for row in rows:
            state = self.state[row.param]
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(row.param, dtype=math_dtype(row.param.dtype))
                state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
            state["step"] += 1
            kind = (state["step"], row.param.device, math_dtype(row.param.dtype), row.output is not None)
            alike.setdefault(kind, []).append(row)
        for chosen in alike.values():
            self._update(group, chosen, divisor)

    def _update(self, group: ParamGroup, rows: list[Row], divisor: float | Tensor) -> None:
        states = [self.state[row.param] for row in rows]
        lists = [
            [row.param for row in rows],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [row.grad for row in rows],
        ]
        outputs = [row.output for row in rows if row.output is not None]
        if outputs:
            lists.append(outputs)
        beta1, beta2 = group["betas"]
        fused_adam_cuda.adam_mt(
            0,
            torch.zeros(1, dtype=torch.int32, device=rows[0].param.device),
            lists,
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            divisor,
            states[0]["step"],
            self.eps_mode,
            1 if group["bias_correction"] else 0,
            group["weight_decay"],
        )

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load as torch's does, but keep float32 moments of half params, where torch rounds them to their dtype.

        State that another Adam wrote is converted: docs/resume.md has the table.

        Raises:
            ValueError: Another optimizer's state, or torch's own; nothing has been changed then.
        """
        state_dict = in_own_form(self, "FusedAdam", state_dict, "in params")
        super().load_state_dict(state_dict)
        load_state_in(self, state_dict, lambda _, param: math_dtype(param.dtype))

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "eps_mode": self.eps_mode}
