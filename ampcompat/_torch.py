"""Every private torch call and every version check of the project.

When a new torch breaks something, this is the file to mend.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from packaging.version import Version

from ampcompat._state import State

TORCH: Final = Version(torch.__version__.split("+")[0])

# --- multi-tensor arithmetic: lists of tensors in one launch where the device has a kernel ---------------------------
# The lists of one call are on one device, of one dtype, and laid out alike: the fused kernels walk raw memory and, on
# 2.4 and 2.13, silently mix up elements when the strides of a param and its gradient differ.

foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
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


def has_fused_kernels(device: torch.device) -> bool:
    """Whether torch's own optimizers would accept ``fused=True`` for params on ``device``."""
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return device.type in _get_fused_kernels_supported_devices()


# -- gradients -------------------------------------------------------------------------------------------------------
class HostCopy:
    """Numbers of a device on their way to host memory; starting the copy does not wait for the device.

    Args:
        values: 0-dim tensors of one dtype and device.
    """

    def __init__(self, values: list[torch.Tensor]) -> None:
        device = values[0].device
        streams: Any = None if device.type == "cpu" else getattr(torch, device.type, None)
        self._event: Any = None
        if hasattr(streams, "Event") and hasattr(streams, "current_stream"):
            self._host = torch.stack(values).to("cpu", non_blocking=True)  # pinned memory, by torch's own choice
            self._event = streams.Event()
            self._event.record(streams.current_stream(device))
        else:  # nothing would tell when an asynchronous copy is there
            self._host = torch.stack(values).to("cpu")

    def arrived(self) -> bool:
        """Whether :meth:`read` need not wait."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[float]:
        """The numbers; waits for the device where they have not arrived."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


def host_value(number: torch.Tensor) -> float | None:
    """The value of a 0-dim float32 tensor in host memory, read without an op; None where it lies elsewhere."""
    if number.device.type != "cpu" or not has_storage(number):
        return None
    return ctypes.c_float.from_address(number.data_ptr()).value


