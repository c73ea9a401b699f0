"""Two copies of a tree, one of them migrated: the original is untouched, neither run sees what the other wrote."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from ampcompat.tools.check.files import SKIPPED_DIRECTORIES
from ampcompat.tools.migrate.change import Change

#: Larger files are data: both copies link to the original.
LARGEST_COPY = 16 * 2**20


def copies(root: Path, changes: Iterable[Change], folder: Path) -> tuple[Path, Path]:
    """Copy ``root`` twice into ``folder``, and write ``changes`` into the second copy.

    Raises:
        OSError: the tree cannot be read, or the disk is full.
    """
    before, after = folder / "before", folder / "after"
    for copy in (before, after):
        shutil.copytree(root, copy, symlinks=True, ignore=_ignored, copy_function=_copy, ignore_dangling_symlinks=True)
    for change in changes:
        if change.changed and change.old is not None:
            (after / change.name).write_bytes(change.old.encode(change.new))
    return before, after


def _ignored(folder: str, names: list[str]) -> set[str]:
    return {n for n in names if n in SKIPPED_DIRECTORIES or os.path.lexists(os.path.join(folder, n, "pyvenv.cfg"))}


def _copy(source: str, target: str) -> None:
    if os.path.getsize(source) > LARGEST_COPY and not os.path.islink(source):
        os.symlink(os.path.abspath(source), target)
    else:
        shutil.copy2(source, target, follow_symlinks=False)
