"""Finding and reading sources of an untrusted directory: no link is followed, only plain files are opened."""

from __future__ import annotations

import io
import os
import stat
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ampcompat.tools.check.documents import is_notebook
from ampcompat.tools.check.manifests import is_manifest

LARGEST = 4 * 2**20
"""Files above this many bytes are reported, not read: no hand-written source comes near."""

SKIPPED_DIRECTORIES = {"__pycache__", "node_modules", "site-packages", ".git", ".hg", ".svn", ".tox", ".nox", ".eggs"}
SUFFIXES = (".py", ".pyw", ".pyi")


class Unreadable(Exception):
    """The file cannot be scanned; the message says why."""


@dataclass(frozen=True)
class Text:
    """A decoded source: ``code``, and what is needed to write it back byte for byte."""

    code: str
    encoding: str

    def encode(self, code: str) -> bytes:
        """``code`` as bytes in the encoding that the file had."""
        return code.encode(self.encoding)


def is_native_amp(name: str, code: str) -> bool:
    """Whether a file is what ``ampcompat migrate --to native`` has put there."""
    return name == "native_amp.py" and "ampcompat migrate --to native`` put this file here" in code


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """Files to read under ``root`` (or ``root`` itself, whatever its suffix), sorted, without links and environments.

    Python files, notebooks, and files that say what is to be installed, each by its name relative to ``root``, with
    ``/`` between its parts, and by its path.

    Directories that cannot be listed are skipped; hard links are files like others.
    """
    if not root.is_dir():
        yield root.name, str(root)
        return
    rest = [(str(root), "")]
    while rest:
        folder, prefix = rest.pop()
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            continue
        directories = []
        for entry in entries:
            name = entry.name
            if entry.is_dir(follow_symlinks=False):
                directories += [(entry.path, f"{prefix}{name}/")] if _is_scanned(entry) else []
            elif (name.endswith(".py") or is_notebook(name) or is_manifest(prefix + name)) and not entry.is_symlink():
                yield prefix + name, entry.path
        rest += reversed(directories)


def _is_scanned(directory: os.DirEntry[str]) -> bool:
    environment = os.path.lexists(os.path.join(directory.path, "pyvenv.cfg"))
    return directory.name not in SKIPPED_DIRECTORIES and not environment


def read(path: str | Path) -> bytes:
    """The bytes of a plain file.

    Raises:
        Unreadable: a link, a pipe or device, a file without permission, or one above :data:`LARGEST`.
    """
    # O_NONBLOCK: a pipe put there by someone must not hang the scan. O_NOFOLLOW: a link may lead outside.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as problem:
        raise Unreadable(f"cannot be opened: {getattr(problem, 'strerror', None) or problem}") from None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise Unreadable("is not a plain file")
        if facts.st_size > LARGEST:
            raise Unreadable(f"has {facts.st_size} bytes; files above {LARGEST} are not scanned")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(LARGEST)  # whatever it grows to meanwhile
    finally:
        os.close(descriptor)


def decode(data: bytes) -> Text:
    """Text of a source file, as Python reads it: UTF-8, or the charset that its coding comment declares.

    Raises:
        Unreadable: It is not text of that charset.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return Text(data.decode(encoding), encoding)
    except (SyntaxError, LookupError, ValueError) as problem:
        raise Unreadable(f"is not UTF-8, and declares no other charset that fits ({problem})") from None
