"""The element-wise update rules: Adam, SGD, Adagrad.

Every rule takes lists of one dtype, device and layout (see :mod:`._working`), changes params and
state in place and never the gradients. ``found_inf`` (0-dim, 1.0 after an overflow) makes it a no-op without asking the
host: each coefficient is replaced by the one that changes nothing, and the gradients by zeros (:func:`zeroed`). How
many kernels are launched does not depend on the number of params, but for torch's limit of some dozens a launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat._torch import Tensors
from ampcompat._types import ParamGroup


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of one update, by their names in apex's param groups; each rule reads those that it has.

    Attributes:
        step: The count with this step in it: an int, or 0-dim float32 on the device of the params.
        decoupled: Add the weight decay to the update; False adds it to the gradient (L2). apex's ``adam_w_mode``,
            ``adagrad_w_mode`` and ``wd_after_momentum``, and the opposite of ``reg_inside_moment``.
        found_inf: 0-dim float32, 1 after an overflow; or None.
    """

    lr: float | Tensor
    weight_decay: float = 0.0
    eps: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    step: int | Tensor = 1
    bias_correction: bool = True
    grad_averaging: bool = True
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    decoupled: bool = False
    found_inf: Tensor | None = None

    @classmethod
    def of(cls, group: ParamGroup, **more: object) -> Hyper:
        """Take the hyperparameters of a param group; ``more`` wins."""
        return cls(**{**{name: group[name] for name in _NAMES if name in group}, **more})

    @property
    def new_weight(self) -> float:
        """Weight of the gradient in the first moment."""
        return 1.0 - self.betas[0] if self.grad_averaging else 1.0

    def biases(self) -> tuple[float | Tensor, float | Tensor]:
        """Return the corrections of both moments for their start at zero: ``1 - beta ** step``, or 1 without one."""
        if not self.bias_correction:
            return 1.0, 1.0
        return bias(self.betas[0], self.step), bias(self.betas[1], self.step)

    def decayed_grads(self, grads: Tensors, params: Tensors) -> Tensors:
        """Add the weight decay to ``grads``, where it belongs there."""
        return grads if self.decoupled else decayed(grads, params, self.weight_decay)

    def decayed_update(self, update: Tensors, params: Tensors) -> Tensors:
        """Add the weight decay to ``update``, where it belongs there."""
        return decayed(update, params, self.weight_decay) if self.decoupled else update


def of_moments(
    lr: float | Tensor, bias_correction: bool, betas: tuple[float, float], eps: float, weight_decay: float
) -> dict[str, object]:
    """Name the hyperparameters that Adam, LAMB and NovoGrad share, in the order of apex's param groups."""
    return {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}


_NAMES = frozenset(field.name for field in fields(Hyper))


def gated(value: float | Tensor, no_op: float, found_inf: Tensor | None) -> float | Tensor:
    """Return ``value``, or ``no_op`` after an overflow."""
    if found_inf is None:
        return value
    if not isinstance(value, Tensor):  # as_tensor would copy it to the device: a host sync
        value = torch.full((), value, dtype=torch.float32, device=found_inf.device)
    return torch.where(found_inf != 0, no_op, value)


def usable(grads: Tensors, grad_scale: Tensor | None, found_inf: Tensor | None) -> Tensors:
    """Return the gradients divided by ``grad_scale``, zeros after an overflow."""
    if grad_scale is not None:
        grads = _torch.foreach_div(grads, grad_scale.to(grads[0].dtype))
    return grads if found_inf is None else zeroed(grads, found_inf)


_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def zeroed(tensors: Tensors, flag: Tensor) -> Tensors:
    """Return ``tensors``, zeros where ``flag`` (0-dim) is not 0, infs and NaNs included.

    No foreach kernel selects, and 0 · inf is NaN. The bits are multiplied instead, as integers: 1 keeps them.
    """
    dtype = tensors[0].dtype
    integers = _INTEGERS[dtype]
    keep = (flag == 0).to(integers)
    kept = _torch.foreach_mul([tensor.view(integers) for tensor in tensors], keep)
    return [bits.view(dtype) for bits in kept]


def bias(beta: float, step: int | Tensor) -> float | Tensor:
    """Return ``1 - beta ** step`` for ``step`` counted from 1; on the device when ``step`` is there.

    ``expm1`` because in float32 the subtraction loses five of seven digits at beta 0.999. After a skipped first step
    the result is 0, and what is divided by it is thrown away by :func:`descend_`.
    """
    if beta == 0.0:
        return 1.0
    if isinstance(step, Tensor):
        return -torch.expm1(step * math.log(beta))
    return -math.expm1(step * math.log(beta))


def root(value: float | Tensor) -> float | Tensor:
    """Return the square root of a number on the host or on the device."""
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)


def blend_(average: Tensors, new: Tensors, decay: float, weight: float, found_inf: Tensor | None) -> None:
    """Set ``average`` to ``decay * average + weight * new``."""
    _torch.foreach_mul_(average, gated(decay, 1.0, found_inf))
    _torch.foreach_add_(average, _torch.foreach_mul(new, gated(weight, 0.0, found_inf)))


def descend_(params: Tensors, update: Tensors, lr: float | Tensor, found_inf: Tensor | None) -> None:
    """Subtract ``lr * update`` from ``params``."""
    if found_inf is not None:
        update = zeroed(update, found_inf)
    _torch.foreach_sub_(params, _torch.foreach_mul(update, lr))


def decayed(update: Tensors, params: Tensors, weight_decay: float) -> Tensors:
    """Return ``update + weight_decay * params``."""
    return _torch.foreach_add(update, params, alpha=weight_decay) if weight_decay else update


