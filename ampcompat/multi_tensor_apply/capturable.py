"""Adam on bare lists of tensors with numbers that are on the device, by the names of apex's extension.

A CUDA graph of such a call reads them anew in each replay. Where ``noop_flag`` is set, nothing is written. Otherwise
the gradients are multiplied by ``inv_scale`` in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat.multi_tensor_apply import _rules
from ampcompat.multi_tensor_apply._rules import Hyper
from ampcompat.multi_tensor_apply._working import WorkingCopies
from ampcompat.multi_tensor_apply.lists import Lists, is_set, lent, parallel, write_unless


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
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

    ``lr``, ``step`` (this step's number, from 1) and ``inv_scale`` are tensors of one element.
    Reproduces ``csrc/multi_tensor_adam.cu: multi_tensor_adam_capturable_cuda``.
    """
    lists = parallel(tensor_lists, 4, "amp_C.multi_tensor_adam_capturable")
    if not lists[1]:
        return
    device = lists[1][0].device
    skips = is_set(noop_flag, device)
    _unscale_(lists[0], inv_scale, skips)
    hyper = Hyper(
        lr.reshape(()).to(device, non_blocking=True),
        weight_decay,
        eps=epsilon,
        betas=(beta1, beta2),
        step=step.reshape(()).to(device, torch.float32, non_blocking=True),
        bias_correction=bool(bias_correction),
        decoupled=bool(mode),
        found_inf=skips.to(torch.float32),
    )
    with lent(lists, 4, "amp_C.multi_tensor_adam_capturable") as (grads, params, exp_avgs, exp_avg_sqs):
        _rules.adam_(params, grads, exp_avgs, exp_avg_sqs, hyper)


@torch.no_grad()
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
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


def _unscale_(grads: list[Tensor], inv_scale: Tensor, skips: Tensor) -> None:
    """Multiply ``grads`` by ``inv_scale`` in place, in float32, unless ``skips`` is set."""
    factor = inv_scale.reshape(()).to(skips.device, torch.float32, non_blocking=True)
    factor = torch.where(skips, 1.0, factor)
    copies = WorkingCopies()
    wide = copies.params(grads)
    _torch.foreach_mul_(wide, factor.to(wide[0].dtype))
    copies.write_back()
