"""Frames: the script's lines, and tracebacks without the tools between them."""

from __future__ import annotations

import functools
import linecache
import os
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import NamedTuple, TypeVar

import torch

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TOOLS = (*(os.path.join(_OURS, "tools", tool) + os.sep for tool in ("explain", "recording", "report")), __file__)
_TORCH = os.path.dirname(torch.__file__) + os.sep
#: The package whose wrappers call torch's functions for the script.
_CASTS = os.path.join(_OURS, "amp", "casts") + os.sep
#: Where the autograd engine is entered.
_ENGINE = os.path.join(_TORCH, "autograd", "graph.py")
#: Torch's files that a mode of ours is called from, and that it calls.
_AROUND_TOOLS = tuple(
    os.path.join(_TORCH, *path)
    for path in (("overrides.py",), ("_ops.py",), ("_compile.py",), ("_dynamo", "eval_frame.py"))
)

R = TypeVar("R")


class ScriptLine(NamedTuple):
    """A line of the script's."""

    path: str
    number: int

    @property
    def file(self) -> str:
        """The path, relative to the working directory where it lies below."""
        relative = os.path.relpath(self.path)
        return self.path if relative.startswith("..") else relative

    @property
    def source(self) -> str | None:
        """The text; None where the file cannot be read."""
        return linecache.getline(self.path, self.number).strip() or None

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" + (f": {self.source}" if self.source else "")


def script_line(
    frame: FrameType | None, bottom: FrameType | None = None, of_backward: bool = False
) -> ScriptLine | None:
    """The innermost line of the script's that runs, from ``frame`` to below ``bottom``.

    With ``of_backward``, only of frames that the autograd engine has called.
    """
    while frame is not None and frame is not bottom:
        file = frame.f_code.co_filename
        if of_backward and file == _ENGINE:
            return None
        if _is_of_script(file):
            return ScriptLine(file, frame.f_lineno)
        frame = frame.f_back
    return None


def is_called_by_amp(frame: FrameType | None) -> bool:
    """Whether the op that runs is called by ampcompat's own code, and for no function that the script calls."""
    while frame is not None and frame.f_code.co_filename.startswith((*_TOOLS, *_AROUND_TOOLS)):
        frame = frame.f_back
    if frame is None:
        return False
    file = frame.f_code.co_filename
    return file.startswith(_OURS) and not file.startswith(_CASTS)


def _call_for_caller(function: Callable[..., R], args: Sequence[object], kwargs: Mapping[str, object]) -> R:
    return function(*args, **kwargs)


@functools.lru_cache(maxsize=1024)
def _code_at(file: str, line: int) -> CodeType:
    code = _call_for_caller.__code__
    return code.replace(co_filename=file, co_firstlineno=line - 1)  # the call is one line below the head


def as_called_from(
    frame: FrameType | None, function: Callable[..., R], args: Sequence[object], kwargs: Mapping[str, object]
) -> R:
    """Call ``function`` by a frame that has the file, line and globals of ``frame``.

    A warning of the function's then is one of the line that has called it, and not of the tool between.
    """
    if frame is None:
        return function(*args, **kwargs)
    code = _code_at(frame.f_code.co_filename, frame.f_lineno)
    call: Callable[..., R] = FunctionType(code, frame.f_globals)
    return call(function, args, kwargs)


def hide_tools(trace: TracebackType | None, all_of_ours: bool = False, last_too: bool = False) -> TracebackType | None:
    """Take the frames of tools out of ``trace``, in place, and the frames of torch that come with them.

    Args:
        trace: Of an error.
        all_of_ours: Take out every frame of ampcompat that a frame of the script's comes after, as those of an
            initialized model's forward.
        last_too: With it, take out those that no frame of the script's comes after too.

    Returns:
        The first frame that stays.
    """
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    files = [entry.tb_frame.f_code.co_filename for entry in entries]
    hidden: tuple[str, ...] = ()
    if any(file.startswith(_TOOLS) for file in files):
        hidden = (*_TOOLS, *_AROUND_TOOLS)
    last_of_script = max((at for at, file in enumerate(files) if _is_of_script(file)), default=-1)
    stay: list[TracebackType] = []
    after_hidden = False
    for at, (entry, file) in enumerate(zip(entries, files, strict=True)):
        if file.startswith(hidden) or _is_call_for_caller(entry):
            after_hidden = True
            continue
        if all_of_ours and file.startswith(_OURS) and (at < last_of_script or last_too):
            continue
        # A function of torch's that asks a mode is entered once more from there.
        if after_hidden and stay and file.startswith(_TORCH) and stay[-1].tb_frame.f_code is entry.tb_frame.f_code:
            stay.pop()
        stay.append(entry)
        after_hidden = False
    for entry, following in zip(stay, [*stay[1:], None], strict=True):
        entry.tb_next = following
    return stay[0] if stay else None


def _is_call_for_caller(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_name == _call_for_caller.__name__


def _is_of_script(file: str) -> bool:
    return not file.startswith((_TORCH, _OURS, "<"))
