"""Parsed files that are asked for twice: for their symbols, and, once all files are known, for their traps."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from ampcompat.tools.check.source import Source

#: Characters of source whose trees are kept: some hundred megabytes of nodes.
MOST_CHARACTERS = 2 * 2**20


class Trees:
    """Keep what was parsed until it is taken, up to :data:`MOST_CHARACTERS`.

    Another process begins with none: in a large tree whichever is free reads a file, and may have to parse it again.
    """

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}
        self._characters_left = MOST_CHARACTERS

    def __reduce__(self) -> tuple[type[Trees], tuple[()]]:
        return Trees, ()

    def keep(self, file: str, source: Source) -> None:
        """Keep the tree of ``file``, if it fits into what is left."""
        if len(source.code) <= self._characters_left:
            self._characters_left -= len(source.code)
            self._sources[file] = source

    def take(self, file: str) -> Source | None:
        """The tree of ``file``, which is then kept no longer; None where it was not kept."""
        source = self._sources.pop(file, None)
        if source is not None:
            self._characters_left += len(source.code)
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
