"""Setting an attribute of torch, and setting it back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any



def replace(owner: Any, name: str, value: Any, undo: ExitStack) -> None:
    """Set ``owner.name``; its undo is on ``undo`` first, so that an interrupt between the two leaves nothing behind."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(_delete, owner, name)
    setattr(owner, name, value)


def _delete(owner: Any, name: str) -> None:
    if name in vars(owner):
        delattr(owner, name)
