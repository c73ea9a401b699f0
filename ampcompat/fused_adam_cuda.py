"""``fused_adam_cuda``: the ``adam`` of apex's extension, which scripts call directly (fairseq does), on torch's ops."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

__all__ = ["adam"]


@torch.no_grad()
def adam(
    p: Tensor,
    m: Tensor,
    v: Tensor,
    p_copy: Tensor,
    g: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """Apply Adam to one parameter, in place. Nothing synchronises with the host.

    Reproduces ``csrc/fused_adam_cuda_kernel.cu: fused_adam_cuda``: the weight decay is added to the update, and the
    bias corrections are part of the learning rate.

    Args:
        p: The parameter, float32.
        m: Its first moment, like ``p``.
        v: Its second moment, like ``p``.
        p_copy: Gets the new values in its own dtype; an empty tensor for no copy.
        g: The gradient, of any floating dtype, multiplied by ``grad_scale``. It stays.
        lr: Learning rate.
        beta1: Decay of ``m``.
        beta2: Decay of ``v``.
        eps: Added to the denominator: under its root where ``mode`` is 0, else outside.
        grad_scale: What ``g`` is divided by.
        step: This step's number, from 1.
        mode: Where ``eps`` goes.
        bias_correction: Whether to correct the moments for their start at zero.
        decay: Weight decay.
    """
    grad = g.float() / grad_scale
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    eps_is_under_the_root = mode == 0
    denominator = (v + eps).sqrt_() if eps_is_under_the_root else v.sqrt().add_(eps)
    update = (m / denominator).add_(p, alpha=decay)
    if bias_correction:
        lr = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    p.sub_(update, alpha=lr)
    if p_copy.numel():
        p_copy.copy_(p)


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"fused_adam_cuda.{name} - ampcompat does not supply it - use ampcompat.optimizers.FusedAdam instead."
    )
