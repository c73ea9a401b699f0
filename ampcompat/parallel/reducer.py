"""``Reducer``: gradients averaged by hand, when the script says so."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn

from ampcompat.amp.ddp import broadcast_masters
from ampcompat.parallel.distributed import flat_dist_call, require_process_group


class Reducer:
    """Averages gradients over all processes on :meth:`reduce`.

    Args:
        module_or_grads_list: A module, whose parameters (and their masters, where apex left each rank its own) are
            broadcast from rank 0 now; or the gradients themselves.

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
            broadcast_masters(self.module, dist.group.WORLD, set())
        else:
            self.grads = list(module_or_grads_list)

    def reduce(self) -> None:
        """Replace every gradient by its mean over the processes, one all-reduce a dtype and device."""
        grads = self.grads
        if self.module is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat_dist_call(grads, dist.all_reduce)
