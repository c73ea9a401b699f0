"""Working copies: the tensors that an update rule computes on, and how they are written back to those of the caller.

apex's kernels read any dtype and computed in float32. Here the rules run on lists of one dtype (float32, or float64 for
float64 params) whose tensors are laid out alike; what is already so is used as it is, the rest through a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from ampcompat import _torch

_DTYPE = attrgetter("dtype")


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that updates of a param of ``dtype`` are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def by_math_kind(params: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Split ``params`` into lists of one device and one math dtype, which an update rule takes."""
    lists: dict[object, list[Tensor]] = {}
    for param in params:
        lists.setdefault((param.device, math_dtype(param.dtype)), []).append(param)
    return lists.values()


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one block of memory (an expanded tensor, or a column of a matrix, does not)."""
    return tensor.is_contiguous() or torch.empty_like(tensor).stride() == tensor.stride()


def _is_ready(param: Tensor) -> bool:
    return param.dtype == math_dtype(param.dtype) and _is_dense(param)


def _layouts(tensors: Sequence[Tensor]) -> list[object]:
    """Dtypes and strides of ``tensors``, to be compared as a whole: models have thousands."""
    return [*map(_DTYPE, tensors), *map(Tensor.stride, tensors)]


class WorkingCopies:
    """Lends lists of tensors in the math dtype and writes the changed ones back. For use under ``no_grad``."""

    def __init__(self) -> None:
        self._changed: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._like: tuple[Sequence[Tensor] | None, list[object]] = None, []  # what was asked for last; its layouts

    def params(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Lend ``params`` to be changed in place: dense, in their math dtype."""
        if all(map(Tensor.is_contiguous, params)) and {torch.float32, torch.float64}.issuperset(map(_DTYPE, params)):
            return list(params)
        models = [p if _is_ready(p) else torch.empty_like(p, dtype=math_dtype(p.dtype), device="meta") for p in params]
        return self.lend(params, models, changes=True)

    def lend(self, tensors: Sequence[Tensor], like: Sequence[Tensor], changes: bool = False) -> list[Tensor]:
        """Lend ``tensors`` with the dtypes and strides of ``like``.

        Args:
            tensors: What the caller owns.
            like: A dense tensor each, of the same shape, whose dtype and strides to take; its values do not matter.
            changes: Whether :meth:`write_back` copies the result to ``tensors``.
        """
        if like is not self._like[0]:
            self._like = like, _layouts(like)
        if _layouts(tensors) == self._like[1]:
            return list(tensors)
        lent, copies, originals = [], [], []
        for tensor, model in zip(tensors, like, strict=True):
            if tensor.dtype == model.dtype and tensor.stride() == model.stride():
                lent.append(tensor)
            else:
                lent.append(torch.empty_like(model, device=tensor.device))
                copies.append(lent[-1])
                originals.append(tensor)
        if copies:
            _torch.foreach_copy_(copies, originals)
        if changes:
            self._changed[0].extend(originals)
            self._changed[1].extend(copies)
        return lent

    def save(self, copy: Tensor, to: Tensor) -> None:
        """Have :meth:`write_back` copy what was lent as ``copy`` to a tensor more, ``to``."""
        self._changed[0].append(to)
        self._changed[1].append(copy)

    def write_back(self) -> None:
        """Round what was changed to the caller's dtype, into the caller's tensors."""
        originals, copies = self._changed
        if originals:
            _torch.foreach_copy_(originals, copies)
