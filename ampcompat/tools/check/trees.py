"""Parsed files that are asked for twice: for their symbols, and, once all files are known, for their traps."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from ampcompat.tools.check.source import Source

#: Characters of source whose trees are kept: some hundred megabytes of nodes.
MOST_CHARACTERS = 2 * 2**20


class Trees:
    """Keep what was parsed until it is taken, as far as there is room.

    Another process begins with none: whichever is free takes a file, so that those of a large tree may be parsed again.
    """

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}
        self._room = MOST_CHARACTERS

    def __reduce__(self) -> tuple[type[Trees], tuple[()]]:
        return Trees, ()

    def keep(self, file: str, source: Source) -> None:
        """Keep the tree of ``file``, if there is room."""
        if len(source.code) <= self._room:
            self._room -= len(source.code)
            self._sources[file] = source

    def take(self, file: str) -> Source | None:
        """The tree of ``file``, which is then kept no longer; None where it was not kept."""
        source = self._sources.pop(file, None)
        if source is not None:
            self._room += len(source.code)
        return source


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off: trees have no cycles, and it would only examine them, again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
