"""The state of the process: one object, to which each module adds the part that it owns.

A part is a dataclass, declared and kept by the module that writes it, in which others find it by its name::

    cast_state = state.add(CastState())

``state.parts()`` lists all parts, and ``state.reset()`` clears them, in place. This module knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

P = TypeVar("P", bound="Part")


@dataclass(eq=False)
class Part:
    """A part of the state; each of its fields has a default."""

    def clear(self) -> None:
        """Give each field its default."""
        fresh = type(self)()
        for part_field in fields(self):
            setattr(self, part_field.name, getattr(fresh, part_field.name))


@dataclass(eq=False)
class State(Part):
    """What :func:`reset` undoes and clears.

    Attributes:
        undo: Undo of every change made to torch; ``reset()`` runs them in reverse.
        done_once: What :meth:`undo_once` and :meth:`patch_once` were given.
        warned: Keys of the warnings and notes already given (see :func:`ampcompat._log.warn_once`).
    """

    undo: ExitStack = field(default_factory=ExitStack)
    done_once: set[object] = field(default_factory=set)
    warned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._parts: list[Part] = []

    def add(self, part: P) -> P:
        """Make ``part`` a part of the state; returns it, for the module to keep."""
        self._parts.append(part)
        return part

    def parts(self) -> list[Part]:
        """This part and all that were added."""
        return [self, *self._parts]

    def undo_once(self, undo: Callable[[], None]) -> None:
        """Make ``reset`` call ``undo``, which undoes what there is, if anything: once, however often this is called."""
        if undo not in self.done_once:
            self.done_once.add(undo)
            self.undo.callback(undo)

    def patch_once(self, patch: Callable[[Callable[..., Any], ExitStack], None], called: Callable[..., Any]) -> None:
        """Apply ``patch``, which makes torch call ``called``, until a reset: once, however often this is called."""
        if (patch, called) not in self.done_once:
            self.done_once.add((patch, called))
            patch(called, self.undo)

    def reset(self) -> None:
        """Undo every change to torch and forget everything; live models and optimizers keep what they carry."""
        try:
            self.undo.close()
        finally:
            for part in self.parts():
                part.clear()


state = State()
