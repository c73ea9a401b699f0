"""The element-wise update rules: Adam, SGD, Adagrad.

Every rule takes lists of one dtype, device and layout (see :mod:`ampcompat.optimizers._working`), changes params and
state in place and never the gradients. ``found_inf`` (0-dim, 1.0 after an overflow) makes it a no-op without asking the
host: each coefficient is replaced by the one that changes nothing, and the gradients by zeros, as 0 · inf is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ampcompat import _torch

Tensors = tuple[Tensor, ...] | list[Tensor]


def gated(value: float | Tensor, no_op: float, found_inf: Tensor | None) -> float | Tensor:
    """``value``, or ``no_op`` after an overflow."""
    if found_inf is None:
        return value
    if not isinstance(value, Tensor):  # as_tensor would copy it to the device, which the host waits for
        value = torch.full((), value, dtype=torch.float32, device=found_inf.device)
    return torch.where(found_inf != 0, no_op, value)


def usable(grads: Tensors, grad_scale: Tensor | None, found_inf: Tensor | None) -> Tensors:
    """The gradients divided by ``grad_scale``, zeros after an overflow."""
    if grad_scale is not None:
        grads = _torch.foreach_div(grads, grad_scale.to(grads[0].dtype))
    if found_inf is not None:
        grads = [torch.where(found_inf != 0, 0.0, grad) for grad in grads]
    return grads


def bias(beta: float, step: int | Tensor) -> float | Tensor:
    """``1 - beta ** step`` for ``step`` counted from 1; on the device when ``step`` is there.

    ``expm1`` because in float32 the subtraction loses five of seven digits at beta 0.999. After a skipped first step
    the result is 0, and what is divided by it is thrown away by :func:`descend_`.
    """
    if beta == 0.0:
        return 1.0
    if isinstance(step, Tensor):
        return -torch.expm1(step * math.log(beta))
    return -math.expm1(step * math.log(beta))


def root(value: float | Tensor) -> float | Tensor:
    """Square root of a number on the host or on the device."""
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)


def blend_(average: Tensors, new: Tensors, decay: float, weight: float, found_inf: Tensor | None) -> None:
    """``average = decay * average + weight * new``."""
    _torch.foreach_mul_(average, gated(decay, 1.0, found_inf))
    _torch.foreach_add_(average, _torch.foreach_mul(new, gated(weight, 0.0, found_inf)))


def descend_(params: Tensors, update: Tensors, lr: float | Tensor, found_inf: Tensor | None) -> None:
    """``params -= lr * update``."""
    if found_inf is not None:
        update = [torch.where(found_inf != 0, 0.0, each) for each in update]
    _torch.foreach_sub_(params, _torch.foreach_mul(update, lr))


def decayed(update: Tensors, params: Tensors, weight_decay: float) -> Tensors:
    """``update + weight_decay * params``."""
    return _torch.foreach_add(update, params, alpha=weight_decay) if weight_decay else update


def adam_direction(
    exp_avgs: Tensors, exp_avg_sqs: Tensors, eps: float, bias1: float | Tensor, bias2: float | Tensor, inside: bool
) -> Tensors:
    """``m / bias1 / (sqrt(v / bias2) + eps)``; with ``inside`` the root is that of ``(v + eps) / bias2``."""
    if inside:
        denominator = _torch.foreach_add(exp_avg_sqs, eps)
        _torch.foreach_div_(denominator, bias2)
        _torch.foreach_sqrt_(denominator)
    else:
        denominator = _torch.foreach_div(exp_avg_sqs, bias2)
        _torch.foreach_sqrt_(denominator)
        _torch.foreach_add_(denominator, eps)
    direction = _torch.foreach_div(exp_avgs, bias1)
    _torch.foreach_div_(direction, denominator)
    return direction


def adam_(
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
    adam_w_mode: bool,
    eps_inside_sqrt: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Adam (weight decay added to the gradient) or, with ``adam_w_mode``, AdamW, by torch's fused kernel."""
    beta1, beta2 = betas
    device = params[0].device
    if _torch.has_fused_kernels(device) and not eps_inside_sqrt:
        kernel: Callable[..., None] = _torch.fused_adamw_ if adam_w_mode else _torch.fused_adam_
        # The kernel always corrects the bias; after infinitely many steps there is none.
        count = step if bias_correction else math.inf
        if not isinstance(count, Tensor):
            count = torch.full((), count, dtype=torch.float32, device=device)
        kernel(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [count] * len(params),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        return
    grads = usable(grads, grad_scale, found_inf)
    if not adam_w_mode:
        grads = decayed(grads, params, weight_decay)
    blend_(exp_avgs, grads, beta1, 1.0 - beta1, found_inf)
    blend_(exp_avg_sqs, _torch.foreach_mul(grads, grads), beta2, 1.0 - beta2, found_inf)
    bias1, bias2 = (bias(beta1, step), bias(beta2, step)) if bias_correction else (1.0, 1.0)
    update = adam_direction(exp_avgs, exp_avg_sqs, eps, bias1, bias2, eps_inside_sqrt)
    descend_(params, decayed(update, params, weight_decay if adam_w_mode else 0.0), lr, found_inf)


def sgd_(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    *,
    lr: float | Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    wd_after_momentum: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """SGD with momentum; ``momentum_buffers`` is empty without. By torch's fused kernel, whose rule is this one.

    ``wd_after_momentum`` adds the decay to the update instead of to the gradient. The first step of a param, whose
    buffer holds zeros, is one without dampening.
    """
    if _torch.has_fused_kernels(params[0].device) and not (wd_after_momentum and weight_decay):
        _torch.fused_sgd_(
            params,
            grads,
            momentum_buffers,
            weight_decay=weight_decay,
            momentum=momentum,
            lr=lr,
            dampening=dampening,
            nesterov=nesterov,
            maximize=False,
            is_first_step=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        return
    grads = usable(grads, grad_scale, found_inf)
    update = decayed(grads, params, 0.0 if wd_after_momentum else weight_decay)
    if momentum:
        blend_(momentum_buffers, update, momentum, 1.0 - dampening, found_inf)
        update = _torch.foreach_add(update, momentum_buffers, alpha=momentum) if nesterov else momentum_buffers
    descend_(params, decayed(update, params, weight_decay if wd_after_momentum else 0.0), lr, found_inf)


def adagrad_(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    *,
    lr: float | Tensor,
    eps: float,
    weight_decay: float,
    adagrad_w_mode: bool,
    found_inf: Tensor | None = None,
) -> None:
    """Adagrad; with ``adagrad_w_mode`` the weight decay is decoupled. Gradients come from :func:`usable`."""
    if not adagrad_w_mode:
        grads = decayed(grads, params, weight_decay)
    blend_(sums, _torch.foreach_mul(grads, grads), 1.0, 1.0, found_inf)
    denominator = _torch.foreach_sqrt(sums)
    _torch.foreach_add_(denominator, eps)
    update = _torch.foreach_div(grads, denominator)
    descend_(params, decayed(update, params, weight_decay if adagrad_w_mode else 0.0), lr, found_inf)
