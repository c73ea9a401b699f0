"""FusedNovoGrad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from ampcompat._types import ParamGroup, Params
from ampcompat.multi_tensor_apply._layerwise import NOT_YET, novograd_
from ampcompat.multi_tensor_apply._rules import of_moments
from ampcompat.multi_tensor_apply.updates import multi_tensor_novograd
from ampcompat.optimizers._base import Bucket, FusedOptimizer


class FusedNovoGrad(FusedOptimizer):
    """Run NovoGrad on torch's foreach kernels.

    Reproduces ``apex/optimizers/fused_novograd.py: FusedNovoGrad``.

    Args:
        params: Params or groups.
        lr, bias_correction, betas, eps, weight_decay, amsgrad: As of :class:`~ampcompat.optimizers.FusedAdam`.
        reg_inside_moment: Add the weight decay to the normalised gradient, inside the momentum.
        grad_averaging: Weigh the gradient by ``1 - betas[0]`` in the first moment.
        norm_type: 2 for the L2 norm of each layer's gradient, 0 for its largest magnitude.
        init_zero: Start the second moment at 0 instead of at the norm of the first gradient.
        set_grad_none: ``zero_grad()`` sets gradients to None.

    State: ``exp_avg`` (in the dtype of the param) and ``exp_avg_sq`` (the running norm itself, 0-dim float32) a param;
    ``step`` a group. apex kept the norms in the group as ``exp_avg_sq`` = [float16 params, float32 params], by position
    among the params that had gradients; such checkpoints load.

    Raises:
        RuntimeError: ``amsgrad=True``, or another ``norm_type``.
    """

    _kept = (*FusedOptimizer._kept, "moment_mode")
    _reads = "FusedNovoGrad"
    _reads_whole_params = True
    _state_names = ("exp_avg", "exp_avg_sq")
    _state_of_layers = frozenset({"exp_avg_sq"})
    multi_tensor_novograd = staticmethod(multi_tensor_novograd)

    def __init__(
        self,
        params: Params,
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
        if norm_type not in (0, 2):
            raise RuntimeError(f"FusedNovoGrad only supports l2/inf norm, not norm_type={norm_type!r}: pass 2 or 0.")
        self.moment_mode = 0 if reg_inside_moment else 1
        shared = of_moments(lr, bias_correction, betas, eps, weight_decay)
        super().__init__(
            params,
            set_grad_none,
            amsgrad,
            **shared,
            grad_averaging=grad_averaging,
            norm_type=norm_type,
            init_zero=init_zero,
        )

    @property
    def _decoupled(self) -> bool:
        return self.moment_mode == 1

    def _new_state(self, name: str, param: Tensor, group: ParamGroup) -> Tensor:
        if name not in self._state_of_layers:
            return super()._new_state(name, param, group)
        start = 0.0 if group["init_zero"] else NOT_YET
        return torch.full((), start, dtype=self._state_dtype(name, param), device=param.device)

    def _update(self, group: ParamGroup, bucket: Bucket) -> None:
        novograd_(
            bucket.params,
            bucket.grads,
            bucket.state["exp_avg"],
            bucket.state["exp_avg_sq"],
            bucket.hyper,
            norm_type=group["norm_type"],
        )

    def _in_own_form(self, state_dict: StateDict) -> StateDict:
        saved = super()._in_own_form(state_dict)
        for group, own_group in zip(saved["param_groups"], self.param_groups, strict=False):
            norms = group.pop("exp_avg_sq", None)
            if norms is not None:
                self._give_norms_to_params(norms, group["params"], own_group["params"], saved["state"])
        return saved

    def _give_norms_to_params(
        self, norms: list[Tensor | None], keys: list[Any], params: list[Tensor], states: dict[Any, Any]
    ) -> None:
        """Give each param of a group its norm from apex's lists, which have those of params with gradients alone."""
        halves: list[Any] = []
        floats: list[Any] = []
        for key, param in zip(keys, params, strict=False):
            if states.get(key):
                (halves if param.dtype == torch.float16 else floats).append(states[key])
        for of_dtype, running in zip((halves, floats), norms, strict=True):
            count = 0 if running is None else len(running)
            if count != len(of_dtype):
                raise ValueError(
                    f"FusedNovoGrad.load_state_dict got {count} norms for {len(of_dtype)} params with state - apex"
                    " saved one a param, those of float16 params before the others - load it with params of the dtypes"
                    " that it was saved with."
                )
            for state, norm in zip(of_dtype, () if running is None else running.unbind(), strict=True):
                state["exp_avg_sq"] = norm.clone()
