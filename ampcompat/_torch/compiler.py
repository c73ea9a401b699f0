"""The compiler's settings and caches."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, TypeVar

import torch
from packaging.version import Version

from ampcompat._torch.version import TORCH

F = TypeVar("F", bound=Callable[..., object])
R = TypeVar("R")


#: Whether compiled code is compiled again when autocast's cache flag or dtype changes, not only its being on.
COMPILER_SEES_CACHE_FLAG: Final = Version("2.5") <= TORCH
#: Whether making the compiler's tables of torch's functions imports what compiles: seconds in every process.
MAKING_TABLES_IMPORTS_THE_COMPILER: Final = Version("2.5") > TORCH


def in_fake_mode() -> bool:
    """Whether operations run on stand-ins without values, as where torch 2.4's compiler tries a module out."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_tracing() -> bool:
    """Whether the compiler is at work in this thread: Python code that runs now may be its own."""
    return torch._guards.CompileContext.try_get() is not None


def run_uncompiled(function: Callable[..., R], *args: object) -> R:
    """``function(*args)``, which a compiler that traces the caller does not look into."""
    result: R = torch.compiler.disable(function)(*args)  # type: ignore[no-untyped-call]
    return result


def eager(function: F) -> F:
    """Decorate bookkeeping that a compiled step calls: it runs in eager mode, with all it calls.

    Otherwise the compiler traces it in pieces, and compiles each again when a state changes. ``torch.compiler.disable``
    does the same with a wrapper, which costs microseconds per call in eager code, too.
    """
    return _skipped(function, with_callees=True)


def skip_compile_of_frame(function: F) -> F:
    """Decorate a function like :func:`eager`, but let the compiler take what it calls (an optimizer's own step)."""
    return _skipped(function, with_callees=False)


def _skipped(function: F, with_callees: bool) -> F:
    function._torchdynamo_disable = True  # type: ignore[attr-defined] # not inlined into a caller
    hooks = torch._C._dynamo.eval_frame
    if hasattr(hooks, "set_code_exec_strategy"):  # nor compiled as a frame of its own
        actions = hooks._FrameAction
        callees = actions.SKIP if with_callees else actions.DEFAULT
        hooks.set_code_exec_strategy(function.__code__, hooks._FrameExecStrategy(actions.SKIP, callees))
    elif hasattr(hooks, "skip_code"):
        hooks.skip_code(function.__code__)
    return function


def run_untraced(function: Callable[..., R], *args: object, **kwargs: object) -> R:
    """Call ``function``, which neither ``torch.jit.trace`` nor ``make_fx`` records as a part of the caller."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

        with disable_proxy_modes_tracing():
            return function(*args, **kwargs)
    tracing: torch._C.TracingState | None = torch._C._get_tracing_state()
    if tracing is None:
        return function(*args, **kwargs)
    try:
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        return function(*args, **kwargs)
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def setting(module_name: str, name: str) -> Any:
    """The config module ``module_name`` if it exists and has the setting ``name``; None otherwise."""
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return None
    return module if hasattr(module, name) else None


def tag_compile_caches(tag: str, undo: ExitStack) -> None:
    """Add ``tag`` to the key of torch's on-disk compile caches, where torch has the setting."""
    config = setting("torch.compiler.config", "cache_key_tag")
    if config is None:
        return

    def untag() -> None:
        config.cache_key_tag = config.cache_key_tag.replace(tag, "")

    undo.callback(untag)
    config.cache_key_tag += tag


def compile_backward_without_autocast(undo: ExitStack) -> None:
    """Let compiled backward graphs run with casts off, as eager ones do, where torch can."""
    config = setting("torch._functorch.config", "backward_pass_autocast")
    if config is not None:
        undo.callback(setattr, config, "backward_pass_autocast", config.backward_pass_autocast)
        config.backward_pass_autocast = "off"


def keep_torch_functions_traceable(undo: ExitStack) -> None:
    """Make the compiler list torch's own functions before they are replaced.

    The compiler makes its tables of torch's functions once per process, by looking up names. A function that was
    replaced at that time is missing in them, so its original could not be traced ("Dynamo does not know how to trace
    the builtin"): not where the replacement calls it, nor after the replacement was undone.

    Args:
        undo: Its callbacks run in reverse, and the functions must be put back first: call this before replacing them.
    """
    tables = _function_tables()
    is_imported = bool(tables)
    if not is_imported or MAKING_TABLES_IMPORTS_THE_COMPILER:  # then they may be made later, of replacements
        undo.callback(_drop_function_tables)
        return
    for table in tables:
        table()


def _drop_function_tables() -> None:
    """Drop the compiler's tables of torch's functions, which it makes again when it needs them."""
    for table in _function_tables():
        table.cache_clear()


def _function_tables() -> list[Any]:
    """Return the compiler's cached functions that make its tables; none before the compiler is imported."""
    trace_rules = sys.modules.get("torch._dynamo.trace_rules")
    names = ("get_torch_obj_rule_map", "get_tensor_method")
    return [getattr(trace_rules, name) for name in names if hasattr(trace_rules, name)]


def forget_compiled_graphs() -> None:
    """Drop the compiled graphs of this process; compiled functions compile again when next called.

    Where nothing was compiled, nothing is done: on a machine with CUDA, torch's reset imports all of inductor, which
    costs seconds of processor time and prints a line about triton.
    """
    if _has_compiled():
        sys.modules["torch._dynamo"].reset()


def _has_compiled() -> bool:
    """Whether the compiler has looked at any function of this process since its last reset."""
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    if convert_frame is None:
        return False
    tracker = getattr(convert_frame, "input_codes", None)
    seen = getattr(tracker, "seen", None)
    if seen is None:  # this torch records it elsewhere: assume that it has
        return True
    return bool(seen)
