"""``amp_C``: the functions of apex's extension that scripts call by ``multi_tensor_applier``, on torch's kernels.

All take ``(chunk_size, noop_flag, tensor_lists, ...)``. ``noop_flag`` is an integer tensor of shape ``[1]``; scale and
axpby set it to 1 when they meet an inf or a NaN, and compute on all the same, as apex's did. The lists of one call are
parallel and on one device; each may have its own dtype, arithmetic is float32. Nothing synchronises with the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat.optimizers import _layerwise, _rules
from ampcompat.optimizers._working import WorkingCopies

Lists = Sequence[Sequence[Tensor]]


def _lent(tensor_lists: Lists, count: int, op: str, read_only: int = 1) -> tuple[WorkingCopies, list[list[Tensor]]]:
    """Working copies of ``tensor_lists``, laid out as those of list 1 (the params)."""
    _check(tensor_lists, count, op)
    copies = WorkingCopies()
    params = copies.params(tensor_lists[1])
    lists = [
        params if i == 1 else copies.lend([t.detach() for t in tensors], like=params, changes=i >= read_only)
        for i, tensors in enumerate(tensor_lists)
    ]
    return copies, lists


def _check(tensor_lists: Lists, count: int, op: str) -> None:
    sizes = [len(tensors) for tensors in tensor_lists]
    if len(sizes) != count or len(set(sizes)) > 1:
        raise RuntimeError(f"amp_C.{op} got lists of {sizes} tensors: it takes {count} parallel lists of equal length.")


def _flag(noop_flag: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set ``noop_flag`` if an element is not finite: its tensor's largest magnitude is inf or NaN then."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if filled:
        finite = torch.stack([t.float() for t in _torch.foreach_norm(filled, float("inf"))]).isfinite().all()
        noop_flag.copy_(torch.where(finite, noop_flag, 1))


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float) -> None:
    """``out = in * scale`` for the lists ``[in, out]``; flags what is not finite in ``in``."""
    _check(tensor_lists, 2, "multi_tensor_scale")
    sources, targets = ([t.detach() for t in tensors] for tensors in tensor_lists)
    if not sources:
        return
    _flag(noop_flag, sources)
    copies = WorkingCopies()
    scaled = _torch.foreach_mul(copies.params(sources), scale)
    _torch.foreach_copy_(targets, scaled)


def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, a: float, b: float, arg_to_check: int = -1
) -> None:
    """``out = a * x + b * y`` for the lists ``[x, y, out]``; flags what is not finite in x (0), y (1) or both (-1)."""
    _check(tensor_lists, 3, "multi_tensor_axpby")
    xs, ys, outs = ([t.detach() for t in tensors] for tensors in tensor_lists)
    if not xs:
        return
    _flag(noop_flag, {0: xs, 1: ys, -1: [*xs, *ys]}[arg_to_check])
    copies = WorkingCopies()
    scaled = _torch.foreach_mul(copies.params(xs), a)
    _torch.foreach_add_(scaled, _torch.foreach_mul(copies.params(ys), b))
    _torch.foreach_copy_(outs, scaled)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """L2 norm over all tensors of the one list, float32 ``[1]``, and with ``per_tensor`` those of each, ``[n]``."""
    _check(tensor_lists, 1, "multi_tensor_l2norm")
    tensors = [t.detach() for t in tensor_lists[0]]
    if not tensors:
        return noop_flag.new_zeros(1, dtype=torch.float32), noop_flag.new_zeros(0, dtype=torch.float32)
    each = _layerwise.norms(tensors).float()
    return torch.linalg.vector_norm(each).reshape(1), each if per_tensor else each.new_zeros(0)


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
    copies, (grads, params, exp_avgs, exp_avg_sqs) = _lent(tensor_lists, 4, "multi_tensor_adam")
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
    copies.write_back()


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
    _check(tensor_lists, 4 if len(tensor_lists) == 4 else 3, "multi_tensor_sgd")
    copies, (grads, params, buffers) = _lent(tensor_lists[:3], 3, "multi_tensor_sgd")
    if not params:
        return
    found_inf = noop_flag.reshape(()).to(torch.float32)
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
    copies.write_back()
    if len(tensor_lists) == 4:
        _torch.foreach_copy_([t.detach() for t in tensor_lists[3]], params)


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
    copies, (grads, params, sums) = _lent(tensor_lists, 3, "multi_tensor_adagrad")
    if params:
        _rules.adagrad_(params, grads, sums, lr=lr, eps=epsilon, weight_decay=weight_decay, adagrad_w_mode=bool(mode))
    copies.write_back()


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
    copies, (grads, params, exp_avgs, exp_avg_sqs) = _lent(tensor_lists, 4, "multi_tensor_lamb")
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
    copies.write_back()


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
    copies, (grads, params, exp_avgs) = _lent(tensor_lists, 3, "multi_tensor_novograd")
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
    copies.write_back()
