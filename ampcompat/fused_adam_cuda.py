"""``fused_adam_cuda``: what scripts call of apex's contributed extension, on torch's foreach kernels.

Copies of apex's contributed ``FusedAdam`` call :func:`adam` (fairseq, OpenNMT-py) and, with ``use_mt=True``,
:func:`adam_mt`. The rest of the extension served apex's distributed optimizers alone.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat.multi_tensor_apply._rules import Hyper, contributed_adam_
from ampcompat.multi_tensor_apply.lists import Lists, lent, parallel

__all__ = ["adam", "adam_mt"]

EPS_INSIDE_SQRT = 0
"""``mode`` with ``eps`` under the root; any other adds it to the root."""


@torch.no_grad()
def adam(
    p: Tensor,
    p_copy: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float | Tensor,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """Apply Adam to one parameter, in place. Nothing synchronises with the host.

    Reproduces ``apex/contrib/csrc/optimizers/fused_adam_cuda_kernel.cu: fused_adam_cuda``: the weight decay is added to
    the update, and the bias corrections are part of the learning rate. It is computed in float32 (float64 for a float64
    parameter) and rounded once, where it is stored; apex's took no half ``p``.

    Args:
        p: The parameter, of any floating dtype.
        p_copy: Gets the new values in its own dtype; an empty tensor for no copy. It may be ``p``.
        m: Its first moment, like ``p``.
        v: Its second moment, like ``p``.
        g: The gradient, of any floating dtype, multiplied by ``grad_scale``. It stays.
        lr: Learning rate.
        beta1: Decay of ``m``.
        beta2: Decay of ``v``.
        eps: Added to the denominator: under its root where ``mode`` is 0, otherwise outside.
        grad_scale: What ``g`` is divided by.
        step: This step's number, from 1.
        mode: Where ``eps`` goes.
        bias_correction: Whether to correct the moments for their start at zero.
        decay: Weight decay.

    Raises:
        RuntimeError: The tensors differ in shape or device; nothing has been changed then.
    """
    copies = [[p_copy]] if p_copy.numel() else []
    numbers = (lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay)
    _update("fused_adam_cuda.adam", [[p], [m], [v], [g], *copies], *numbers)


@torch.no_grad()
def adam_mt(
    chunk_size: int,
    overflow_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float | Tensor,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    """Apply :func:`adam` to the lists ``[p, m, v, g]`` or ``[p, m, v, g, p_copy]``; the copies come last here.

    ``chunk_size`` and ``overflow_flag`` are without effect.
    Reproduces ``apex/contrib/csrc/optimizers/fused_adam_cuda_kernel.cu: fused_adam_cuda_mt``.

    Raises:
        RuntimeError: The lists are not parallel, or not on one device; nothing has been changed then.
    """
    numbers = (lr, beta1, beta2, eps, grad_scale, step, mode, bias_correction, decay)
    _update("fused_adam_cuda.adam_mt", tensor_lists, *numbers)


def _update(
    op: str,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: float | Tensor,
    step: int,
    mode: int,
    bias_correction: int,
    decay: float,
) -> None:
    has_copies = len(tensor_lists) == 5
    lists = parallel(tensor_lists, 5 if has_copies else 4, op)
    params, exp_avgs, exp_avg_sqs, grads = lists[:4]
    if not params:
        return
    hyper = Hyper(lr, decay, eps=eps, betas=(beta1, beta2), step=step, bias_correction=bool(bias_correction))
    with lent([grads, params, exp_avgs, exp_avg_sqs], 4, op) as (working_grads, new_params, first, second):
        contributed_adam_(
            new_params,
            working_grads,
            first,
            second,
            hyper,
            eps_inside_sqrt=mode == EPS_INSIDE_SQRT,
            grad_scale=grad_scale,
        )
    if has_copies:
        _torch.foreach_copy_(lists[4], new_params)


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"fused_adam_cuda.{name} - ampcompat does not supply it - use ampcompat.optimizers.FusedAdam instead."
    )
