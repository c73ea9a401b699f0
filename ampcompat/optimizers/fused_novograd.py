"""FusedNovoGrad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampcompat.optimizers._base import Bucket, FusedOptimizer
from ampcompat.optimizers._layerwise import NOT_YET, novograd_
from ampcompat.optimizers._working import math_dtype


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad, apex's rule on torch's foreach kernels.

    Args:
        params: Params or groups.
        lr: Learning rate.
        bias_correction: Correct the moments for their start at zero.
        betas: Decay of the first and of the second moment.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        amsgrad: Not supported, as in apex.
        reg_inside_moment: Add the weight decay to the normalised gradient, inside the momentum.
        grad_averaging: Weigh the gradient by ``1 - betas[0]`` in the first moment.
        norm_type: 2 for the L2 norm of each layer's gradient, 0 for its largest magnitude.
        init_zero: Start the second moment at 0 instead of at the norm of the first gradient.
        set_grad_none: ``zero_grad()`` sets gradients to None.

    State: ``exp_avg`` and ``exp_avg_sq`` (the running norm itself, 0-dim) a param; ``step`` a group. apex kept the
    norms in the group as ``exp_avg_sq`` = [float16 params, float32 params], by position among the params that had
    gradients; such checkpoints load where every param had one.

    Raises:
        RuntimeError: ``amsgrad=True``, or another ``norm_type``.
    """

    _kept = (*FusedOptimizer._kept, "moment_mode")
    _state_names = ("exp_avg", "exp_avg_sq")
    _state_is_like_params = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError(
                "FusedNovoGrad does not support the AMSGrad variant (amsgrad=True): leave the argument out."
            )
        if norm_type not in (0, 2):
            raise RuntimeError(f"FusedNovoGrad only supports l2/inf norm, not norm_type={norm_type!r}: pass 2 or 0.")
        self.moment_mode = 0 if reg_inside_moment else 1
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, set_grad_none)

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        dtype = math_dtype(param.dtype)
        start = 0.0 if group["init_zero"] else NOT_YET
        return {
            "exp_avg": torch.zeros_like(param, dtype=dtype),
            "exp_avg_sq": torch.full((), start, dtype=dtype, device=param.device),
        }

    def _update(self, group: dict[str, Any], bucket: Bucket) -> None:
        novograd_(
            bucket.params,
            bucket.grads,
            bucket.state["exp_avg"],
            bucket.state["exp_avg_sq"],
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            step=group["step"],
            bias_correction=bool(group["bias_correction"]),
            weight_decay=group["weight_decay"],
            grad_averaging=bool(group["grad_averaging"]),
            reg_inside_moment=self.moment_mode == 0,
            norm_type=group["norm_type"],
            found_inf=bucket.found_inf,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As :meth:`FusedOptimizer.load_state_dict`; checkpoints of apex, with norms in the groups, too."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            by_precision = group.pop("exp_avg_sq", None)
            if by_precision is None:
                continue
            halves = [p for p in group["params"] if p.dtype == torch.float16]
            floats = [p for p in group["params"] if p.dtype != torch.float16]
            for params, running in zip((halves, floats), by_precision, strict=True):
                if running is None or len(running) != len(params):
                    continue
                for param, norm in zip(params, running.unbind(), strict=True):
                    self.state[param]["exp_avg_sq"] = norm.to(param.device, math_dtype(param.dtype), copy=True)