def adam_update_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, hyper: Hyper, inside: bool = False
) -> Tensors:
    """Update both moments and return what ``lr`` is to be multiplied by, weight decay included.

    That is ``m / bias1 / (sqrt(v / bias2) + eps)``; with ``inside`` the root is that of ``(v + eps) / bias2``.
    """
    grads = hyper.decayed_grads(grads, params)
    beta1, beta2 = hyper.betas
    blend_(exp_avgs, grads, beta1, hyper.new_weight, hyper.found_inf)
    blend_(exp_avg_sqs, _torch.foreach_mul(grads, grads), beta2, 1.0 - beta2, hyper.found_inf)
    bias1, bias2 = hyper.biases()
    denominator = _torch.foreach_add(exp_avg_sqs, hyper.eps) if inside else exp_avg_sqs
    denominator = _torch.foreach_div(denominator, bias2)
    _torch.foreach_sqrt_(denominator)
    if not inside:
        _torch.foreach_add_(denominator, hyper.eps)
    update = _torch.foreach_div(exp_avgs, bias1)
    _torch.foreach_div_(update, denominator)
    return hyper.decayed_update(update, params)


def adam_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    hyper: Hyper,
    *,
    eps_inside_sqrt: bool = False,
    grad_scale: Tensor | None = None,
) -> None:
    """Apply Adam or, with decoupled decay, AdamW, by torch's fused kernel.

    Reproduces ``csrc/multi_tensor_adam.cu: AdamFunctor``.
    """
    device = params[0].device
    if _torch.has_fused_kernels(device) and not eps_inside_sqrt:
        kernel: Callable[..., None] = _torch.fused_adamw_ if hyper.decoupled else _torch.fused_adam_
        # The kernel always corrects the bias; after infinitely many steps there is none.
        count = hyper.step if hyper.bias_correction else math.inf
        if not isinstance(count, Tensor):
            count = torch.full((), count, dtype=torch.float32, device=device)
        kernel(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [count] * len(params),
            lr=hyper.lr,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=hyper.found_inf,
        )
        return
    grads = usable(grads, grad_scale, hyper.found_inf)
    update = adam_update_(params, grads, exp_avgs, exp_avg_sqs, hyper, eps_inside_sqrt)
    descend_(params, update, hyper.lr, hyper.found_inf)


def contributed_adam_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    hyper: Hyper,
    *,
    eps_inside_sqrt: bool,
    grad_scale: float | Tensor,
) -> None:
    """Apply the Adam of apex's contributed optimizer, whose bias corrections are part of the learning rate.

    So ``eps`` is not corrected, and the weight decay, which is added to the update, is.
    Reproduces ``apex/contrib/csrc/optimizers/fused_adam_cuda_kernel.cu``.
    """
    grads = _torch.foreach_div(grads, grad_scale)
    beta1, beta2 = hyper.betas
    blend_(exp_avgs, grads, beta1, 1.0 - beta1, None)
    blend_(exp_avg_sqs, _torch.foreach_mul(grads, grads), beta2, 1.0 - beta2, None)
    if eps_inside_sqrt:
        denominator = _torch.foreach_add(exp_avg_sqs, hyper.eps)
        _torch.foreach_sqrt_(denominator)
    else:
        denominator = _torch.foreach_sqrt(exp_avg_sqs)
        _torch.foreach_add_(denominator, hyper.eps)
    update = decayed(_torch.foreach_div(exp_avgs, denominator), params, hyper.weight_decay)
    bias1, bias2 = hyper.biases()
    descend_(params, update, hyper.lr * root(bias2) / bias1, None)


def sgd_(
    params: Tensors, grads: Tensors, momentum_buffers: Tensors, hyper: Hyper, *, grad_scale: Tensor | None = None
) -> None:
    """Apply SGD with momentum, by torch's fused kernel; ``momentum_buffers`` is empty without.

    The first step of a param, whose buffer holds zeros, is one without dampening.
    Reproduces ``csrc/multi_tensor_sgd_kernel.cu: SGDFunctor``.
    """
    if _torch.has_fused_kernels(params[0].device) and not (hyper.decoupled and hyper.weight_decay):
        _torch.fused_sgd_(
            params,
            grads,
            momentum_buffers,
            weight_decay=hyper.weight_decay,
            momentum=hyper.momentum,
            lr=hyper.lr,
            dampening=hyper.dampening,
            nesterov=bool(hyper.nesterov),
            maximize=False,
            is_first_step=False,
            grad_scale=grad_scale,
            found_inf=hyper.found_inf,
        )
        return
    update = hyper.decayed_grads(usable(grads, grad_scale, hyper.found_inf), params)
    momentum = hyper.momentum
    if momentum:
        blend_(momentum_buffers, update, momentum, 1.0 - hyper.dampening, hyper.found_inf)
        update = _torch.foreach_add(update, momentum_buffers, alpha=momentum) if hyper.nesterov else momentum_buffers
    descend_(params, hyper.decayed_update(update, params), hyper.lr, hyper.found_inf)


def adagrad_(params: Tensors, grads: Tensors, sums: Tensors, hyper: Hyper) -> None:
    """Apply Adagrad to gradients that :func:`usable` gave.

    Reproduces ``csrc/multi_tensor_adagrad.cu: AdagradFunctor``.
    """
    grads = hyper.decayed_grads(grads, params)
    blend_(sums, _torch.foreach_mul(grads, grads), 1.0, 1.0, hyper.found_inf)
    denominator = _torch.foreach_sqrt(sums)
    _torch.foreach_add_(denominator, hyper.eps)
    update = _torch.foreach_div(grads, denominator)
    descend_(params, hyper.decayed_update(update, params), hyper.lr, hyper.found_inf)
