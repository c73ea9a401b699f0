"""The one object that holds state: everything that ``reset()`` clears is reachable from here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ampcompat._undo import finish


class State:
    """Process-wide state of ampcompat.

    Attributes:
        undo: Every change made to torch pushes its undo here; ``reset()`` runs them in reverse.
        warned: Keys of the warnings already given (see :func:`ampcompat._log.warn_once`).
        rooms: State owned by single modules, by module name, created on first use (see :meth:`room`).
    """

    def __init__(self) -> None:
        self.undo = ExitStack()
        self.warned: set[str] = set()
        self.rooms: dict[str, Any] = {}

    def room(self, name: str, make: Callable[[], Any]) -> Any:
        """The state kept under ``name``, made by ``make()`` when it is not there (first use, or after a reset)."""
        if name not in self.rooms:
            self.rooms[name] = make()
        return self.rooms[name]

    def reset(self) -> None:
        """Undo every change to torch and forget everything; live models and optimizers keep what they carry."""
        finish(self._clear)

    def _clear(self) -> None:
        self.undo.close()
        self.warned.clear()
        self.rooms.clear()


state = State()
