"""The journal of a run: a line of JSON for each event, written by the process that runs, read by the one that waits.

The kinds of lines: ``ready`` (amp is imported), ``step`` (a :class:`.steps.Step`), ``end`` (an :class:`End`).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TypedDict

from ampcompat.tools.recording.steps import Scale, Step


class End(TypedDict, total=False):
    """Tell how the script ended, and how far it came in its use of amp.

    Attributes:
        error: What ended it, in one line; None at a normal end.
        unused: Why nothing ran under amp, as in "the script never called amp.initialize"; "" where something may have.
        blocks: ``scale_loss`` blocks.
        children: Whether it started other processes.
    """

    error: str | None
    unused: str
    blocks: int
    children: bool


class Journal:
    """A file of lines, flushed at once: whatever happens to the process, what it did so far is there to be read.

    A forked copy of the process writes nothing: its steps are not the script's.

    Args:
        path: The file.
        steps: Optimizer steps after which the script is ended.
    """

    def __init__(self, path: str, steps: int) -> None:
        # Open as long as the process runs: the script ends it as it likes.
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self.steps = steps
        self.made = 0
        self._process = os.getpid()

    def write(self, kind: str, content: object = None) -> None:
        """Write one line."""
        if os.getpid() == self._process:
            self.file.write(json.dumps({"kind": kind, "content": content}) + "\n")
            self.file.flush()

    def step(self, step: Step) -> None:
        """Write a step; end the script after the last."""
        if os.getpid() != self._process:
            return
        self.made += 1
        if self.made <= self.steps:
            self.write("step", asdict(step))
        # The exit of another thread would not end the script; the process that waits for this one ends it then.
        if self.made >= self.steps and threading.current_thread() is threading.main_thread():
            raise SystemExit(0)

    @contextlib.contextmanager
    def ending(self, seen: Callable[[], End]) -> Iterator[None]:
        """Write how the script ended, whatever it raises, and what ``seen`` then returns."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.write("end", {**seen(), "error": error_line(error)})


def read_step(content: dict[str, object]) -> Step:
    """The step of a line."""
    scales = [Scale(**one) for one in content.pop("scales")]  # type: ignore[attr-defined]
    return Step(scales=scales, **content)  # type: ignore[arg-type]


def error_line(error: BaseException | None) -> str | None:
    """``error`` in one line, or an exit status that is not zero; None for a good end."""
    if error is None:
        return None
    if isinstance(error, SystemExit):
        return None if error.code in (None, 0) else f"it exited with {error.code!r}"
    # The traceback of another process is behind a headline of its own, and ends in the error.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines = [f"{lines[0]} {lines[-1]}"]
    return ": ".join([type(error).__name__, *lines[:1]])
