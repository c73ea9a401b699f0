"""The update rules that look at each layer's norms: LAMB and NovoGrad.

As in :mod:`ampcompat.optimizers._rules`; gradients come from ``usable`` there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat.optimizers._rules import Tensors, adam_direction, bias, blend_, decayed, descend_, root


def norms(tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """Norm of each tensor, in float32 at least, shape ``[len(tensors)]``, on their device."""
    half = tensors[0].dtype in (torch.float16, torch.bfloat16)
    # A float16 norm overflows at 65504 although every element is finite.
    each = _torch.foreach_norm(list(tensors), order, **({"dtype": torch.float32} if half else {}))
    return torch.stack(each)


def grad_norm(params: Iterable[Tensor], grad_scale: Tensor | None) -> Tensor:
    """L2 norm of all gradients together: 0-dim float32 (float64 if some are), on the device of the first; no sync."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in params:
        if param.grad is not None and param.numel():
            by_kind.setdefault((param.device, param.grad.dtype), []).append(param.grad)
    if not by_kind:
        return torch.zeros(())
    parts = [torch.linalg.vector_norm(norms(grads)) for grads in by_kind.values()]
    device = parts[0].device
    dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    norm: Tensor = torch.linalg.vector_norm(torch.stack([part.to(device, dtype, non_blocking=True) for part in parts]))
    if grad_scale is not None:
        norm = norm / grad_scale.to(norm.device, non_blocking=True)
    return norm


def clipped(grads: Tensors, norm: Tensor, max_norm: float | None) -> Tensors:
    """``grads`` scaled down so that what has norm ``norm`` has at most ``max_norm``; None or 0 leaves them."""
    if not max_norm or max_norm <= 0:
        return grads
    factor = torch.where(norm > max_norm, norm / max_norm, 1.0)
    return _torch.foreach_div(grads, factor.to(grads[0].device, grads[0].dtype))


def lamb_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    step: int | Tensor,
    bias_correction: bool,
    weight_decay: float,
    grad_averaging: bool,
    adam_w_mode: bool,
    global_grad_norm: Tensor,
    max_grad_norm: float | None,
    use_nvlamb: bool,
    found_inf: Tensor | None = None,
) -> None:
    """Adam's direction on globally clipped gradients, its length scaled to each layer's weights.

    The trust ratio ``norm(param) / norm(update)`` is 1 where one of the norms is 0 and, unless ``use_nvlamb``, in
    groups without weight decay (biases, normalisation layers).
    """
    beta1, beta2 = betas
    grads = clipped(grads, global_grad_norm, max_grad_norm)
    if not adam_w_mode:
        grads = decayed(grads, params, weight_decay)
    blend_(exp_avgs, grads, beta1, 1.0 - beta1 if grad_averaging else 1.0, found_inf)
    blend_(exp_avg_sqs, _torch.foreach_mul(grads, grads), beta2, 1.0 - beta2, found_inf)
    bias1, bias2 = (bias(beta1, step), bias(beta2, step)) if bias_correction else (1.0, 1.0)
    update = adam_direction(exp_avgs, exp_avg_sqs, eps, bias1, bias2, inside=False)
    update = decayed(update, params, weight_decay if adam_w_mode else 0.0)
    if use_nvlamb or weight_decay != 0.0:
        param_norms, update_norms = norms(params), norms(update)
        ratios = torch.where((param_norms != 0) & (update_norms != 0), param_norms / update_norms, 1.0)
        update = _torch.foreach_mul(update, list(ratios.unbind()))
    descend_(params, update, lr, found_inf)


NOT_YET = -1.0
"""NovoGrad's second moment before the first gradient, which is taken as it is."""


def novograd_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    norm_avgs: Tensors,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    step: int | Tensor,
    bias_correction: bool,
    weight_decay: float,
    grad_averaging: bool,
    reg_inside_moment: bool,
    norm_type: int,
    found_inf: Tensor | None = None,
) -> None:
    """Momentum on gradients divided by a running norm of their layer.

    ``norm_avgs`` holds one 0-dim running norm (not its square) a layer, or :data:`NOT_YET`. With ``norm_type`` 2 the
    squares are averaged, with 0 (the largest magnitude) the norms themselves.
    """
    beta1, beta2 = betas
    now = norms(grads, 2.0 if norm_type == 2 else math.inf)
    before = torch.stack(norm_avgs)
    kept = torch.where(before < 0, now, before)
    if norm_type == 2:
        running = torch.sqrt(beta2 * kept.square() + (1.0 - beta2) * now.square())
    else:
        running = beta2 * kept + (1.0 - beta2) * now
    if found_inf is not None:
        running = torch.where(found_inf != 0, before, running)
    _torch.foreach_copy_(norm_avgs, list(running.unbind()))

    bias1, bias2 = (bias(beta1, step), root(bias(beta2, step))) if bias_correction else (1.0, 1.0)
    denominator = running / bias2 + eps
    if found_inf is not None:
        denominator = torch.where(found_inf != 0, 1.0, denominator)  # nothing to divide by yet in a skipped first step
    denominators = list(denominator.unbind())
    weight = 1.0 - beta1 if grad_averaging else 1.0
    if reg_inside_moment:
        grads = decayed(_torch.foreach_div(grads, denominators), params, weight_decay)
    blend_(exp_avgs, grads, beta1, weight, found_inf)
    update: Tensors = _torch.foreach_div(exp_avgs, bias1)
    if not reg_inside_moment:
        _torch.foreach_div_(update, denominators)
        update = decayed(update, params, weight_decay)
    descend_(params, update, lr, found_inf)
