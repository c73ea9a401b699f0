"""Notes on errors, which Python 3.10 does not have."""

from __future__ import annotations

import sys


def add_note(error: BaseException, note: str) -> None:
    """Append ``note`` to what ``error`` says: as a note, or on Python 3.10, which has none, to its text."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = (f"{error}\n{note}", *error.args[1:])
