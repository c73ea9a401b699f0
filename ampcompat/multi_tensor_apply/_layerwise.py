"""The update rules that look at each layer's norms: LAMB and NovoGrad.

As in :mod:`ampcompat.multi_tensor_apply._rules`; gradients come from ``usable`` there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat._torch import Tensors
from ampcompat._types import HALF_DTYPES
from ampcompat.multi_tensor_apply._rules import Hyper, adam_update_, blend_, descend_, root


def norms(tensors: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """Return the norm of each tensor, in float32 at least, shape ``[len(tensors)]``, on their device."""
    half = tensors[0].dtype in HALF_DTYPES
    # A float16 norm overflows at 65504 although every element is finite.
    each = _torch.foreach_norm(list(tensors), order, **({"dtype": torch.float32} if half else {}))
    return torch.stack(each)


def grad_norm(params: Iterable[Tensor], grad_scale: Tensor | None) -> Tensor:
    """Return the L2 norm of all gradients together; no host sync.

    It is 0-dim, float32 (float64 if some gradients are), on the device of the first param.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in params:
        if param.grad is not None and param.numel():
            by_kind.setdefault((param.device, param.grad.dtype), []).append(param.grad)
    if not by_kind:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    parts = [torch.linalg.vector_norm(norms(grads)) for grads in by_kind.values()]
    device = parts[0].device
    dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    norm: Tensor = torch.linalg.vector_norm(torch.stack([_torch.moved_to(device, part, dtype) for part in parts]))
    if grad_scale is not None:
        norm = norm / _torch.moved_to(norm.device, grad_scale)
    return norm


def clipped(grads: Tensors, norm: Tensor, max_norm: float | None) -> Tensors:
    """Return ``grads`` scaled down from the norm ``norm`` to ``max_norm`` at most; None or 0 leaves them."""
    if not max_norm or max_norm <= 0:
        return grads
    factor = torch.where(norm > max_norm, norm / max_norm, 1.0)
    return _torch.foreach_div(grads, factor.to(grads[0].device, grads[0].dtype))


def trust_ratios(param_norms: Tensor, update_norms: Tensor) -> Tensor:
    """Return LAMB's factor for each layer, ``[n]``: the quotient of its norms, or 1 where one of them is 0."""
    return torch.where((param_norms != 0) & (update_norms != 0), param_norms / update_norms, 1.0)


def round_(tensors: Tensors, dtypes: Sequence[torch.dtype]) -> None:
    """Round ``tensors`` to one of ``dtypes`` each and keep their own dtype; float64 stays as it is."""
    wide: list[Tensor] = []
    narrow: list[Tensor] = []
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        if tensor.dtype not in (dtype, torch.float64):
            wide.append(tensor)
            narrow.append(torch.empty_like(tensor, dtype=dtype))
    _torch.foreach_copy_(narrow, wide)
    _torch.foreach_copy_(wide, narrow)


def lamb_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    hyper: Hyper,
    *,
    global_grad_norm: Tensor,
    max_grad_norm: float | None,
    use_nvlamb: bool,
    update_dtypes: Sequence[torch.dtype],
) -> None:
    """Apply Adam's direction on globally clipped gradients, its length scaled to each layer's weights.

    The trust ratio ``norm(param) / norm(update)`` is 1 where one of the norms is 0 and, unless ``use_nvlamb``, in
    groups without weight decay (biases, normalisation layers). Reproduces ``csrc/multi_tensor_lamb.cu``, which kept the
    update in the memory of the gradient: it is rounded to ``update_dtypes``.
    """
    grads = clipped(grads, global_grad_norm, max_grad_norm)
    update = adam_update_(params, grads, exp_avgs, exp_avg_sqs, hyper)
    round_(update, update_dtypes)
    if use_nvlamb or hyper.weight_decay != 0.0:
        update = _torch.foreach_mul(update, list(trust_ratios(norms(params), norms(update)).unbind()))
    descend_(params, update, hyper.lr, hyper.found_inf)


NOT_YET = -1.0
"""NovoGrad's second moment before the first gradient, which is taken as it is."""


def novograd_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    norm_avgs: Tensors,
    hyper: Hyper,
    *,
    norm_type: int,
) -> None:
    """Apply momentum on gradients divided by a running norm of their layer.

    ``norm_avgs`` holds one 0-dim running norm (not its square) a layer, or :data:`NOT_YET`. With ``norm_type`` 2 the
    squares are averaged, with 0 (the largest magnitude) the norms themselves. Decay that is not decoupled is added to
    the divided gradient. Reproduces ``csrc/multi_tensor_novograd.cu``.
    """
    beta1, beta2 = hyper.betas
    found_inf = hyper.found_inf
    now = norms(grads, 2.0 if norm_type == 2 else math.inf)
    before = torch.stack(list(norm_avgs))
    kept = torch.where(before < 0, now, before)
    if norm_type == 2:
        running = torch.sqrt(beta2 * kept.square() + (1.0 - beta2) * now.square())
    else:
        running = beta2 * kept + (1.0 - beta2) * now
    if found_inf is not None:
        running = torch.where(found_inf != 0, before, running)
    _torch.foreach_copy_(norm_avgs, list(running.unbind()))

    bias1, bias2 = hyper.biases()
    denominator = running / root(bias2) + hyper.eps
    if found_inf is not None:
        denominator = torch.where(found_inf != 0, 1.0, denominator)  # nothing to divide by yet in a skipped first step
    denominators = list(denominator.unbind())
    if not hyper.decoupled:
        grads = hyper.decayed_grads(_torch.foreach_div(grads, denominators), params)
    blend_(exp_avgs, grads, beta1, hyper.new_weight, found_inf)
    update: Tensors = _torch.foreach_div(exp_avgs, bias1)
    if hyper.decoupled:
        _torch.foreach_div_(update, denominators)
        update = hyper.decayed_update(update, params)
    descend_(params, update, hyper.lr, found_inf)
