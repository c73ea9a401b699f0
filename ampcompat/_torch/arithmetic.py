"""Arithmetic on tensors, and on lists of tensors in fused passes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch

from ampcompat._torch.chunks import in_chunks
from ampcompat._torch.host import moved_to

P = ParamSpec("P")
R = TypeVar("R")


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate as ``torch.no_grad()`` does, at a quarter of its two microseconds per call."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return wrapper


# The lists of one call are on one device, of one dtype, and laid out alike: the fused kernels read raw memory and, on
# 2.4 and 2.13, silently mix up elements when the strides of a param and its gradient differ. Lists that may be mixed go
# to foreach_copy_ and foreach_accumulate_, which make one call for each kind of pair.

foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_div = torch._foreach_div
foreach_div_ = torch._foreach_div_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sqrt = torch._foreach_sqrt
foreach_sqrt_ = torch._foreach_sqrt_
foreach_sub_ = torch._foreach_sub_
fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_
#: ``(scale, tracker, found_inf, growth, backoff, interval)``: changes scale and tracker as ``GradScaler.update`` does.
update_scale_ = torch._amp_update_scale_


Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]


def foreach_copy_(destinations: Tensors, sources: Tensors) -> None:
    """Copy each of ``sources`` to its destination; dtypes, devices and strides may differ, among the pairs too.

    CUDA's ``_foreach_copy_`` wrote every destination in the dtype of the first, until torch's fix of January 2026.
    """
    for alike, their_sources in _by_kind(destinations, sources):
        torch._foreach_copy_(alike, their_sources)


def foreach_accumulate_(sums: Tensors, addends: Tensors) -> None:
    """Add each of ``addends`` to its sum, in place; dtypes, devices and strides may differ, among the pairs too."""
    for alike, their_addends in _by_kind(sums, addends):
        torch._foreach_add_(alike, their_addends)


def _by_kind(written: Tensors, read: Tensors) -> Iterable[tuple[Tensors, Tensors]]:
    """Split two parallel lists so that no call mixes devices, dtypes, or pairs of equal and of different strides.

    CUDA passes a list to one kernel only if it mixes none of these; otherwise it launches a kernel for each pair.
    """
    if not written:
        return []
    of_written = zip(map(_DTYPE, written), map(_DEVICE_INDEX, written), strict=True)
    of_read = zip(map(_DTYPE, read), map(_DEVICE_INDEX, read), strict=True)
    is_uniform = len(set(of_written)) == 1 and len(set(of_read)) == 1
    if is_uniform and list(map(_STRIDE, written)) == list(map(_STRIDE, read)):
        return [(written, read)]
    lists: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(written, read, strict=True):
        has_equal_strides = target.stride() == source.stride()
        kind = (target.dtype, target.device, source.dtype, source.device, has_equal_strides)
        targets, sources = lists.setdefault(kind, ([], []))
        targets.append(target)
        sources.append(source)
    return lists.values()


_DTYPE = operator.attrgetter("dtype")
_DEVICE_INDEX = torch.Tensor.get_device
_STRIDE = torch.Tensor.stride
_CASTS = {torch.float16: torch.Tensor.half, torch.bfloat16: torch.Tensor.bfloat16, torch.float32: torch.Tensor.float}


def cast_to(value: Any, dtype: torch.dtype) -> Any:
    """A floating tensor in ``dtype``, any other tensor as it is, and what ``value.to(dtype)`` makes of another object.

    A tensor's own ``half()`` and its like take two thirds of the time of ``to(dtype)`` with cold caches.
    """
    if not isinstance(value, torch.Tensor):
        return value.to(dtype)
    if value.dtype == dtype or not value.is_floating_point():
        return value
    method = _CASTS.get(dtype)
    return value.to(dtype) if method is None else method(value)


def has_fused_kernels(device: torch.device) -> bool:
    """Whether torch's own optimizers would accept ``fused=True`` for params on ``device``."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return device.type in _get_fused_kernels_supported_devices()


def any_of(flags: list[torch.Tensor]) -> torch.Tensor:
    """Whether one of ``flags`` is set, on the device of the first. No host sync, unless that is the CPU."""
    first, *others = flags
    if not others:
        return first
    return torch.stack([first, *(moved_to(first.device, flag) for flag in others)]).amax()


