"""The modules whose forwards run now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch.nn.modules import module as hooks
from torch.utils.hooks import RemovableHandle

T = TypeVar("T")


class RunningModules(Generic[T]):
    """A stack with an entry for each module whose forward runs, outermost first.

    Args:
        describe: Makes the entry of a module whose forward begins, given the entry around it: None outside of any.
    """

    def __init__(self, describe: Callable[[torch.nn.Module, T | None], T]) -> None:
        self._describe = describe
        self._handles: list[RemovableHandle] = []
        self.stack: list[T] = []

    @property
    def innermost(self) -> T | None:
        """The entry of the module that runs, None outside of any."""
        return self.stack[-1] if self.stack else None

    def start(self) -> None:
        """Follow the forwards that begin from here on, those of every module."""
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        """Follow no more."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: torch.nn.Module, args: object) -> None:
        self.stack.append(self._describe(module, self.innermost))

    def _leave(self, module: torch.nn.Module, args: object, output: object) -> None:
        if self.stack:  # else it began before start()
            self.stack.pop()
