"""The contributed ``FusedLAMB``."""

from __future__ import annotations

from torch import Tensor

from ampcompat import optimizers
from ampcompat._types import Params

__all__ = ["FusedLAMB"]


class FusedLAMB(optimizers.FusedLAMB):
    """Run :class:`ampcompat.optimizers.FusedLAMB` with the trust ratio in every group, also without weight decay.

    Reproduces ``apex/contrib/optimizers/fused_lamb.py: FusedLAMB``, whose kernel is from before ``use_nvlamb``.

    Args:
        params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, grad_averaging, set_grad_none,
            max_grad_norm: As there.

    Raises:
        RuntimeError: ``amsgrad=True``.
    """

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
    ) -> None:
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            set_grad_none,
            max_grad_norm,
            use_nvlamb=True,
        )
