"""Update rules of optimizers on bare lists of tensors, by the names of apex's extension."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat.multi_tensor_apply.arithmetic import Lists, check
from ampcompat.optimizers import _layerwise, _rules
from ampcompat.optimizers._working import WorkingCopies


@contextmanager
def _lent(tensor_lists: Lists, count: int, op: str) -> Iterator[list[list[Tensor]]]:
    """Working copies of ``tensor_lists`` (gradients, params, state), laid out as the params, and written back."""
    check(tensor_lists, count, op)
    copies = WorkingCopies()
    params = copies.params(tensor_lists[1])
    yield [
        params if i == 1 else copies.lend(tensors, like=params, changes=i > 1) for i, tensors in enumerate(tensor_lists)
    ]
    copies.write_back()


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
    """Adam on ``[grads, params, exp_avgs, exp_avg_sqs]``; ``mode`` 1 is AdamW."""
    with _lent(tensor_lists, 4, "multi_tensor_adam") as (grads, params, exp_avgs, exp_avg_sqs):
        if params:
            _rules.adam_(
                params,
                grads,
                exp_avgs,
                exp_avg_sqs,
                lr=lr,
                betas=(beta1, beta2),
                eps=epsilon,
                step=step,
                bias_correction=bool(bias_correction),
                weight_decay=weight_decay,
                adam_w_mode=bool(mode),
            )


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """SGD on ``[grads, params, momentum_buffers]``, gradients multiplied by ``scale``; nothing where the flag is set.

    A fourth list gets the params in its own dtype. On a first run the buffers' values do not matter.
    """
    check(tensor_lists, 4 if len(tensor_lists) == 4 else 3, "multi_tensor_sgd")
    found_inf = noop_flag.reshape(()).to(torch.float32)
    with _lent(tensor_lists[:3], 3, "multi_tensor_sgd") as (grads, params, buffers):
        if not params:
            return
        if first_run and momentum:
            _torch.foreach_copy_(buffers, [torch.where(found_inf != 0, buffer, 0.0) for buffer in buffers])
        _rules.sgd_(
            params,
            grads if scale == 1.0 else _torch.foreach_mul(grads, scale),
            buffers if momentum else [],
            lr=lr,
            momentum=momentum,
            dampening=0.0 if first_run else dampening,
            weight_decay=weight_decay,
            nesterov=bool(nesterov),
            wd_after_momentum=bool(wd_after_momentum),
            found_inf=found_inf,
        )
    if len(tensor_lists) == 4:
        _torch.foreach_copy_(list(tensor_lists[3]), params)


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
    """Adagrad on ``[grads, params, sums]``; ``mode`` 1 decouples the weight decay."""
    with _lent(tensor_lists, 3, "multi_tensor_adagrad") as (grads, params, sums):
        if params:
            _rules.adagrad_(
                params, grads, sums, lr=lr, eps=epsilon, weight_decay=weight_decay, adagrad_w_mode=bool(mode)
            )


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool = False,
) -> None:
    """LAMB on ``[grads, params, exp_avgs, exp_avg_sqs]``; ``mode`` 1 decouples the weight decay."""
    with _lent(tensor_lists, 4, "multi_tensor_lamb") as (grads, params, exp_avgs, exp_avg_sqs):
        if params:
            _layerwise.lamb_(
                params,
                grads,
                exp_avgs,
                exp_avg_sqs,
                lr=lr,
                betas=(beta1, beta2),
                eps=epsilon,
                step=step,
                bias_correction=bool(bias_correction),
                weight_decay=weight_decay,
                grad_averaging=bool(grad_averaging),
                adam_w_mode=bool(mode),
                global_grad_norm=global_grad_norm.reshape(()),
                max_grad_norm=max_grad_norm,
                use_nvlamb=use_nvlamb,
            )


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
    moment_mode: int,
    norm_type: int,
) -> None:
    """NovoGrad on ``[grads, params, exp_avgs]`` and the running norms ``[n]``; ``moment_mode`` 0 decays inside."""
    with _lent(tensor_lists, 3, "multi_tensor_novograd") as (grads, params, exp_avgs):
        if params:
            _layerwise.novograd_(
                params,
                grads,
                exp_avgs,
                list(grad_norms.unbind()),
                lr=lr,
                betas=(beta1, beta2),
                eps=epsilon,
                step=step,
                bias_correction=bool(bias_correction),
                weight_decay=weight_decay,
                grad_averaging=bool(grad_averaging),
                reg_inside_moment=moment_mode == 0,
                norm_type=norm_type,
            )
