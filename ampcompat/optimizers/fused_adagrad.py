"""FusedAdagrad."""

from __future__ import annotations

from torch import Tensor

from ampcompat._types import ParamGroup, Params
from ampcompat.multi_tensor_apply._rules import adagrad_
from ampcompat.multi_tensor_apply.updates import multi_tensor_adagrad
from ampcompat.optimizers._base import Bucket, FusedOptimizer


class FusedAdagrad(FusedOptimizer):
    """Run Adagrad on torch's foreach kernels.

    Reproduces ``apex/optimizers/fused_adagrad.py: FusedAdagrad``.

    Args:
        params: Params or groups.
        lr: Learning rate.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        set_grad_none: ``zero_grad()`` sets gradients to None.
        adagrad_w_mode: Decoupled weight decay; False adds it to the gradient (L2).

    State: ``sum`` a param, in the dtype of the param, as in apex: sums of half params stop growing where the next
    square is less than half an ulp of them.
    """

    _kept = (*FusedOptimizer._kept, "adagrad_w_mode")
    _state_names = ("sum",)
    _reads = "FusedAdagrad"
    _counts_steps = False
    multi_tensor_adagrad = staticmethod(multi_tensor_adagrad)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        super().__init__(params, set_grad_none, lr=lr, eps=eps, weight_decay=weight_decay)

    @property
    def _decoupled(self) -> bool:
        return bool(self.adagrad_w_mode)

    def _update(self, group: ParamGroup, bucket: Bucket) -> None:
        adagrad_(bucket.params, bucket.grads, bucket.state["sum"], bucket.hyper)
