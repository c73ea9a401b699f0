"""Find the place in the user's program where an op runs: module, called function, line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from ampcompat import _torch
from ampcompat.tools.frames import ScriptLine, as_called_from, script_line

_KEY = "ampcompat place"
#: Operators whose tensor stands on the right.
_REFLECTED = (
    "__rdiv__",
    "__rtruediv__",
    "__rfloordiv__",
    "__rsub__",
    "__rmul__",
    "__radd__",
    "__rpow__",
    "__rmatmul__",
)
#: How far below the node of a function's result its other nodes are.
_MOST_NODES_OF_A_CALL = 64

R = TypeVar("R")


class Place(NamedTuple):
    """A place in the user's program."""

    #: Qualified name of the innermost module; "" for the model itself or one of no model, None outside of any.
    module: str | None
    kind: str  # its class name
    function: str  # the torch function or tensor method that was called, as in "softmax"
    line: ScriptLine | None  # the script's; None where nothing but torch's own code ran below the model
    model: str = ""  # class name of the model that the module is a part of; "" where amp was given none
    is_of_torch: bool = False  # whether torch has the module


NOWHERE = Place(None, "", "", None)


class Places(TorchFunctionMode):
    """Context that knows the place of the op that runs, forward or backward.

    Args:
        models: Models whose modules have names.
        outermost: For a forward that is run again: its model, which no frame names.
        bottom: And the frame that runs it. Lines of the script are looked for above it.
        called_at: And the line of the script that had called the model, for ops of which none is found.
    """

    def __init__(
        self,
        models: Iterable[torch.nn.Module],
        outermost: torch.nn.Module | None = None,
        bottom: FrameType | None = None,
        called_at: ScriptLine | None = None,
    ) -> None:
        super().__init__()
        self.bottom = bottom
        self.called_at = called_at
        self.outermost = outermost
        self.function = ""
        self.undo = ExitStack()
        self._names: dict[int, tuple[str, str]] = {}  # by id of a module: its qualified name, its model's class
        for model in models:
            for name, module in model.named_modules():
                self._names.setdefault(id(module), (name, type(model).__name__))

    def __enter__(self) -> Places:
        _torch.replace(torch.autograd.Function, "apply", classmethod(self._applied()), self.undo)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self.undo.close()

    def __torch_function__(
        self,
        func: Callable[..., R],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> R:
        before, self.function = self.function, _name_of(func)
        try:
            result = as_called_from(_caller_of(func), func, args, kwargs or {})
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
            if one is None or depth > _MOST_NODES_OF_A_CALL or _KEY in one.metadata or "AccumulateGrad" in one.name():
                continue
            one.metadata[_KEY] = place
            stack.extend((below, depth + 1) for below, _ in one.next_functions)

    def here(self) -> Place:
        """The place of the op that runs now."""
        node = _torch.current_node()
        if node is None:
            line = script_line(sys._getframe(1), self.bottom) or self.called_at
            module = _torch.running_module(sys._getframe(1), self.bottom) or self.outermost
            if module is None:
                return NOWHERE._replace(function=self.function, line=line)
            name, model = self._names.get(id(module), ("", ""))
            kind = type(module)
            is_of_torch = kind.__module__.startswith("torch.")
            return Place(name, kind.__name__, self.function, line, model, is_of_torch)
        place: Place = node.metadata.get(_KEY) or NOWHERE
        function = place.function or node.name().removesuffix("Backward0").lower()
        # The backward of a Function of the script's, or a hook.
        in_backward = script_line(sys._getframe(1), self.bottom, of_backward=True)
        return place._replace(function=function, line=in_backward or place.line or self.called_at)


def _name_of(func: Callable[..., object]) -> str:
    """The name of what the script calls, as in "softmax"; "div" for 1 / x."""
    name = getattr(func, "__name__", "")
    return name[3:-2] if name in _REFLECTED else name


def _caller_of(func: Callable[..., object]) -> FrameType | None:
    """The frame that has called ``func``, which has asked the mode."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == torch.overrides.__file__:
        frame = frame.f_back
    is_func_itself = frame is not None and frame.f_code is getattr(func, "__code__", None)
    return frame.f_back if is_func_itself and frame is not None else frame
