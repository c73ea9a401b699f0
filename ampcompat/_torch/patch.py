"""Setting an attribute of torch, and setting it back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ampcompat._undo import on_undo


def replace(owner: Any, name: str, value: Any, undo: ExitStack) -> None:
    """Set ``owner.name``; its undo is on ``undo`` first, so that an interrupt between the two leaves nothing behind."""
    if name in vars(owner):
        on_undo(undo, setattr, owner, name, vars(owner)[name])
    else:
        on_undo(undo, _delete, owner, name)
    setattr(owner, name, value)


def _delete(owner: Any, name: str) -> None:
    if name in vars(owner):
        delattr(owner, name)
