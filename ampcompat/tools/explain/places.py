"""Find the place in the user's program where an op runs: module, called function, line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from ampcompat import _torch
from ampcompat.tools.frames import ScriptLine, script_line
from ampcompat.tools.recording.modules import RunningModules

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


class Places(TorchFunctionMode):
    """Context that knows the place of the op that runs, forward or backward.

    Args:
        names: Qualified names of modules by id.
        bottom: Frames of the caller that are not to be taken for the user's: those from which the model is replayed.
    """

    def __init__(self, names: dict[int, str], bottom: FrameType | None = None) -> None:
        super().__init__()
        self.names, self.bottom = names, bottom
        self.modules = RunningModules(self._name_and_kind)
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

    def _name_and_kind(self, module: torch.nn.Module, _around: object) -> tuple[str, str]:
        return self.names.get(id(module), ""), type(module).__name__

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
