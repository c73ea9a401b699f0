"""The dispatcher: autocast keys, overloads, registrations, and watching what runs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode

# Device types with an autocast key of their own. A torch that does not know a key yet leaves that device type out.
_AUTOCAST_KEYS: Final = {
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
    "hpu": "AutocastHPU",
    "xla": "AutocastXLA",
    "ipu": "AutocastIPU",
    "mtia": "AutocastMTIA",
    "maia": "AutocastMAIA",
}


def autocast_key(device_type: str) -> str | None:
    """The dispatch key of autocast on ``device_type``; None where this torch has none."""
    private = torch._C._get_privateuse1_backend_name()
    key = "AutocastPrivateUse1" if device_type == private else _AUTOCAST_KEYS.get(device_type)
    return key if key is not None and hasattr(torch._C.DispatchKey, key) else None


def autocast_device_types() -> list[str]:
    """The device types that this torch can autocast: an added backend too, which has a module saying so."""
    added = torch._C._get_privateuse1_backend_name()
    found = list(filter(autocast_key, _AUTOCAST_KEYS))
    return [*found, added] if hasattr(getattr(torch, added, None), "get_amp_supported_dtype") else found


def aten_overloads(name: str) -> list[torch._ops.OpOverload]:
    """The overloads of ``aten::name``: "mm" its default one, "sum.dim_IntList" that one, "pow_.*" all but ``out=``."""
    packet_name, _, wanted = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    if packet is None:
        return []
    if wanted != "*":
        op = getattr(packet, wanted or "default", None)
        return [] if op is None else [op]
    ops = [getattr(packet, n) for n in packet.overloads() if "out" not in n.split("_") and "dimname" not in n.lower()]
    # TorchScript's own overloads, on strings and lists, are no ops of the dispatcher.
    return [op for op in ops if torch._C._dispatch_has_kernel(op_name(op))]


def op_name(op: torch._ops.OpOverload) -> str:
    """The dispatcher's name of ``op``, as in "aten::sum.dim_IntList"."""
    return str(op.name())  # type: ignore[no-untyped-call]


def has_kernel(op: torch._ops.OpOverload, key: str) -> bool:
    """Whether something is registered for ``op`` at the dispatch key named ``key``."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op_name(op), key))


def ops_with_kernel(key: str) -> frozenset[str]:
    """The names of all ops with something registered at the dispatch key named ``key``."""
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def keys_excluded(key: str) -> Callable[[], AbstractContextManager[object]]:
    """A factory of regions in which the dispatcher passes over ``key`` (in this thread), as native kernels do."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return functools.partial(torch._C._ExcludeDispatchKeyGuard, keys)


def composite(op: torch._ops.OpOverload) -> Callable[..., object]:
    """The kernel of ``op`` that is made of other ops, below every rule for ``op`` itself."""
    implicit, explicit = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.CompositeExplicitAutograd
    return functools.partial(op._op_dk, implicit if op.has_kernel_for_dispatch_key(implicit) else explicit)


def register_kernels(kernels: Mapping[torch._ops.OpOverload, Callable[..., object]], key: str, undo: ExitStack) -> None:
    """Make each of ``kernels`` the one for its op at the dispatch key named ``key``, until ``undo`` runs."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    undo.callback(library._destroy)
    with warnings.catch_warnings():
        # "Overriding a previously registered kernel": that is the intention.
        warnings.simplefilter("ignore")
        for op, kernel in kernels.items():
            library.impl(op, kernel, key)  # type: ignore[no-untyped-call]


def halves_without_cpu_convolution() -> frozenset[torch.dtype]:
    """The half dtypes whose convolutions oneDNN does not compute natively on this processor."""
    supported = {
        torch.float16: getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None),
        torch.bfloat16: getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None),
    }
    on = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return frozenset(dtype for dtype, ask in supported.items() if not (on and ask is not None and ask()))


def current_node() -> Any:
    """The node of the autograd graph that the engine runs in this thread; None outside of it."""
    return torch._C._current_autograd_node()


def innermost_dispatch_mode() -> TorchDispatchMode | None:
    """The dispatch mode that sees ops first, or None."""
    from torch.utils import _python_dispatch

    return _python_dispatch._get_current_dispatch_mode()


def flop_formula(op: torch._ops.OpOverload) -> Callable[..., int] | None:
    """The formula of torch's flop counter for ``op`` (on tensors, with ``out_val=``); None where it counts nothing."""
    from torch.utils.flop_counter import flop_registry

    packet = getattr(op, "overloadpacket", op)
    # The flop counter knows the attention of GPUs; that of CPUs takes its tensors in the same order.
    like = getattr(torch.ops.aten, packet.__name__.replace("_for_cpu", ""), packet)
    formula: Callable[..., int] | None = flop_registry.get(packet) or flop_registry.get(like)
    return formula