def any_non_finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Whether one of ``tensors`` (at least one) holds an inf or NaN: a 0-dim float32 flag. No host sync."""
    held = [tensor._values() if tensor.is_sparse else tensor for tensor in tensors]
    return any_of([torch.isfinite(entries).all().logical_not().float() for entries in held])


def unscale_and_check_(grads: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiply ``grads`` in place by ``inverse_scale``, and set ``found_inf`` to 1 on any inf or NaN. No host sync.

    Products are made in float32, or in the dtype of ``grads`` if that is wider, and rounded once.

    Args:
        grads: Dense tensors of one device and one real floating dtype, at least one.
        found_inf: 0-dim float32 on their device; stays as it is where all are finite.
        inverse_scale: 0-dim float32 on their device.
    """
    if grads[0].dtype != torch.bfloat16:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse_scale)
        return
    # CUDA has no such kernel for bfloat16: https://github.com/pytorch/pytorch/issues/127176
    for indices in in_chunks(grads):
        chunk = [grads[index] for index in indices]
        copies = [torch.empty_like(grad, dtype=torch.float32) for grad in chunk]
        foreach_copy_(copies, chunk)
        torch._amp_foreach_non_finite_check_and_unscale_(copies, found_inf, inverse_scale)
        foreach_copy_(chunk, copies)


def inverse_of(number: torch.Tensor) -> torch.Tensor:
    """1 / ``number``. At O1 ``reciprocal`` is an op of the float list, whose rule would take longer than the op."""
    with torch._C._DisableAutocast():
        return number.reciprocal()


def found_inf_and_scale(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return what ``scaler`` has found in the gradients of ``optimizer``, for a ``step`` that takes a ``grad_scaler``.

    Returns:
        The overflow flag (0-dim float32, not 0 after an overflow) and the scale that the gradients still have, None
        where they are unscaled. Both are None of a scaler that is not enabled. No host sync.
    """
    if not scaler.is_enabled():
        return None, None
    state = scaler._per_optimizer_states[id(optimizer)]
    is_unscaled = state["stage"].name == "UNSCALED"
    if not is_unscaled:
        scaler._check_inf_per_device(optimizer)
    scale: torch.Tensor = scaler._get_scale_async()  # type: ignore[assignment] # made already
    flags = [moved_to(scale.device, flag) for flag in state["found_inf_per_device"].values()]
    found_inf = torch.stack(flags).amax() if flags else torch.zeros((), dtype=torch.float32, device=scale.device)
    return found_inf, None if is_unscaled else scale


def is_window(grad: torch.Tensor) -> bool:
    """Whether ``grad`` is a part of another tensor's memory, as in DDP's buckets."""
    if grad.layout != torch.strided or type(grad).__name__ == "DTensor":  # FSDP2 reduces into new memory
        return False
    return grad._is_view() or grad.untyped_storage().nbytes() != grad.numel() * grad.element_size()


def _sparse(
    indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, coalesced: bool | None = None
) -> torch.Tensor:
    # The parts come from a sparse tensor: no checks. Saying so keeps torch from warning that there are none.
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=False)


def widened(grad: torch.Tensor) -> torch.Tensor:
    """The sparse ``grad`` in float32, each index once."""
    return _sparse(grad._indices(), grad._values().float(), grad.shape).coalesce()


def coalesced(grad: torch.Tensor) -> torch.Tensor:
    """The sparse ``grad`` with each index once. Half entries are summed in float32: their half sum may overflow."""
    if grad.dtype in (torch.float16, torch.bfloat16):
        wide = widened(grad)
        return _sparse(wide.indices(), wide.values().to(grad.dtype), wide.shape, True)
    return grad.coalesce()


def fused_float32_copies(tensors: list[torch.Tensor], like: list[torch.Tensor]) -> list[torch.Tensor]:
    """As :func:`float32_copies`, in as few launches as torch's fused passes take."""
    copies = [torch.empty_like(model) for model in like]
    foreach_copy_(copies, tensors)
    return copies


def float32_copies(tensors: list[torch.Tensor], like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of ``tensors``, which are dense, in float32, each with the strides of its float32 tensor in ``like``.

    At least one tensor. One by one on the CPU, which has no launches to save.
    """
    if not tensors[0].is_cpu:
        return fused_float32_copies(tensors, like)
    copies = list(map(torch.Tensor.float, tensors))
    if list(map(_STRIDE, copies)) == list(map(_STRIDE, like)):
        return copies
    for index, model in enumerate(like):
        if copies[index].stride() != model.stride():
            copies[index] = torch.empty_like(model).copy_(copies[index])
    return copies


def sum_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a + b``, in place in ``a`` where it can be: ``a`` may be a window into a DDP bucket. Either may be sparse.

    Where one of them has a graph, of ``backward(create_graph=True)``, the sum has one.
    """
    if a.requires_grad or b.requires_grad:
        with torch.enable_grad():
            return a + b
    if a.is_sparse and b.is_sparse:
        # Joined and coalesced, not added: the CPU adds no half sparse tensors.
        indices = torch.cat([a._indices(), b._indices()], 1)
        values = torch.cat([a._values(), b._values()])
        return coalesced(_sparse(indices, values, a.shape))
    if a.is_sparse:
        return b + a
    if b.is_sparse:
        return a + b
    return a.add_(b)
