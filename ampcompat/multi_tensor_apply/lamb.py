"""LAMB on bare lists of tensors, by the names of apex's extension: in one call, in two stages, with half copies."""

from __future__ import annotations

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat.multi_tensor_apply import _layerwise, _rules
from ampcompat.multi_tensor_apply._rules import Hyper
from ampcompat.multi_tensor_apply.lists import Lists, is_set, lent, number_on, parallel, write_unless


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
    global_grad_norm: float | Tensor,
    max_grad_norm: float,
    use_nvlamb_python: bool | None = False,
) -> None:
    """Apply LAMB to ``[grads, params, exp_avgs, exp_avg_sqs]``; ``mode`` 1 decouples the weight decay.

    ``global_grad_norm`` is a tensor of one element, or a number, as in apex before 2020.
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
    with lent(tensor_lists, 4, "amp_C.multi_tensor_lamb") as (grads, params, exp_avgs, exp_avg_sqs):
        if params:
            _layerwise.lamb_(
                params,
                grads,
                exp_avgs,
                exp_avg_sqs,
                hyper,
                global_grad_norm=number_on(params[0].device, global_grad_norm),
                max_grad_norm=max_grad_norm,
                use_nvlamb=bool(use_nvlamb_python),
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
    with lent(tensor_lists, 5, "amp_C.multi_tensor_lamb_stage1_cuda") as (
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        updates,
    ):
        if not params:
            return
        device = params[0].device
        norm = number_on(device, global_grad_norm)
        grads = list(_layerwise.clipped(grads, norm, max_global_grad_norm))
        directions = _rules.adam_update_(params, grads, exp_avgs, exp_avg_sqs, hyper)
        decays = _torch.moved_to(device, per_tensor_decay).unbind()
        _torch.foreach_copy_(updates, _torch.foreach_add(directions, _torch.foreach_mul(params, list(decays))))


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: float,
    weight_decay: float | None = None,
    use_nvlamb_python: bool | None = False,
) -> None:
    """Step ``[params, updates]`` by LAMB's trust ratios.

    Reproduces ``csrc/multi_tensor_lamb_stage_2.cu``.

    Args:
        chunk_size: Without effect.
        noop_flag: Without effect, as for stage 1.
        tensor_lists: The lists; params are written.
        per_tensor_param_norm: Norms of the params, ``[n]``, as :func:`multi_tensor_l2norm` gives them.
        per_tensor_update_norm: Norms of the updates, ``[n]``.
        lr: Learning rate.
        weight_decay: With 0 there is no trust ratio, unless ``use_nvlamb_python``. Left out, as by callers from before
            apex had this argument, there is.
        use_nvlamb_python: Use the trust ratio whatever ``weight_decay`` is.
    """
    op = "amp_C.multi_tensor_lamb_stage2_cuda"
    given_params, given_updates = parallel(tensor_lists, 2, op)
    with lent([given_updates, given_params], 2, op) as (updates, params):
        if not params:
            return
        update: _torch.Tensors = updates
        if use_nvlamb_python or weight_decay is None or weight_decay != 0.0:
            ratios = _layerwise.trust_ratios(per_tensor_param_norm, per_tensor_update_norm)
            update = _torch.foreach_mul(update, list(_torch.moved_to(params[0].device, ratios).unbind()))
        _rules.descend_(params, update, lr, None)


@torch.no_grad()
def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: Tensor,
    use_nvlamb_python: bool | None,
    found_inf: Tensor,
    inv_scale: Tensor,
) -> None:
    """Apply LAMB to ``[grads, params, exp_avgs, exp_avg_sqs]`` with numbers that are on the device.

    A fifth list gets the params in its own dtype. Where ``noop_flag`` or ``found_inf`` is set, nothing is written.
    Reproduces ``csrc/multi_tensor_lamb_mp.cu: multi_tensor_lamb_mp_cuda``, but for the gradients, which stay.

    Args:
        chunk_size: Without effect.
        noop_flag: Skips the step where it is set.
        tensor_lists: The lists.
        lr: Learning rate; one element, as all tensors below.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        epsilon: Added to the denominator.
        step: This step's number, from 1.
        bias_correction: Whether to correct the moments for their start at zero.
        weight_decay: Weight decay.
        grad_averaging: Whether to weigh the gradient by ``1 - beta1`` in the first moment.
        mode: 1 decouples the weight decay.
        global_grad_norm: Norm of all gradients as they are, the scale included.
        max_grad_norm: Clip the gradients together to this norm, which is compared with ``global_grad_norm``.
        use_nvlamb_python: Use the trust ratio without weight decay too.
        found_inf: Skips the step where it is not 0.
        inv_scale: What the gradients are multiplied by.
    """
    has_copies = len(tensor_lists) == 5
    lists = parallel(tensor_lists, 5 if has_copies else 4, "amp_C.multi_tensor_lamb_mp")
    params = lists[1]
    if not params:
        return
    device = params[0].device
    skips = is_set(noop_flag, device) | is_set(found_inf, device)
    norm = number_on(device, global_grad_norm)
    max_norm = number_on(device, max_grad_norm)
    factor = number_on(device, inv_scale) / torch.where(norm > max_norm, norm / max_norm, 1.0)
    hyper = Hyper(
        number_on(device, lr),
        weight_decay,
        eps=epsilon,
        betas=(beta1, beta2),
        step=number_on(device, step),
        bias_correction=bool(bias_correction),
        grad_averaging=bool(grad_averaging),
        decoupled=bool(mode),
        found_inf=skips.to(torch.float32),
    )
    with lent(lists[:4], 4, "amp_C.multi_tensor_lamb_mp") as (grads, working, exp_avgs, exp_avg_sqs):
        scaled = _torch.foreach_mul(grads, factor.to(grads[0].dtype))
        _layerwise.lamb_(
            working,
            _rules.usable(scaled, None, hyper.found_inf),
            exp_avgs,
            exp_avg_sqs,
            hyper,
            global_grad_norm=norm,
            max_grad_norm=None,
            use_nvlamb=bool(use_nvlamb_python),
            update_dtypes=[grad.dtype for grad in lists[0]],
        )
    if has_copies:
        write_unless(skips, targets=lists[4], values=working)
