"""The lists of tensors that the functions of ``amp_C`` take: checked, and in the dtypes that they compute in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ampcompat import _torch
from ampcompat.multi_tensor_apply._working import WorkingCopies, math_dtype

Lists = Sequence[Collection[Tensor]]


def parallel(tensor_lists: Lists, count: int, op: str) -> list[list[Tensor]]:
    """Return the lists, ``count`` of them, of equal length, with tensors of equal shapes and on one device.

    ``op`` names the function in errors.

    Raises:
        RuntimeError: They are not. The fused kernels would read past the end of the shorter tensor.
    """
    lists = [list(tensors) for tensors in tensor_lists]
    sizes = [len(tensors) for tensors in lists]
    if len(sizes) != count or len(set(sizes)) > 1:
        raise RuntimeError(f"{op} got lists of {sizes} tensors: it takes {count} parallel lists of equal length.")
    for index, row in enumerate(zip(*lists, strict=True)):
        shapes = [tuple(tensor.shape) for tensor in row]
        if len(set(shapes)) > 1:
            raise RuntimeError(f"{op} got shapes {shapes} at position {index} of its lists: they must be equal.")
    devices = {tensor.device for tensors in lists for tensor in tensors}
    if len(devices) > 1:
        names = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(
            f"{op} got tensors on {names} - those of one call are on one device - call it once for each device."
        )
    return lists


@contextmanager
def lent(tensor_lists: Lists, count: int, op: str, grads_change: bool = False) -> Iterator[list[list[Tensor]]]:
    """Lend working copies of ``tensor_lists`` (gradients, params, state), laid out as the params, and write back.

    ``grads_change``: The gradients are written back, too.
    """
    grads, params, *state = parallel(tensor_lists, count, op)
    copies = WorkingCopies()
    working = copies.params(params)
    working_grads = copies.lend(grads, like=working, changes=grads_change)
    working_state = [copies.lend(tensors, like=working, changes=True) for tensors in state]
    yield [working_grads, working, *working_state]
    copies.write_back()


@functools.cache
def computing_dtype(device_type: str, *dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype that arithmetic of ``dtypes`` is done in: float32 for half, float64 for integers.

    In float32, ``0.9999 * k + 0.0001 * k`` is below ``k`` for one integer ``k`` in five, and a cast would make it
    ``k - 1``. MPS has no float64.
    """

    def of_one(dtype: torch.dtype) -> torch.dtype:
        if dtype.is_complex:
            return dtype
        if dtype.is_floating_point:
            return math_dtype(dtype)
        return torch.float32 if device_type == "mps" else torch.float64

    return functools.reduce(torch.promote_types, map(of_one, dtypes))


def by_computing_dtype(
    inputs: Sequence[list[Tensor]], outputs: list[Tensor]
) -> Iterator[tuple[list[list[Tensor]], list[Tensor]]]:
    """Split parallel lists by the dtype that their rows compute in; yield the inputs in it, and the outputs."""
    rows: dict[torch.dtype, list[int]] = {}
    for index, row in enumerate(zip(*inputs, strict=True)):
        dtype = computing_dtype(row[0].device.type, *[tensor.dtype for tensor in row])
        rows.setdefault(dtype, []).append(index)
    for dtype, chosen in rows.items():
        yield [in_dtype([tensors[i] for i in chosen], dtype) for tensors in inputs], [outputs[i] for i in chosen]


def in_dtype(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return ``tensors`` in ``dtype``: themselves where they have it, copies elsewhere."""
    others = [tensor for tensor in tensors if tensor.dtype != dtype]
    if not others:
        return tensors
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in others]
    _torch.foreach_copy_(copies, others)
    remaining = iter(copies)
    return [tensor if tensor.dtype == dtype else next(remaining) for tensor in tensors]


def by_dtype(tensors: list[Tensor], function: Callable[[list[Tensor]], Tensor]) -> list[Tensor]:
    """Return what ``function`` gives for each tensor, as 0-dim tensors in their order.

    ``function`` takes tensors of one dtype and returns one number each, of shape ``[n]``.
    """
    places: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(index)
    numbers: dict[int, Tensor] = {}
    for chosen in places.values():
        numbers.update(zip(chosen, function([tensors[i] for i in chosen]).unbind(), strict=True))
    return [numbers[index] for index in range(len(tensors))]


def write_unless(is_set: Tensor, targets: list[Tensor], values: Sequence[Tensor]) -> None:
    """Write ``values`` to ``targets``, in their dtypes, unless ``is_set`` (0-dim bool, on their device)."""
    for target, value in zip(targets, values, strict=True):
        target.copy_(torch.where(is_set, target, value.to(target.dtype)))


def flag_unless_finite(noop_flag: Tensor, numbers: Tensor) -> None:
    """Set ``noop_flag`` to 1 if one of ``numbers`` is inf or NaN; a flag that is set stays so. No host sync."""
    has_non_finite = numbers.isfinite().all().logical_not()
    noop_flag.masked_fill_(_torch.moved_to(noop_flag.device, has_non_finite), 1)


def is_set(noop_flag: Tensor, device: torch.device) -> Tensor:
    """Return whether ``noop_flag`` is set, 0-dim, on ``device``. No host sync."""
    return _torch.moved_to(device, noop_flag.reshape(()) != 0)


def number_on(device: torch.device, value: float | Tensor) -> Tensor:
    """Return ``value``, a number or a tensor of one element, as 0-dim float32 on ``device``. No host sync."""
    if isinstance(value, Tensor):
        return _torch.moved_to(device, value.reshape(()), torch.float32)
    return torch.full((), value, dtype=torch.float32, device=device)
