"""``DistributedDataParallel`` and ``Reducer``: gradients averaged over processes, with apex's keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampcompat import apex_C
from ampcompat._log import say
from ampcompat.amp.adapters.ddp import broadcast_masters, record
from ampcompat.parallel.reduction import Arithmetic, GradientReduction


def require_process_group(who: str) -> None:
    """Raise RuntimeError when ``torch.distributed`` is not up."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{who} without a process group - it needs torch.distributed - call "
            "torch.distributed.init_process_group(backend, ...) first, or leave the wrapper out in a single process."
        )


def flatten(bucket: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of one dtype and device to one vector; ``apex_C.flatten``."""
    return apex_C.flatten(bucket)


def unflatten(coalesced: Tensor, bucket: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Views of the vector ``coalesced`` in the shapes of the tensors in ``bucket``; ``apex_C.unflatten``."""
    return apex_C.unflatten(coalesced, bucket)


def split_half_float_double(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Put tensors of one dtype and device into one list each; bfloat16 ones too."""
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(buckets.values())


@torch.no_grad()
def apply_flat_dist_call(
    bucket: Sequence[Tensor], call: Callable[..., object], extra_args: tuple[object, ...] | None = None
) -> None:
    """Do a collective on tensors of one dtype and device by one call, in place; a sum becomes the mean.

    Args:
        bucket: The tensors, of any shapes.
        call: ``torch.distributed.all_reduce``, after which the result is divided by the number of processes, or
            ``broadcast``.
        extra_args: Positional arguments for ``call`` after the tensor.
    """
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    for tensor, part in zip(bucket, unflatten(flat, bucket), strict=True):
        tensor.copy_(part)


def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., object], extra_args: tuple[object, ...] | None = None
) -> None:
    """Do :func:`apply_flat_dist_call` on tensors of any dtypes, on any devices."""
    for bucket in split_half_float_double(tensors):
        apply_flat_dist_call(bucket, call, extra_args)


class DistributedDataParallel(nn.Module):
    """Averages gradients over processes at the end of each backward pass; each process owns one replica.

    Reproduces ``apex/parallel/distributed.py: DistributedDataParallel``. Layers may be unused, on some ranks or on all,
    and may be frozen, unfrozen or replaced after the wrap; a forward may have several backward passes. A parameter that
    no rank has a gradient of keeps None. Each backward pass must reach some parameter on every rank. The wrapper gives
    every rank the parameters and buffers of rank 0, and amp's masters of them.

    One host sync a backward pass, in which ranks agree on the gradients that there are.

    Args:
        module: The replica, already on its device.
        message_size: Elements after which a bucket of gradients is full.
        delay_allreduce: Send all buckets at the end of the backward pass, instead of each when it is full.
        shared_param: Refused with ValueError, as in apex.
        allreduce_trigger_params: No effect, said once on rank 0.
        retain_allreduce_buffers: No effect, said; the gradients themselves are reduced.
        allreduce_always_fp32: Reduce half gradients in float32 (twice the traffic).
        num_allreduce_streams: No effect, said; torch owns its streams.
        allreduce_communicators: No effect, said.
        gradient_average: Divide by the number of processes.
        gradient_predivide_factor: Divide by this before the reduction, and multiply by it over the number of
            processes after it.
        gradient_average_split_factor: No effect, said; apex had deprecated it.
        prof: No effect.
        process_group: Processes to reduce over (all).
        **torch_options: Keywords of torch's wrapper. No effect, said.

    Raises:
        RuntimeError: No process group. In the backward pass: a sparse gradient.
        TypeError: A keyword that neither wrapper has.
        ValueError: ``shared_param`` given, or a factor or size that is not positive.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: list[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: object = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
        process_group: dist.ProcessGroup | None = None,
        **torch_options: Any,
    ) -> None:
        super().__init__()
        require_process_group("DistributedDataParallel")
        if shared_param is not None:
            raise ValueError("shared_param was passed - apex withdrew it - use delay_allreduce=True.")
        if gradient_predivide_factor <= 0:
            raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} - must be positive - use 1.0.")
        if not isinstance(message_size, int) or message_size <= 0:
            raise ValueError(f"message_size={message_size} - a number of elements above 0 - leave it out.")
        _refuse_unknown(torch_options)
        without_effect = {
            "allreduce_trigger_params": allreduce_trigger_params,
            "retain_allreduce_buffers": retain_allreduce_buffers,
            "num_allreduce_streams": num_allreduce_streams != 1,
            "allreduce_communicators": allreduce_communicators,
            "gradient_average_split_factor": gradient_average_split_factor,
            **torch_options,
        }
        given = [name for name, value in without_effect.items() if value]
        if given:
            say(f"DistributedDataParallel: these have no effect: {', '.join(given)}")
        self.module = module
        group = dist.group.WORLD if process_group is None else process_group
        _broadcast_from_first(module, group)
        arithmetic = Arithmetic(allreduce_always_fp32, gradient_average, float(gradient_predivide_factor))
        self._allreduce_enabled = True
        self._in_no_sync = False
        self._reduction = GradientReduction(module, process_group, arithmetic, message_size, not delay_allreduce)
        record(self)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether this is not in ``no_sync``, whose gradients a later backward pass reduces; torch's name."""
        return not self._in_no_sync

    @property
    def allreduce_enabled(self) -> bool:
        """Whether backward passes reduce gradients, as far as ``disable_allreduce`` decides; apex's name."""
        return self._allreduce_enabled

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        self._reduction.before_forward()
        return self.module(*inputs, **kwargs)

    def enable_allreduce(self) -> None:
        """Reduce gradients in backward again, those of the passes before included."""
        self._allreduce_enabled = True
        self._follow()

    def disable_allreduce(self) -> None:
        """Leave gradients local until :meth:`enable_allreduce`, or to a reduction over ``amp.master_params``."""
        self._allreduce_enabled = False
        self._follow()

    def allreduce_fallback(self) -> None:
        """Reduce all gradients that there are now, also those that a backward pass has reduced already.

        For scripts that call it where :meth:`disable_allreduce` has left gradients local. All ranks must call it. One
        host sync.
        """
        self._reduction.reduce_now()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients local inside, as torch's wrapper does."""
        before = self._in_no_sync
        self._in_no_sync = True
        self._follow()
        try:
            yield
        finally:
            self._in_no_sync = before
            self._follow()

    def _follow(self) -> None:
        """Reduce gradients in backward passes, or leave them, as was asked last."""
        self._reduction.enabled = self._allreduce_enabled and not self._in_no_sync


def _refuse_unknown(torch_options: dict[str, Any]) -> None:
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    unknown = [name for name in torch_options if name not in known]
    if unknown:
        raise TypeError(
            f"DistributedDataParallel got {', '.join(unknown)} - neither apex's wrapper nor torch's has that keyword -"
            " leave it out."
        )


def _broadcast_from_first(module: nn.Module, group: Any) -> None:
    """Give every rank the parameters, buffers and masters of the group's first rank."""
    tensors = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
    flat_dist_call(tensors, dist.broadcast, (dist.get_global_rank(group, 0), group))
    broadcast_masters(module, group, set())


class Reducer:
    """Averages gradients over all processes on :meth:`reduce`.

    Args:
        module_or_grads_list: A module, whose parameters and buffers (and masters, where apex left each rank its own)
            are broadcast from rank 0 now; or the gradients themselves.

    Raises:
        RuntimeError: No process group.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        require_process_group("Reducer")
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            _broadcast_from_first(self.module, dist.group.WORLD)
        else:
            self.grads = list(module_or_grads_list)

    def reduce(self) -> None:
        """Replace every gradient by its mean over the processes, one all-reduce a dtype and device."""
        grads = self.grads
        if self.module is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat_dist_call(grads, dist.all_reduce)
