"""Keeps compiled code in step with the rules, in this process and in those that share its on-disk cache.

torch compiles the rules' casts into its graphs but does not know them: a graph from before the rules, or from a plain
process's cache, would ignore them, and ours would serve a plain program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import ExitStack

from ampcompat import __version__, _torch
from ampcompat._state import state
from ampcompat._undo import on_undo


def bind(rules: Iterable[str]) -> None:
    """Compile under ``rules`` from here on: caches keyed to them, older graphs dropped, backward graphs without casts.

    Args:
        rules: One line for each thing that compiled code takes over; the order is of no matter. None at all means plain
            torch again.
    """
    unbind()
    lines = sorted(rules)
    if not lines:
        return
    digest = hashlib.sha256("\n".join([__version__, *lines]).encode()).hexdigest()[:16]
    undo: ExitStack = state.room("amp.compiled", ExitStack)
    on_undo(undo, _torch.forget_compiled_graphs)
    _torch.tag_compile_caches(f"ampcompat-{digest}", undo)
    _torch.compile_backward_without_autocast(undo)
    _torch.forget_compiled_graphs()


def unbind() -> None:
    """Undo :func:`bind`. Idempotent."""
    undo: ExitStack = state.room("amp.compiled", ExitStack)
    undo.close()
