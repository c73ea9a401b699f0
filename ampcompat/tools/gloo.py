"""The end of a process group of gloo's, whose threads may abort a process that ends beside them.

They drop Python objects that backward lent them, now and then after it has returned, and one that does so while its
process group is destroyed, or the interpreter ends, aborts the process. Waiting a moment before lets them finish.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: What gloo's threads take at most to drop what they hold.
SECONDS = 0.3
#: The module that defines ``destroy_process_group``; ``torch.distributed`` takes the name from there.
HOME = "torch.distributed.distributed_c10d"


@contextmanager
def let_go() -> Iterator[None]:
    """Let gloo's threads finish before a process group that a script inside has made, or the interpreter, ends."""
    wait_in_destroy()
    try:
        yield
    finally:
        wait_at_end()


def wait_in_destroy() -> None:
    """Have ``torch.distributed.destroy_process_group`` wait first, however it is imported, now or later."""
    if HOME in sys.modules:
        for name in (HOME, "torch.distributed"):
            _wrap(sys.modules[name])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def wait_at_end() -> None:
    """Wait where a process group is still up: scripts seldom destroy it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        time.sleep(SECONDS)


def _wrap(module: ModuleType) -> None:
    destroy: Callable[..., object] | None = getattr(module, "destroy_process_group", None)
    if destroy is None or hasattr(destroy, "_amp_waits"):
        return

    @functools.wraps(destroy)
    def destroy_process_group(*args: object, **kwargs: object) -> object:
        wait_at_end()
        return destroy(*args, **kwargs)

    destroy_process_group._amp_waits = True  # type: ignore[attr-defined]
    module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]


class _Finder(MetaPathFinder):
    """Wraps the function as soon as its module has been executed; leaves everything else to the other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the one module, whose loader wraps this once; None for any other."""
        if fullname != HOME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the class's own is found again
            loader.exec_module(module)
            _wrap(module)

        if loader is not None:
            loader.exec_module = exec_module
        return spec
