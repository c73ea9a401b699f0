"""What becomes of one file: its diff, and writing it in one move."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from ampcompat.tools.check.files import Text, decode, read


@dataclass(frozen=True)
class Change:
    """Describe what becomes of one file.

    Attributes:
        path: The file.
        name: Its path relative to the migrated directory.
        old: The text as read; None where nothing was translated.
        new: The text after the migration.
        todos: What was left to the reader, as ``(line in the new text, message)``.
        problem: Why the file was left alone, or ``""``.
        notes: What differs, and needs no action, likewise.
        needs_amp: Whether it imports ``native_amp``.
        is_new: Whether the file does not exist yet.
    """

    path: Path
    name: str
    old: Text | None = None
    new: str = ""
    todos: list[tuple[int, str]] = field(default_factory=list)
    problem: str = ""
    notes: list[tuple[int, str]] = field(default_factory=list)
    needs_amp: bool = False
    is_new: bool = False

    def source(self) -> str | None:
        """The text of a Python file as it was; None for others and for what cannot be read."""
        if self.path.suffix != ".py" or self.problem:
            return None
        if self.old is not None:
            return self.old.code
        return decode(read(self.path)).code

    @property
    def changed(self) -> bool:
        """Whether there is something to write."""
        return self.old is not None and self.new != self.old.code

    def diff(self) -> str:
        """Unified diff, as ``patch -p1`` takes it; empty where nothing changed."""
        if self.old is None or not self.changed:
            return ""
        # patch knows one end of a line.
        old, new = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (self.old.code, self.new))
        before = "/dev/null" if self.is_new else f"a/{self.name}"
        lines = difflib.unified_diff(old, new, before, f"b/{self.name}")
        return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)

    def write(self) -> None:
        """Replace the file in one move: it is never half written.

        Raises:
            OSError: The directory or the disk refuses it; the file is as before.
        """
        if self.old is None:
            return
        like = self.path.parent if self.is_new else self.path
        mode = stat.S_IMODE(os.lstat(like).st_mode) & (0o666 if self.is_new else 0o7777)
        descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name[:40]}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.old.encode(self.new))
            os.chmod(temporary, mode)
            os.replace(temporary, self.path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
