"""Adam on bare lists of tensors with numbers that are on the device, by the names of apex's extension.

A CUDA graph of such a call reads them anew in each replay. Where ``noop_flag`` is set, nothing is written. Otherwise
the gradients are multiplied by ``inv_scale``: the step uses the products in float32, and gets them rounded in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat.multi_tensor_apply import _rules
from ampcompat.multi_tensor_apply._rules import Hyper
from ampcompat.multi_tensor_apply.lists import Lists, is_set, lent, number_on, parallel, write_unless


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """Apply Adam to ``[grads, params, exp_avgs, exp_avg_sqs]``; ``mode`` 1 is AdamW.

    ``step`` (this step's number, from 1) and ``inv_scale`` are tensors of one element; ``lr`` may be a number, since
    that is what ``group["lr"]`` of ``FusedAdam(capturable=True)`` is.
    Reproduces ``csrc/multi_tensor_adam.cu: multi_tensor_adam_capturable_cuda``.
    """
    op = "amp_C.multi_tensor_adam_capturable"
    with lent(tensor_lists, 4, op, grads_change=True) as (grads, params, exp_avgs, exp_avg_sqs):
        if not params:
            return
        device = params[0].device
        skips = is_set(noop_flag, device)
        factor = torch.where(skips, 1.0, number_on(device, inv_scale))
        _torch.foreach_mul_(grads, factor.to(grads[0].dtype))
        hyper = Hyper(
            number_on(device, lr),
            weight_decay,
            eps=epsilon,
            betas=(beta1, beta2),
            step=number_on(device, step),
            bias_correction=bool(bias_correction),
            decoupled=bool(mode),
            found_inf=skips.to(torch.float32),
        )
        _rules.adam_(params, grads, exp_avgs, exp_avg_sqs, hyper)


@torch.no_grad()
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """Apply Adam to the masters of ``[grads, params, exp_avgs, exp_avg_sqs, masters]``, and round them into the params.

    The rest is as in :func:`multi_tensor_adam_capturable`.
    Reproduces ``csrc/multi_tensor_adam.cu: multi_tensor_adam_capturable_master_cuda``.
    """
    lists = parallel(tensor_lists, 5, "amp_C.multi_tensor_adam_capturable_master")
    grads, params, exp_avgs, exp_avg_sqs, masters = lists
    numbers = (lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale)
    multi_tensor_adam_capturable(chunk_size, noop_flag, [grads, masters, exp_avgs, exp_avg_sqs], *numbers)
    if params:
        write_unless(is_set(noop_flag, params[0].device), targets=params, values=masters)
