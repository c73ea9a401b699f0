"""Find the place in the user's program where an op runs: module, called function, line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ampcompat import _torch
from ampcompat.tools.frames import ScriptLine, script_line

_KEY = "ampcompat place"

R = TypeVar("R")


class Place(NamedTuple):
    """A place in the user's program.

    Attributes:
        module: Qualified name of the innermost module; "" for the model itself, None outside of any.
        kind: Its class name.
        function: The torch function or tensor method that was called, as in "softmax".
        line: The script's line; None where nothing but torch's own code ran below the model.
    """

    module: str | None
    kind: str
    function: str
    line: ScriptLine | None


NOWHERE = Place(None, "", "", None)


class RunningModules:
    """The modules whose forwards run now.

    Args:
        names: Qualified names of modules by id.

    Attributes:
        stack: Qualified name and class name of each, outermost first.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names
        self._handles: list[RemovableHandle] = []
        self.stack: list[tuple[str, str]] = []

    @property
    def innermost(self) -> tuple[str, str] | None:
        """The module that runs, None outside of any."""
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
        self.stack.append((self._names.get(id(module), ""), type(module).__name__))

    def _leave(self, module: torch.nn.Module, args: object, output: object) -> None:
        if self.stack:  # else it began before start()
            self.stack.pop()


class Places(TorchFunctionMode):
    """Context that knows the place of the op that runs, forward or backward.

    Args:
        names: Qualified names of modules by id.
        bottom: Frames of the caller that are not to be taken for the user's: those from which the model is replayed.
    """

    def __init__(self, names: dict[int, str], bottom: FrameType | None = None) -> None:
        super().__init__()
        self.bottom = bottom
        self.modules = RunningModules(names)
        self.function = ""
        self.undo = ExitStack()

    def __enter__(self) -> Places:
        self.modules.start()
        _torch.replace(torch.autograd.Function, "apply", classmethod(self._applied()), self.undo)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self.undo.close()
        self.modules.stop()

    def __torch_function__(
        self,
        func: Callable[..., R],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> R:
        before, self.function = self.function, getattr(func, "__name__", "")
        try:
            result = func(*args, **(kwargs or {}))
            for out in result if isinstance(result, (list, tuple)) else (result,):
                if isinstance(out, torch.Tensor) and out.grad_fn is not None:
                    self._mark(out.grad_fn, self.here())
            return result
        finally:
            self.function = before

    def _applied(self) -> Callable[..., object]:
        """Make what ``autograd.Function.apply`` is meanwhile: torch shows it to no function mode."""
        original = vars(torch.autograd.Function)["apply"]  # a classmethod, of Python or (torch 2.15) of C

        def apply(cls: type, *args: object, **kwargs: object) -> object:
            result = original.__get__(None, cls)(*args, **kwargs)
            for out in result if isinstance(result, tuple) else (result,):
                node: Any = out.grad_fn if isinstance(out, torch.Tensor) else None
                if node is not None:
                    node.metadata.setdefault(_KEY, self.here()._replace(function=cls.__name__))
            return result

        return apply

    def _mark(self, node: Any, place: Place) -> None:
        """Note ``place`` on ``node`` and on the nodes that the same call made below it."""
        stack = [(node, 0)]
        while stack:
            one, depth = stack.pop()
            if one is None or depth > 6 or _KEY in one.metadata or "AccumulateGrad" in one.name():
                continue
            one.metadata[_KEY] = place
            stack.extend((below, depth + 1) for below, _ in one.next_functions)

    def here(self) -> Place:
        """The place of the op that runs now."""
        node = _torch.current_node()
        if node is None:
            name, kind = self.modules.innermost or (None, "")
            return Place(name, kind, self.function, script_line(sys._getframe(1), self.bottom))
        place: Place = node.metadata.get(_KEY) or NOWHERE
        function = place.function or node.name().removesuffix("Backward0").lower()
        # The backward of a Function of the script's, or a hook.
        in_backward = script_line(sys._getframe(1), self.bottom, of_backward=True)
        return place._replace(function=function, line=in_backward or place.line)
