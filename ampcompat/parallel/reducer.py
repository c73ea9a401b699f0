"""``Reducer``: gradients averaged by hand, when the script says so."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampcompat.parallel.distributed import require_process_group


class Reducer:
    """Averages gradients over all processes on :meth:`reduce`.

    Args:
        module_or_grads_list: A module, whose parameters are broadcast from rank 0 now, or the gradients themselves.

    Raises:
        RuntimeError: No process group.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        require_process_group("Reducer")
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            for param in self.module.parameters():
                dist.broadcast(param.detach(), 0)
        else:
            self.grads = list(module_or_grads_list)

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace every gradient by its mean over the processes, one all-reduce a dtype and device."""
        grads = self.grads
        if self.module is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for grad in grads:
            buckets.setdefault((grad.dtype, grad.device), []).append(grad)
        for bucket in buckets.values():
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for grad, part in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                grad.copy_(part.view_as(grad))
