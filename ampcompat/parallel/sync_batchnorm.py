"""Batch norm over the batches of all processes: torch's on CUDA, differentiable all-reduces elsewhere."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ampcompat.parallel.distributed import require_process_group


class _Context(Protocol):
    group: dist.ProcessGroup | None


class _SumOverProcesses(torch.autograd.Function):
    """All-reduce whose gradient is the all-reduced gradient."""

    @staticmethod
    def forward(ctx: _Context, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SyncBatchNorm(nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm`` with apex's keywords, on any device.

    In a world of one, or without a process group, it is batch norm.

    Args:
        num_features: Channels.
        eps: Added to the variance.
        momentum: Of the running statistics; None averages them.
        affine: Whether there are a weight and a bias.
        track_running_stats: Whether there are running statistics.
        process_group: Processes to synchronise with (all).
        channel_last: The channel is the last dimension of the input, not the second.
        fuse_relu: Apply ReLU to the result.
    """

    # Of models that apex's Python build saved: its instances had neither.
    channel_last: bool = False
    fuse_relu: bool = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize ``input``, (N, C, *) or (N, *, C); ``z`` of the same shape is added before the ReLU."""
        channel_is_last = self.channel_last and input.dim() > 2
        x = input.movedim(-1, 1) if channel_is_last else input
        y = super().forward(x) if x.is_cuda else self._anywhere(x)
        if channel_is_last:
            y = y.movedim(1, -1)
        if z is not None:
            y = y + z
        return F.relu(y) if self.fuse_relu else y

    def _anywhere(self, x: Tensor) -> Tensor:
        up = dist.is_available() and dist.is_initialized()
        if not self.training or not up or dist.get_world_size(self.process_group) == 1:
            # The base of torch's SyncBatchNorm refuses the CPU; batch norm's own forward does what is needed.
            self._check_input_dim(x)
            return nn.BatchNorm1d.forward(self, x)
        self._check_input_dim(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        count = wide.new_full((1,), x.numel() / x.size(1))
        sums: Tensor = _SumOverProcesses.apply(torch.cat([wide.sum(dims), count]), self.process_group)  # type: ignore[no-untyped-call]
        mean, total = sums[:-1] / sums[-1], sums[-1]
        # Two passes: the sum of squares less the squared mean cancels in float32.
        centred = wide - mean.view(shape)
        squares: Tensor = _SumOverProcesses.apply(centred.square().sum(dims), self.process_group)  # type: ignore[no-untyped-call]
        variance = squares / total
        self._track(mean.detach(), variance.detach() * (total / (total - 1)).detach())
        y = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        return y.to(x.dtype)

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)


def convert_syncbn_model(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """Make every batch norm in ``module`` a :class:`SyncBatchNorm`, before or after ``amp.initialize``.

    The modules stay the same objects and change their class, so that optimizers made before go on working, and hooks
    and amp's master weights stay where they are.

    Returns:
        ``module``, changed in place.
    """
    from ampcompat.amp.half.model_class import AmpModel, amp_class

    for norm in [child for child in module.modules() if isinstance(child, _BatchNorm)]:
        kind: Any = amp_class(SyncBatchNorm) if isinstance(norm, AmpModel) else SyncBatchNorm
        norm.__class__ = kind
        norm.__dict__.update(process_group=process_group, channel_last=channel_last, fuse_relu=False)
    return module


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Split the world into groups of ``group_size`` consecutive ranks; returns this process's, None for size 0.

    Every process must call it.

    Raises:
        RuntimeError: No process group.
        ValueError: The number of processes is not a multiple of ``group_size``.
    """
    if group_size == 0:
        return None
    require_process_group("create_syncbn_process_group")
    world, rank = dist.get_world_size(), dist.get_rank()
    if group_size < 0 or group_size > world or world % group_size:
        raise ValueError(
            f"group_size={group_size} in a world of {world} - groups must divide the world evenly - "
            "pass a divisor of the number of processes."
        )
    mine: dist.ProcessGroup | None = None
    for start in range(0, world, group_size):
        group = dist.new_group(list(range(start, start + group_size)))
        if start <= rank < start + group_size:
            mine = group
    return mine
