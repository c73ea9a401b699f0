"""FusedAdam."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat._types import ParamGroup, Params
from ampcompat.multi_tensor_apply._layerwise import clipped, grad_norm
from ampcompat.multi_tensor_apply._rules import adam_, of_moments
from ampcompat.multi_tensor_apply._working import math_dtype
from ampcompat.multi_tensor_apply.capturable import (
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
)
from ampcompat.multi_tensor_apply.updates import multi_tensor_adam
from ampcompat.optimizers._base import Bucket, FusedOptimizer, Scaling, evaluated


class FusedAdam(FusedOptimizer):
    """Run Adam or AdamW on torch's fused kernel.

    Reproduces ``apex/optimizers/fused_adam.py: FusedAdam``; takes the keywords of
    ``apex/contrib/optimizers/fused_adam.py: FusedAdam``.

    Args:
        params: Params or groups.
        lr: Learning rate.
        bias_correction: Correct the moments for their start at zero; without it, BERT's Adam.
        betas: Decay of the first and of the second moment.
        eps: Added to the denominator.
        adam_w_mode: Decoupled weight decay (AdamW); False adds it to the gradient (L2).
        weight_decay: Weight decay.
        amsgrad: Not supported, as in apex.
        set_grad_none: ``zero_grad()`` sets gradients to None.
        capturable: Count steps on the device, for CUDA graphs.
        master_weights: Keep float32 masters of half params in ``state[param]["master_param"]``, for use without amp.
        max_grad_norm: Of the old ``apex.contrib`` optimizer: clip the gradients of each group to this norm; 0 does not.
        eps_inside_sqrt: Of the same: ``eps`` is added to the second moment, under the root.
        use_mt: Of the same, without effect: many tensors are always updated at once.
        amp_scale_adjustment: Of the same, without effect: the loss scale is amp's.

    State: ``exp_avg``, ``exp_avg_sq`` a param, float32 for half params too; ``step`` a group.

    Raises:
        RuntimeError: ``amsgrad=True``.
    """

    _kept = (*FusedOptimizer._kept, "adam_w_mode", "master_weights", "max_grad_norm", "eps_inside_sqrt")
    _state_names = ("exp_avg", "exp_avg_sq")
    _reads = "FusedAdam"
    _rule_unscales = True
    multi_tensor_adam = staticmethod(multi_tensor_adam)
    multi_tensor_adam_capturable = staticmethod(multi_tensor_adam_capturable)
    multi_tensor_adam_capturable_master = staticmethod(multi_tensor_adam_capturable_master)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        max_grad_norm: float = 0.0,
        eps_inside_sqrt: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.capturable = capturable
        self.master_weights = master_weights
        self.max_grad_norm = max_grad_norm
        self.eps_inside_sqrt = eps_inside_sqrt
        shared = of_moments(lr, bias_correction, betas, eps, weight_decay)
        super().__init__(params, set_grad_none, amsgrad, **shared)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], object] | None = None,
        grads: object = None,
        output_params: object = None,
        scale: object = None,
        grad_norms: object = None,
        **by_name: Any,
    ) -> Any:
        """Update the params; see :meth:`FusedOptimizer.step`.

        Args:
            closure: As there.
            grads: Refused, like the next three.
            output_params: Of the old ``apex.contrib`` FusedAdam.
            scale: The same.
            grad_norms: The same.
            **by_name: ``grad_scaler``, a ``torch.amp.GradScaler``: divide by its scale, unless it has unscaled the
                gradients already, and skip the step on the device if they overflowed. It is not named in the signature:
                a GradScaler that finds the name there warns that it will stop passing itself.

        Raises:
            RuntimeError: An argument of the old ``apex.contrib`` FusedAdam was passed, as in apex; or as there.
            TypeError: Another keyword.
        """
        grad_scaler = by_name.pop("grad_scaler", None)
        if by_name:
            raise TypeError(
                f"FusedAdam.step() got an unexpected keyword argument {next(iter(by_name))!r} - it takes a closure and"
                " grad_scaler - leave the rest out."
            )
        old = {"grads": grads, "output_params": output_params, "scale": scale, "grad_norms": grad_norms}
        passed = [name for name, value in old.items() if value is not None]
        if passed:
            raise RuntimeError(
                f"FusedAdam.step() was called with {', '.join(passed)}: FusedAdam has been updated. Simply initialize "
                "it identically to torch.optim.Adam, and call step() with no arguments; amp keeps the half params. "
                "apex.contrib.optimizers.FusedAdam is the one that takes them."
            )
        loss = evaluated(closure)
        if grad_scaler is None:
            self._make_step(self._scaling())
        else:
            self._make_step(Scaling.of(*_torch.found_inf_and_scale(grad_scaler, self)))
        return loss

    @cached_property
    def param_groups_master(self) -> list[dict[str, list[Tensor]]]:
        """Float32 copies of the params, a dict a group, for a ``step`` of a subclass's own (NeMo's Adam for Megatron).

        They are made when they are first asked for. :meth:`step` does not use them: its masters are in the state. As in
        apex, ``state_dict`` does not save them.

        Raises:
            AttributeError: ``master_weights`` is False.
        """
        if not self.master_weights:
            raise AttributeError(
                f"{type(self).__name__}.param_groups_master - only an optimizer with master_weights=True has masters -"
                " pass it."
            )
        groups: list[dict[str, list[Tensor]]] = []
        for group in self.param_groups:
            masters = [param.detach().to(math_dtype(param.dtype), copy=True) for param in group["params"]]
            groups.append({"params": masters})
        return groups

    @property
    def _decoupled(self) -> bool:
        return bool(self.adam_w_mode)

    def _state_dtype(self, name: str, param: Tensor) -> torch.dtype:
        return math_dtype(param.dtype)

    def _keeps_master(self, param: Tensor) -> bool:
        return self.master_weights and param.dtype != math_dtype(param.dtype)

    def _update(self, group: ParamGroup, bucket: Bucket) -> None:
        if self.max_grad_norm > 0:
            norm = grad_norm(group["params"], bucket.grad_scale)
            bucket.make_usable()
            bucket.grads = clipped(bucket.grads, norm, self.max_grad_norm)
        adam_(
            bucket.params,
            bucket.grads,
            bucket.state["exp_avg"],
            bucket.state["exp_avg_sq"],
            bucket.hyper,
            eps_inside_sqrt=self.eps_inside_sqrt,
            grad_scale=bucket.grad_scale,
        )
