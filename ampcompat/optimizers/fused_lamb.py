"""FusedLAMB."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import ClassVar

from torch import Tensor

from ampcompat._types import ParamGroup, Params
from ampcompat.multi_tensor_apply._layerwise import grad_norm, lamb_
from ampcompat.multi_tensor_apply._rules import of_moments
from ampcompat.multi_tensor_apply.lamb import multi_tensor_lamb
from ampcompat.multi_tensor_apply.norms import multi_tensor_l2norm
from ampcompat.optimizers._base import Bucket, FusedOptimizer, Scaling


class FusedLAMB(FusedOptimizer):
    """Run LAMB on torch's foreach kernels.

    Reproduces ``apex/optimizers/fused_lamb.py: FusedLAMB``.

    Args:
        params: Params or groups.
        lr, bias_correction, betas, eps, weight_decay, amsgrad: As of :class:`~ampcompat.optimizers.FusedAdam`.
        adam_w_mode: Decoupled weight decay; False adds it to the gradient (L2).
        grad_averaging: Weigh the gradient by ``1 - betas[0]`` in the first moment.
        set_grad_none: ``zero_grad()`` sets gradients to None.
        max_grad_norm: Clip the gradients of all groups together to this norm; None or 0 does not. It is the
            constructor's: a value in a group has no effect, as in apex.
        use_nvlamb: Scale by the trust ratio in groups without weight decay, too.

    State: ``exp_avg``, ``exp_avg_sq`` a param, in the dtype of the param; ``step`` a group. In half without masters the
    second moment underflows, as it did in apex: use it under amp at O2, or :class:`FusedMixedPrecisionLamb`.

    Raises:
        RuntimeError: ``amsgrad=True``.
    """

    _kept = (*FusedOptimizer._kept, "adam_w_mode", "use_nvlamb")
    _reads = "FusedLAMB"
    _reads_whole_params = True
    _state_names = ("exp_avg", "exp_avg_sq")
    multi_tensor_l2norm = staticmethod(multi_tensor_l2norm)
    multi_tensor_lamb: ClassVar[Callable[..., None]] = staticmethod(multi_tensor_lamb)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        shared = of_moments(lr, bias_correction, betas, eps, weight_decay)
        super().__init__(
            params, set_grad_none, amsgrad, **shared, grad_averaging=grad_averaging, max_grad_norm=max_grad_norm
        )

    @property
    def _decoupled(self) -> bool:
        return bool(self.adam_w_mode)

    def _before_updates(self, scaling: Scaling) -> None:
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        self._global_grad_norm = grad_norm(params, scaling.grad_scale)

    def _update(self, group: ParamGroup, bucket: Bucket) -> None:
        lamb_(
            bucket.params,
            bucket.grads,
            bucket.state["exp_avg"],
            bucket.state["exp_avg_sq"],
            bucket.hyper,
            global_grad_norm=self._global_grad_norm,
            max_grad_norm=self.defaults["max_grad_norm"],
            use_nvlamb=self.use_nvlamb,
            update_dtypes=bucket.dtypes,
        )
