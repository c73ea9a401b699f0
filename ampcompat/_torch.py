"""Every private torch call and every version check of the project.

When a new torch breaks something, this is the file to mend.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from packaging.version import Version

from ampcompat._state import State

TORCH: Final = Version(torch.__version__.split("+")[0])


# -- gradients -------------------------------------------------------------------------------------------------------
def peek(flag: torch.Tensor) -> float:
    """The value of a 0-dim float32 tensor in host memory, read without dispatching an op."""
    return ctypes.c_float.from_address(flag.data_ptr()).value


def unscale_and_check_(grads: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Multiply ``grads`` (one device, one dtype, dense) in place and set ``found_inf`` to 1 on any inf or NaN."""
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse_scale)


# -- autocast state of this thread -------------------------------------------------------------------------------------
def autocast_nesting() -> int:
    """How many autocast regions (ours included) this thread is in."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def autocast_device_types() -> tuple[str, ...]:
    """Device types that this torch has autocast for."""
    known = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", "ipu", torch._C._get_privateuse1_backend_name())
    return tuple(name for name in known if torch.amp.is_autocast_available(name))


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


# -- kinds of models ---------------------------------------------------------------------------------------------------
def parallel_wrapper(model: torch.nn.Module) -> str | None:
    """The name of the data-parallel wrapper that ``model`` is, if it is one."""
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    if isinstance(model, wrappers) or type(model).__name__ == "FullyShardedDataParallel":
        return type(model).__name__
    return None


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` belongs to a lazy module that has not seen data yet."""
    return torch.nn.parameter.is_lazy(tensor)


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module behind ``torch.compile(module)``; ``model`` itself where it is not compiled."""
    inner = model.__dict__.get("_modules", {}).get("_orig_mod")
    return inner if type(model).__name__ == "OptimizedModule" and inner is not None else model


def disabled_optimizers(state: State) -> weakref.WeakSet[Any]:
    """Optimizers given to ``initialize(enabled=False)``."""
    found: weakref.WeakSet[Any] = state.room("disabled optimizers", weakref.WeakSet)
    return found


def is_scripting() -> bool:
    """Whether this code is being compiled by TorchScript."""
    return bool(torch._jit_internal.is_scripting())
