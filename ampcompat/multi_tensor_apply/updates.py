"""Update rules of optimizers on bare lists of tensors, by the names of apex's extension.

``noop_flag`` is looked at where a function says so; elsewhere infs and NaNs go through to the params, as in apex.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat.multi_tensor_apply import _layerwise, _rules
from ampcompat.multi_tensor_apply._rules import Hyper
from ampcompat.multi_tensor_apply.lists import Lists, is_set, lent, parallel, write_unless


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Apply Adam to ``[grads, params, exp_avgs, exp_avg_sqs]``; ``mode`` 1 is AdamW.

    Reproduces ``csrc/multi_tensor_adam.cu: multi_tensor_adam_cuda``.
    """
    hyper = Hyper(
        lr,
        weight_decay,
        eps=epsilon,
        betas=(beta1, beta2),
        step=step,
        bias_correction=bool(bias_correction),
        decoupled=bool(mode),
    )
    with lent(tensor_lists, 4, "amp_C.multi_tensor_adam") as (grads, params, exp_avgs, exp_avg_sqs):
        if params:
            _rules.adam_(params, grads, exp_avgs, exp_avg_sqs, hyper)


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Apply SGD to ``[grads, params, momentum_buffers]``, gradients times ``scale``; nothing where the flag is set.

    A fourth list gets the params in its own dtype. On a first run the buffers' values do not matter.
    Reproduces ``csrc/multi_tensor_sgd_kernel.cu: multi_tensor_sgd_cuda``.
    """
    has_copies = len(tensor_lists) == 4
    lists = parallel(tensor_lists, 4 if has_copies else 3, "amp_C.multi_tensor_sgd")
    params = lists[1]
    if not params:
        return
    skips = is_set(noop_flag, params[0].device)
    hyper = Hyper(
        lr,
        wd,
        momentum=momentum,
        dampening=0.0 if first_run else dampening,
        nesterov=nesterov,
        decoupled=bool(wd_after_momentum),
        found_inf=skips.to(torch.float32),
    )
    with lent(lists[:3], 3, "amp_C.multi_tensor_sgd") as (grads, working, buffers):
        if first_run and momentum:
            _torch.foreach_copy_(buffers, _rules.zeroed(buffers, skips.logical_not()))
        scaled = grads if scale == 1.0 else _torch.foreach_mul(grads, scale)
        _rules.sgd_(working, scaled, buffers if momentum else [], hyper)
    if has_copies:
        write_unless(skips, targets=lists[3], values=working)


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Apply Adagrad to ``[grads, params, sums]``; ``mode`` 1 decouples the weight decay.

    Reproduces ``csrc/multi_tensor_adagrad.cu: multi_tensor_adagrad_cuda``.
    """
    with lent(tensor_lists, 3, "amp_C.multi_tensor_adagrad") as (grads, params, sums):
        if params:
            _rules.adagrad_(params, grads, sums, Hyper(lr, weight_decay, eps=epsilon, decoupled=bool(mode)))


@torch.no_grad()
def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """Apply NovoGrad to ``[grads, params, exp_avgs]`` and the running norms ``[n]``; ``mode`` 0 decays inside.

    Reproduces ``csrc/multi_tensor_novograd.cu: multi_tensor_novograd_cuda``.
    """
    hyper = Hyper(
        lr,
        weight_decay,
        eps=epsilon,
        betas=(beta1, beta2),
        step=step,
        bias_correction=bool(bias_correction),
        grad_averaging=bool(grad_averaging),
        decoupled=mode != 0,
    )
    with lent(tensor_lists, 3, "amp_C.multi_tensor_novograd") as (grads, params, exp_avgs):
        if params:
            _layerwise.novograd_(params, grads, exp_avgs, list(grad_norms.unbind()), hyper, norm_type=norm_type)