def unscale_and_check_(grads: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiply ``grads`` (one device, one dtype, dense) in place and set ``found_inf`` to 1 on any inf or NaN."""
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse_scale)


def update_scale_(
    scale: torch.Tensor, tracker: torch.Tensor, found: torch.Tensor, growth: float, backoff: float, interval: int
) -> None:
    """Move ``scale`` and count in ``tracker``, as ``GradScaler.update`` does, on their device."""
    torch._amp_update_scale_(scale, tracker, found, growth, backoff, interval)


# -- autocast state of this thread -------------------------------------------------------------------------------------
def autocast_nesting() -> int:
    """How many autocast regions (ours included) this thread is in."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def accelerator() -> str:
    """The device type of the accelerator that this torch sees, "cpu" without one; does not initialise it."""
    for device_type in ("cuda", "xpu", "mps", "hpu"):
        backend = getattr(torch, device_type, None)
        if backend is not None and callable(getattr(backend, "is_available", None)) and backend.is_available():
            return device_type
    return "cpu"


def caches_weights_across_grad_modes() -> bool:
    """Whether a cast made under ``no_grad`` may be handed to code that needs its gradient (torch before 2.7 did)."""
    return Version("2.7") > TORCH


# -- choke points of autograd ------------------------------------------------------------------------------------------
def patch_engine(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Wrap the one function through which ``backward`` and ``autograd.grad`` enter the engine; returns the undo."""
    owner: Any = torch.autograd
    original = owner._engine_run_backward
    owner._engine_run_backward = wrap(original)

    def undo() -> None:
        owner._engine_run_backward = original

    return undo


def patch_function_bodies(
    record: Callable[[Any], None], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Call ``record`` on the context of every ``autograd.Function`` forward and wrap its backward; returns the undo."""
    owner: Any = torch.autograd.function.BackwardCFunction
    originals = {name: owner.__dict__[name] for name in ("apply", "apply_boxed") if name in owner.__dict__}
    for name, original in originals.items():
        setattr(owner, name, wrap(original))

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        record(self)

    owner.__init__ = __init__

    def undo() -> None:
        for name, original in originals.items():
            setattr(owner, name, original)
        del owner.__init__

    return undo


# -- state dicts -------------------------------------------------------------------------------------------------------
def register_state_dict_hooks(
    module: Any, after_save: Callable[..., None], before_load: Callable[..., None], after_load: Any
) -> list[Any]:
    """Hook saving and loading of ``module``'s own tensors; hooks survive deepcopy and pickle. Returns the handles."""
    return [
        module._register_state_dict_hook(after_save),
        module._register_load_state_dict_pre_hook(before_load, with_module=True),
        module.register_load_state_dict_post_hook(after_load),
    ]


# -- data parallelism --------------------------------------------------------------------------------------------------
def patch_ddp_constructor(after: Callable[[Any, bool], None]) -> Callable[[], None]:
    """Call ``after(ddp, whether it broadcast rank 0's weights)`` for every DDP that is made; returns the undo."""
    owner: Any = torch.nn.parallel.DistributedDataParallel
    original = owner.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        after(self, bool(kwargs.get("init_sync", True)))

    owner.__init__ = __init__

    def undo() -> None:
        owner.__init__ = original

    return undo


class AnyDeviceDDP(torch.nn.parallel.DistributedDataParallel):
    """torch's, with synchronised batch norm off CUDA too: torch has no kernels for it there; ours needs none."""

    def _passing_sync_batchnorm_handle(self, module: torch.nn.Module) -> None:
        pass


def buffers_keyword() -> str:
    """What DDP's constructor calls the broadcast of buffers in forward."""
    known = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"


# -- kinds of models ---------------------------------------------------------------------------------------------------
def parallel_wrapper(model: torch.nn.Module) -> str | None:
    """The name of the data-parallel wrapper that ``model`` is, if it is one."""
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    if isinstance(model, wrappers) or type(model).__name__ == "FullyShardedDataParallel":
        return type(model).__name__
    return None


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a ``DTensor``: one rank's part of a tensor."""
    return type(tensor).__name__ == "DTensor" or type(tensor.data).__name__ == "DTensor"


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` belongs to a lazy module that has not seen data yet."""
    return torch.nn.parameter.is_lazy(tensor)


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module behind ``torch.compile(module)``; ``model`` itself where it is not compiled."""
    if type(model).__name__ != "OptimizedModule":
        return model
    inner: torch.nn.Module = model._modules.get("_orig_mod") or model
    return inner


def disabled_optimizers(state: State) -> weakref.WeakSet[Any]:
    """Optimizers given to ``initialize(enabled=False)``."""
    found: weakref.WeakSet[Any] = state.room("disabled optimizers", weakref.WeakSet)
    return found


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` holds data, unlike a fake tensor, which stands for one while torch compiles."""
    return not isinstance(tensor, torch._subclasses.fake_tensor.FakeTensor)


def is_scripting() -> bool:
    """Whether this code is being compiled by TorchScript."""
    return bool(torch._jit_internal.is_scripting())


# --- the dispatcher ---------------------------------------------------------------------------------------------------

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
    """The device types that this torch can autocast."""
    return [device_type for device_type in _AUTOCAST_KEYS if autocast_key(device_type)]


def aten_overloads(name: str) -> list[torch._ops.OpOverload]:
    """The overloads of ``aten::name``: "mm" its default one, "sum.dim_IntList" that one, "pow_.*" all but ``out=``."""
    packet_name, _, wanted = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    if packet is None:
        return []
    if wanted == "*":
        names = [n for n in packet.overloads() if "out" not in n.split("_") and "dimname" not in n.lower()]
    else:
        names = [n for n in packet.overloads() if n == (wanted or "default")]
    return [getattr(packet, n) for n in names]


def op_name(op: torch._ops.OpOverload) -> str:
    """The dispatcher's name of ``op``, as in "aten::sum.dim_IntList"."""
    return str(op.name())  # type: ignore[no-untyped-call]


def has_kernel(op: torch._ops.OpOverload, key: str) -> bool:
    """Whether something is registered for ``op`` at the dispatch key named ``key``."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op_name(op), key))


def keys_excluded(key: str) -> Callable[[], AbstractContextManager[Any]]:
    """A factory of regions in which the dispatcher passes over ``key`` (in this thread), as native kernels do."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return functools.partial(torch._C._ExcludeDispatchKeyGuard, keys)


def composite(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The kernel of ``op`` that is made of other ops, below every rule for ``op`` itself."""
    key = "CompositeImplicitAutograd"
    if not has_kernel(op, key):
        key = "CompositeExplicitAutograd"
    return functools.partial(op._op_dk, getattr(torch._C.DispatchKey, key))


class Registrations:
    """Kernels on the dispatcher, all taken back by one :meth:`close`."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def add(self, op: torch._ops.OpOverload, kernel: Callable[..., Any], key: str) -> None:
        """Make ``kernel`` the one for ``op`` at the dispatch key named ``key``."""
        with warnings.catch_warnings():
            # "Overriding a previously registered kernel": that is the intention.
            warnings.simplefilter("ignore")
            self._library.impl(op, kernel, key)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Take every kernel back; what was there before is in force again. Idempotent."""
        self._library._destroy()  # type: ignore[no-untyped-call]


def halves_without_cpu_convolution() -> frozenset[torch.dtype]:
    """The half dtypes whose convolutions oneDNN does not compute natively on this processor."""
    supported = {
        torch.float16: getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None),
        torch.bfloat16: getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None),
    }
    on = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return frozenset(dtype for dtype, ask in supported.items() if not (on and ask is not None and ask()))


# --- compiled code ----------------------------------------------------------------------------------------------------


def _setting(module_name: str, name: str) -> Any:
    """The config module ``module_name`` if it exists and has the setting ``name``, else None."""
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return None
    return module if hasattr(module, name) else None


def tag_compile_caches(tag: str) -> Callable[[], None]:
    """Add ``tag`` to the key of torch's on-disk compile caches, where torch has the setting; returns the undo."""
    config = _setting("torch.compiler.config", "cache_key_tag")
    if config is None:
        return lambda: None
    config.cache_key_tag += tag

    def undo() -> None:
        config.cache_key_tag = config.cache_key_tag.replace(tag, "")

    return undo


def compile_backward_without_autocast() -> Callable[[], None]:
    """Let compiled backward graphs run with casts off, as eager ones do, where torch can; returns the undo."""
    config = _setting("torch._functorch.config", "backward_pass_autocast")
    if config is None:
        return lambda: None
    before = config.backward_pass_autocast
    config.backward_pass_autocast = "off"

    def undo() -> None:
        config.backward_pass_autocast = before

    return undo


def forget_compiled_graphs() -> None:
    """Drop the compiled graphs of this process; compiled functions compile again when next called."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


# --- watching what runs -----------------------------------------------------------------------------------------------


def current_node() -> Any:
    """The node of the autograd graph that the engine runs in this thread; None outside of it."""
    return torch._C._current_autograd_node()


def innermost_dispatch_mode() -> Any:
    """The dispatch mode that sees ops first, or None."""
    from torch.utils import _python_dispatch

    return _python_dispatch._get_current_dispatch_mode()


def flop_formula(op: Any) -> Callable[..., int] | None:
    """The formula of torch's flop counter for ``op`` (on tensors, with ``out_val=``); None where it counts nothing."""
    from torch.utils.flop_counter import flop_registry

    formula: Callable[..., int] | None = flop_registry.get(getattr(op, "overloadpacket", op))
    return formula
