"""``DistributedDataParallel``: torch's, taking apex's keywords beside its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from ampcompat import _torch
from ampcompat._log import say
from ampcompat.amp.properties import HALF_DTYPES


def require_process_group(who: str) -> None:
    """Raise RuntimeError when ``torch.distributed`` is not up."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{who} without a process group - it needs torch.distributed - call "
            "torch.distributed.init_process_group(backend, ...) first, or leave the wrapper out in a single process."
        )


@torch.no_grad()
def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., object], extra_args: tuple[object, ...] | None = None
) -> None:
    """Do a collective on many tensors, with one call a dtype and device, in place; a sum becomes the mean.

    Args:
        tensors: Tensors, of any dtypes, on any devices.
        call: ``torch.distributed.all_reduce``, after which the result is divided by the number of processes, or
            ``broadcast``.
        extra_args: Positional arguments for ``call`` after the tensor.
    """
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for bucket in buckets.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        call(flat, *(extra_args or ()))
        if call is dist.all_reduce:
            flat /= dist.get_world_size()
        for tensor, part in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


class _Reduction:
    """Communication hook: apex's arithmetic around one all-reduce a bucket."""

    def __init__(self, group: dist.ProcessGroup, always_fp32: bool, average: bool, predivide: float) -> None:
        self.group, self.always_fp32, self.predivide = group, always_fp32, predivide
        self.after = predivide / dist.get_world_size(group) if average else 1.0

    def __call__(self, state: None, bucket: Any) -> Future[Tensor]:
        flat = bucket.buffer()
        work = flat.float() if self.always_fp32 and flat.dtype in HALF_DTYPES else flat
        if self.predivide != 1.0:
            work.mul_(1.0 / self.predivide)
        future = dist.all_reduce(work, group=self.group, async_op=True).get_future()

        def finish(done: Future[list[Tensor]]) -> Tensor:
            # Scaled while still wide: a sum of halves may not fit before it is averaged.
            reduced: Tensor = done.value()[0]
            if self.after != 1.0:
                reduced.mul_(self.after)
            return reduced if reduced is flat else flat.copy_(reduced)  # type: ignore[no-any-return]

        result: Future[Tensor] = future.then(finish)
        return result


class DistributedDataParallel(_torch.AnyDeviceDDP):
    """torch's ``DistributedDataParallel`` with apex's keywords; each process owns one device and one replica.

    Args:
        module: The replica, already on its device.
        message_size: Elements in a reduction bucket; becomes torch's ``bucket_cap_mb``. A list here is taken as
            torch's ``device_ids``, which stands second in torch's signature.
        delay_allreduce: Tolerate parameters without a gradient, and put all gradients in one bucket size.
        shared_param: Refused with ValueError, as in apex.
        allreduce_trigger_params: No effect, said once on rank 0; torch finds its own order.
        retain_allreduce_buffers: No effect, said; the gradients themselves are reduced.
        allreduce_always_fp32: Reduce half gradients in float32 (twice the traffic).
        num_allreduce_streams: No effect, said; torch owns its streams.
        allreduce_communicators: No effect, said.
        gradient_average: Divide by the number of processes.
        gradient_predivide_factor: Divide by this before the reduction, and multiply by it over the number of
            processes after it.
        gradient_average_split_factor: No effect, said; apex had deprecated it.
        prof: No effect.
        **torch_options: torch's own keywords. ``broadcast_buffers`` is False unless given: apex did not broadcast them.

    Raises:
        RuntimeError: No process group.
        ValueError: ``shared_param`` given, or a factor or size that is not positive.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int | list[int] | list[torch.device] = 10_000_000,
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
        **torch_options: Any,
    ) -> None:
        require_process_group("DistributedDataParallel")
        if shared_param is not None:
            raise ValueError("shared_param was passed - apex withdrew it - use delay_allreduce=True.")
        if gradient_predivide_factor <= 0:
            raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} - must be positive - use 1.0.")
        if isinstance(message_size, list):
            torch_options.setdefault("device_ids", message_size)
            message_size = 10_000_000
        if message_size <= 0:
            raise ValueError(f"message_size={message_size} - a number of elements above 0 - leave it out.")
        unused = {
            "allreduce_trigger_params": allreduce_trigger_params,
            "retain_allreduce_buffers": retain_allreduce_buffers,
            "num_allreduce_streams": num_allreduce_streams != 1,
            "allreduce_communicators": allreduce_communicators,
            "gradient_average_split_factor": gradient_average_split_factor,
        }
        given = [name for name, value in unused.items() if value]
        if given:
            say(f"DistributedDataParallel: {', '.join(given)} have no effect; torch's engine schedules the reduction.")
        if "broadcast_buffers" not in torch_options:
            torch_options.setdefault(_torch.buffers_keyword(), False)
        torch_options.setdefault("find_unused_parameters", delay_allreduce)
        if delay_allreduce:
            message_size = max(message_size, sum(p.numel() for p in module.parameters()))
        widest = max((p.element_size() for p in module.parameters()), default=4)
        torch_options.setdefault("bucket_cap_mb", max(1, -(-message_size * widest // 2**20)))
        super().__init__(module, **torch_options)
        # Divided by the number of processes beforehand: torch's own arithmetic, and no Python on gloo's threads, which
        # abort a process that ends while they wait for the interpreter.
        as_torch = gradient_average and gradient_predivide_factor in (1.0, dist.get_world_size(self.process_group))
        if allreduce_always_fp32 or not as_torch:
            hook = _Reduction(
                self.process_group, allreduce_always_fp32, gradient_average, float(gradient_predivide_factor)
            )
            self.register_comm_hook(None, _annotated(hook))

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        """Let ``SyncBatchNorm`` be on any device: torch's own refuses the CPU, where ours works."""
        if self.device_type != "cpu":
            super()._passing_sync_batchnorm_handle(module)

    def enable_allreduce(self) -> None:
        """Reduce gradients in backward again."""
        self.require_backward_grad_sync = True

    def disable_allreduce(self) -> None:
        """Leave gradients local until :meth:`enable_allreduce` (torch's ``no_sync`` as a switch)."""
        self.require_backward_grad_sync = False


def _annotated(reduction: _Reduction) -> Callable[..., object]:
    # torch inspects __qualname__ and the annotations of a hook, as objects: a plain function, annotated by hand.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        return reduction(state, bucket)

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": Future[Tensor]}  # type: ignore[attr-defined]
    return hook
