"""Tracebacks without the tools' frames, which would stand between the user's line and the error."""

from __future__ import annotations

import os
from types import TracebackType

import torch

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_TOOLS = (os.path.join(_OURS, "tools", "explain") + os.sep, os.path.join(_OURS, "tools", "report") + os.sep)
_TORCH = os.path.dirname(torch.__file__) + os.sep
#: Torch's frames that a mode of ours is called from, and that it calls.
_CALLERS = tuple(
    os.path.join(_TORCH, *path)
    for path in (("overrides.py",), ("_ops.py",), ("_compile.py",), ("_dynamo", "eval_frame.py"))
)


def hide_tools(trace: TracebackType | None, all_of_ours: bool = False) -> TracebackType | None:
    """Take the frames of explain and report out of ``trace``, in place, and the frames of torch that come with them.

    Args:
        trace: Of an error.
        all_of_ours: Take out every frame of ampcompat that a frame of the user's comes after, as those of an
            initialized model's forward.

    Returns:
        The first frame that stays.
    """
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    files = [entry.tb_frame.f_code.co_filename for entry in entries]
    gone = set[int]()
    for at, file in enumerate(files):
        if file.startswith(_TOOLS):
            gone |= _with_callers(entries, files, at)
    if all_of_ours:
        of_user = [at for at, file in enumerate(files) if not file.startswith((_OURS, _TORCH, "<"))]
        gone.update(at for at, file in enumerate(files) if file.startswith(_OURS) and at < max(of_user, default=-1))
    stay = [entry for at, entry in enumerate(entries) if at not in gone]
    for entry, following in zip(stay, [*stay[1:], None], strict=True):
        entry.tb_next = following
    return stay[0] if stay else None


def _with_callers(entries: list[TracebackType], files: list[str], at: int) -> set[int]:
    """The frame ``at``, of a tool, and the frames of torch around it that it was called from and that it calls."""
    first, last = at, at
    while first > 0 and files[first - 1] in _CALLERS:
        first -= 1
    while last + 1 < len(files) and files[last + 1] in _CALLERS:
        last += 1
    # A function of torch's that asks a mode is entered once more from there.
    is_inside = first > 0 and last + 1 < len(entries)
    if is_inside and entries[first - 1].tb_frame.f_code is entries[last + 1].tb_frame.f_code:
        first -= 1
    return set(range(first, last + 1))
