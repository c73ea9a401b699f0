"""Update rules of optimizers on bare lists of tensors, by the names of apex's extension."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat.multi_tensor_apply import _layerwise, _rules
from ampcompat.multi_tensor_apply._rules import Hyper
from ampcompat.multi_tensor_apply._working import WorkingCopies
from ampcompat.multi_tensor_apply.arithmetic import Lists, check


@contextmanager
def _lent(tensor_lists: Lists, count: int, op: str) -> Iterator[list[list[Tensor]]]:
    """Lend working copies of ``tensor_lists`` (gradients, params, state), laid out as the params, and write back."""
    check(tensor_lists, count, op)
    copies = WorkingCopies()
    params = copies.params(tensor_lists[1])
    grads = copies.lend(tensor_lists[0], like=params)
    state = [copies.lend(tensors, like=params, changes=True) for tensors in tensor_lists[2:]]
    yield [grads, params, *state]
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
    with _lent(tensor_lists, 4, "multi_tensor_adam") as (grads, params, exp_avgs, exp_avg_sqs):
        if params:
            _rules.adam_(params, grads, exp_avgs, exp_avg_sqs, hyper)


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
    """Apply SGD to ``[grads, params, momentum_buffers]``, gradients times ``scale``; nothing where the flag is set.

    A fourth list gets the params in its own dtype. On a first run the buffers' values do not matter.
    Reproduces ``csrc/multi_tensor_sgd_kernel.cu: multi_tensor_sgd_cuda``.
    """
    check(tensor_lists, 4 if len(tensor_lists) == 4 else 3, "multi_tensor_sgd")
    hyper = Hyper(
        lr,
        weight_decay,
        momentum=momentum,
        dampening=0.0 if first_run else dampening,
        nesterov=nesterov,
        decoupled=bool(wd_after_momentum),
        found_inf=noop_flag.reshape(()).to(torch.float32),
    )
    with _lent(tensor_lists[:3], 3, "multi_tensor_sgd") as (grads, params, buffers):
        if not params:
            return
        if first_run and momentum:
            _torch.foreach_copy_(buffers, _rules.zeroed(buffers, noop_flag.reshape(()) == 0))
        scaled = grads if scale == 1.0 else _torch.foreach_mul(grads, scale)
        _rules.sgd_(params, scaled, buffers if momentum else [], hyper)
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
    """Apply Adagrad to ``[grads, params, sums]``; ``mode`` 1 decouples the weight decay.

    Reproduces ``csrc/multi_tensor_adagrad.cu: multi_tensor_adagrad_cuda``.
    """
    with _lent(tensor_lists, 3, "multi_tensor_adagrad") as (grads, params, sums):
        if params:
            _rules.adagrad_(params, grads, sums, Hyper(lr, weight_decay, eps=epsilon, decoupled=bool(mode)))


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
    """Apply LAMB to ``[grads, params, exp_avgs, exp_avg_sqs]``; ``mode`` 1 decouples the weight decay.

    Reproduces ``csrc/multi_tensor_lamb.cu: multi_tensor_lamb_cuda``, which left its update in the gradients' memory:
    here it is rounded to their dtype, and the gradients stay.
    """
    hyper = Hyper(
        lr,
        weight_decay,
        eps=epsilon,
        betas=(beta1, beta2),
        step=step,
        bias_correction=bool(bias_correction),
        grad_averaging=bool(grad_averaging),
        decoupled=bool(mode),
    )
    with _lent(tensor_lists, 4, "multi_tensor_lamb") as (grads, params, exp_avgs, exp_avg_sqs):
        if params:
            _layerwise.lamb_(
                params,
                grads,
                exp_avgs,
                exp_avg_sqs,
                hyper,
                global_grad_norm=global_grad_norm.reshape(()),
                max_grad_norm=max_grad_norm,
                use_nvlamb=use_nvlamb,
                update_dtypes=[grad.dtype for grad in tensor_lists[0]],
            )


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    per_tensor_decay: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: float | Tensor,
    max_global_grad_norm: float,
) -> None:
    """Compute LAMB's update from ``[grads, params, exp_avgs, exp_avg_sqs, updates]``; moments and updates are written.

    Reproduces ``csrc/multi_tensor_lamb_stage_1.cu``.

    Args:
        chunk_size: Without effect.
        noop_flag: Without effect: infs and NaNs go through, as in apex.
        tensor_lists: The lists; ``updates`` gets what :func:`multi_tensor_lamb_stage2_cuda` takes, in its own dtype.
        per_tensor_decay: Decoupled weight decay of each param, ``[n]``.
        step: Steps before this one: the moments are corrected for ``step + 1``.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: Added to the denominator.
        global_grad_norm: Norm of all gradients; a tensor of one element stays on its device.
        max_global_grad_norm: Clip the gradients together to this norm.
    """
    hyper = Hyper(0.0, eps=epsilon, betas=(beta1, beta2), step=step + 1)
    with _lent(tensor_lists, 5, "multi_tensor_lamb_stage1_cuda") as (grads, params, exp_avgs, exp_avg_sqs, updates):
        if not params:
            return
        device = params[0].device
        if isinstance(global_grad_norm, Tensor):
            norm = global_grad_norm.reshape(()).to(device, torch.float32, non_blocking=True)
        else:
            norm = torch.full((), global_grad_norm, dtype=torch.float32, device=device)
        grads = list(_layerwise.clipped(grads, norm, max_global_grad_norm))
        directions = _rules.adam_update_(params, grads, exp_avgs, exp_avg_sqs, hyper)
        decays = per_tensor_decay.to(device, non_blocking=True).unbind()
        _torch.foreach_copy_(updates, _torch.foreach_add(directions, _torch.foreach_mul(params, list(decays))))


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    learning_rate: float,
    weight_decay: float | None = None,
    use_nvlamb: bool | None = False,
) -> None:
    """Step ``[params, updates]`` by LAMB's trust ratios.

    Reproduces ``csrc/multi_tensor_lamb_stage_2.cu``.

    Args:
        chunk_size: Without effect.
        noop_flag: Without effect, as for stage 1.
        tensor_lists: The lists; params are written.
        per_tensor_param_norm: Norms of the params, ``[n]``, as :func:`multi_tensor_l2norm` gives them.
        per_tensor_update_norm: Norms of the updates, ``[n]``.
        learning_rate: Learning rate.
        weight_decay: With 0 there is no trust ratio, unless ``use_nvlamb``. Left out, as by callers from before apex
            had this argument, there is.
        use_nvlamb: Use the trust ratio whatever ``weight_decay`` is.
    """
    check(tensor_lists, 2, "multi_tensor_lamb_stage2_cuda")
    with _lent([tensor_lists[1], tensor_lists[0]], 2, "multi_tensor_lamb_stage2_cuda") as (updates, params):
        if not params:
            return
        update: _torch.Tensors = updates
        if use_nvlamb or weight_decay is None or weight_decay != 0.0:
            ratios = _layerwise.trust_ratios(per_tensor_param_norm, per_tensor_update_norm)
            update = _torch.foreach_mul(update, list(ratios.to(params[0].device, non_blocking=True).unbind()))
        _rules.descend_(params, update, learning_rate, None)


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
    """Apply NovoGrad to ``[grads, params, exp_avgs]`` and the running norms ``[n]``; ``moment_mode`` 0 decays inside.

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
        decoupled=moment_mode != 0,
    )
    with _lent(tensor_lists, 3, "multi_tensor_novograd") as (grads, params, exp_avgs):
        if params:
            _layerwise.novograd_(params, grads, exp_avgs, list(grad_norms.unbind()), hyper, norm_type=norm_type)
