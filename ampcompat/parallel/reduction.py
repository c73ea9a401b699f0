"""Which gradients :class:`DistributedDataParallel` reduces at the end of a backward pass, and when they leave.

Ranks need not have gradients of the same parameters: a layer may be frozen, unused, or used on one rank only. So at the
end of each pass the ranks agree, by one small all-reduce, on the parameters that any of them has a new gradient of, and
reduce these. A rank without the gradient adds zeros, and gets the result like the others.

To use the time of the pass itself, gradients that the last pass had are in buckets, which leave as soon as they are
full. They leave in one order on all ranks, and those that never fill leave at the end; so the ranks make the same calls
whatever they have. What the buckets did not cover, the first pass and a changed set of parameters included, is reduced
after the agreement.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ampcompat import _torch
from ampcompat._types import HALF_DTYPES

# What a rank says of a parameter; the ranks agree on the greatest.
_NOTHING_NEW = 0
_IN_BUCKET = 1
_OUTSIDE_BUCKETS = 2


@dataclass(frozen=True)
class Arithmetic:
    """How one bucket is averaged.

    Attributes:
        always_fp32: Reduce half gradients in float32.
        average: Divide by the number of processes.
        predivide: Divide by this before the reduction, and by the rest of the number of processes after it.
    """

    always_fp32: bool = False
    average: bool = True
    predivide: float = 1.0

    def before(self, flat: Tensor) -> Tensor:
        """What is summed over the processes; may be ``flat``, changed in place."""
        if self.always_fp32 and flat.dtype in HALF_DTYPES:
            flat = flat.float()
        return flat if self.predivide == 1.0 else flat.mul_(1.0 / self.predivide)

    def after(self, total: Tensor, world_size: int) -> Tensor:
        """The result, in the dtype of the reduction: ``total``, changed in place."""
        return total.mul_(self.predivide / world_size) if self.average else total


@dataclass(frozen=True)
class Sum:
    """The gradients of one bucket, on their way to be summed over the processes."""

    params: list[Tensor]
    flat: Tensor  # the gradients, and once the work is done their sum
    work: dist.Work

    def store(self, chosen: set[Tensor], arithmetic: Arithmetic, group: dist.ProcessGroup | None) -> None:
        """Wait for the sum, and write it to the gradients of the parameters in ``chosen``."""
        self.work.wait()
        result = arithmetic.after(self.flat, dist.get_world_size(group))
        for param, part in zip(self.params, torch.split(result, [p.numel() for p in self.params]), strict=True):
            if param in chosen:
                if param.grad is None:
                    param.grad = torch.empty_like(param, requires_grad=False)
                param.grad.copy_(part.view_as(param))


class Bucket:
    """Parameters of one dtype and device, whose gradients are reduced by one call.

    Attributes:
        params: The parameters.
        missing: Those that this pass has not given a gradient yet.
        numel: Number of elements.
    """

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.missing: set[Tensor] = set()
        self.numel = 0

    def add(self, param: Tensor) -> None:
        """Put a parameter at the end."""
        self.params.append(param)
        self.missing.add(param)
        self.numel += param.numel()

    def empty(self) -> None:
        """Be ready for the next pass."""
        self.missing = set(self.params)

    def launch(self, arithmetic: Arithmetic, group: dist.ProcessGroup | None) -> Sum:
        """Start to sum the gradients over the processes; a parameter without one adds zeros."""
        parts = [p.new_zeros(p.numel()) if p.grad is None else _dense(p.grad).reshape(-1) for p in self.params]
        flat = arithmetic.before(torch.cat(parts))
        return Sum(self.params, flat, dist.all_reduce(flat, group=group, async_op=True))


def _dense(grad: Tensor) -> Tensor:
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"DistributedDataParallel got a gradient of layout {grad.layout} - it reduces dense ones only, as"
            " apex did - make the embedding with sparse=False, or wrap in torch.nn.parallel.DistributedDataParallel."
        )
    return grad


class GradientReduction:
    """Reduces the gradients of ``module`` at the end of each backward pass that gives it any.

    Args:
        module: The replica.
        group: Processes to reduce over (all).
        arithmetic: How gradients are averaged.
        bucket_size: Elements after which a bucket is closed.
        overlap: Whether full buckets leave during the pass; else all leave at its end.

    Attributes:
        enabled: Whether passes reduce; gradients of those that do not wait for the next one that does.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        arithmetic: Arithmetic,
        bucket_size: int,
        overlap: bool,
    ) -> None:
        self.module = module
        self.group = group
        self.arithmetic = arithmetic
        self.bucket_size = bucket_size
        self.overlap = overlap
        self.enabled = True
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._new: set[Tensor] = set()  # have had a gradient since the last reduction
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Tensor, Bucket] = {}
        self._start_pass()

    def __reduce__(self) -> tuple[object, ...]:
        """Copies hook their own parameters, and reduce over all processes: process groups cannot be copied."""
        return type(self), (self.module, None, self.arithmetic, self.bucket_size, self.overlap)

    def _start_pass(self) -> None:
        self._end_is_queued = False
        self._sums: list[Sum] = []  # of the buckets that have left, which are the first
        self._in_flight: set[Tensor] = set()  # parameters whose gradient is in a launched bucket
        for bucket in self._buckets:
            bucket.empty()

    @_torch.eager
    def before_forward(self) -> None:
        """Hook parameters that are new or newly trainable; forget a pass that has raised."""
        if self._end_is_queued and not _torch.in_backward():
            self._start_pass()
        self._watch()

    def _watch(self) -> None:
        watched: dict[Tensor, RemovableHandle] = {}
        for param in self.module.parameters():
            if param in self._hooks:
                watched[param] = self._hooks[param]
            elif param.requires_grad and param.is_leaf:
                watched[param] = param.register_post_accumulate_grad_hook(_weak_hook(self))  # type: ignore[no-untyped-call]
        self._hooks = watched

    def arrived(self, param: Tensor) -> None:
        """Note that the pass has given ``param`` a gradient; send the buckets that are full now."""
        self._new.add(param)
        if not self.enabled:
            return
        if not self._end_is_queued:
            self._end_is_queued = True
            _torch.at_end_of_backward(self._end_pass)
        self._in_flight.discard(param)  # a second gradient in one pass: what left with the bucket is not all
        bucket = self._bucket_of.get(param)
        if bucket is not None:
            bucket.missing.discard(param)
            self._launch(only_full=True)

    def reduce_now(self) -> None:
        """Reduce the gradients of all parameters, outside of a backward pass, whether or not it is enabled."""
        self._start_pass()
        self._new = {param for param in self.module.parameters() if param.grad is not None}
        self._end_pass()

    @torch.no_grad()
    def _launch(self, only_full: bool) -> None:
        for bucket in self._buckets[len(self._sums) :]:
            if only_full and bucket.missing:
                return
            self._sums.append(bucket.launch(self.arithmetic, self.group))
            self._in_flight.update(bucket.params)

    @torch.no_grad()
    def _end_pass(self) -> None:
        params: list[Tensor] = list(self.module.parameters())
        # Unfrozen since the forward, or used without the wrapper's: whatever gradient it has was not reduced.
        self._new.update(p for p in params if p.grad is not None and p not in self._hooks)
        self._launch(only_full=False)
        verdicts = self._agree(params)
        in_buckets = {p for p, verdict in zip(params, verdicts, strict=True) if verdict == _IN_BUCKET}
        outside = {p for p, verdict in zip(params, verdicts, strict=True) if verdict == _OUTSIDE_BUCKETS}
        for one in self._sums:
            one.store(in_buckets, self.arithmetic, self.group)
        late = self._fill_buckets(p for p in params if p in outside)
        for one in [bucket.launch(self.arithmetic, self.group) for bucket in late]:
            one.store(outside, self.arithmetic, self.group)
        self._new.clear()
        reduced = in_buckets | outside
        if self.overlap and reduced != self._bucket_of.keys():
            # Gradients come in about the reverse order of the layers.
            self._buckets = self._fill_buckets(p for p in reversed(params) if p in reduced)
            self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.params}
        self._start_pass()
        self._watch()

    def _agree(self, params: list[Tensor]) -> list[int]:
        """What is to be done with each of ``params``, the same on all ranks. One host sync."""
        own = []
        for param in params:
            if param.grad is None or param not in self._new:
                own.append(_NOTHING_NEW)
            elif param in self._in_flight:
                own.append(_IN_BUCKET)
            else:
                own.append(_OUTSIDE_BUCKETS)
        verdicts = torch.tensor(own, dtype=torch.uint8, device=params[0].device)
        dist.all_reduce(verdicts, dist.ReduceOp.MAX, group=self.group)
        agreed: list[int] = verdicts.tolist()
        return agreed

    def _fill_buckets(self, params: Iterable[Tensor]) -> list[Bucket]:
        """Put ``params`` into buckets of one dtype and device each, in the order in which they will be full."""
        full = []
        filling: dict[tuple[torch.dtype, torch.device], Bucket] = {}
        for param in params:
            key = (param.dtype, param.device)
            bucket = filling.setdefault(key, Bucket())
            bucket.add(param)
            if bucket.numel >= self.bucket_size:
                full.append(filling.pop(key))
        return [*full, *filling.values()]


def _weak_hook(reduction: GradientReduction) -> object:
    """A hook that does nothing once the wrapper is gone: parameters outlive it."""
    reference = weakref.ref(reduction)

    def hook(param: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.arrived(param)

    return hook
