"""Migrating a directory: which files are read, and where ``native_amp.py`` goes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ampcompat.tools.check.documents import is_notebook
from ampcompat.tools.check.files import SUFFIXES, Text, Unreadable, decode, is_native_amp, read, sources
from ampcompat.tools.check.manifests import is_manifest, is_requirement, places
from ampcompat.tools.check.split_lines import indent_of, lines_of
from ampcompat.tools.migrate.change import Change
from ampcompat.tools.migrate.copied import NAME, TEXT
from ampcompat.tools.migrate.home import homes
from ampcompat.tools.migrate.result import MARK, Result
from ampcompat.tools.migrate.source import MENTION, migrate_source


def migrate_paths(paths: Sequence[str | Path], to: str = "ampcompat") -> list[Change]:
    """The changes of the files under several paths that could have some; nothing is written.

    Raises:
        FileNotFoundError: A path does not exist.
        FileExistsError: A file ``native_amp.py`` of other content is where this one would go.
    """
    wanted: dict[Path, str] = {}
    for path in paths:
        root = Path(path)
        if not str(path) or not root.exists():  # Path("") is the current folder
            raise FileNotFoundError(f"{str(path) or repr('')} does not exist; give a directory or a Python file")
        for name, place in sources(root.resolve()):
            wanted.setdefault(Path(place), name)
    changes = [migrate_file(file, name, to) for file, name in wanted.items()]
    if to == "native":
        changes = _with_native_amp(changes)
    return changes


def _with_native_amp(changes: list[Change]) -> list[Change]:
    """``changes`` with the imports of ``native_amp`` as each file has to write them, and with its copies."""
    codes = {change.path: code for change in changes if (code := change.source()) is not None}
    found = homes([change.path for change in changes if change.needs_amp], codes)
    done: list[Change] = []
    copies: dict[Path, Change] = {}
    for change in changes:
        home = found.get(change.path)
        if home is None:
            done.append(change)
            continue
        done.append(migrate_file(change.path, change.name, "native", home.package))
        for folder in home.copies():
            copies.setdefault(folder, _copy_in(folder, _root_of(change)))
    return done + [copy for copy in copies.values() if copy.changed or copy.notes]


def _root_of(change: Change) -> Path:
    """The directory that is migrated, which the names of changes are relative to."""
    return change.path.parents[len(Path(change.name).parts) - 1]


def _copy_in(folder: Path, root: Path) -> Change:
    """The copy in a folder: a new one, or the one that is there, which stays as it is.

    Raises:
        FileExistsError: Another file has its name.
    """
    path = folder / f"{NAME}.py"
    name = Path(os.path.relpath(path, root)).as_posix()
    if not path.exists():
        return Change(path, name, Text("", "utf-8"), TEXT, is_new=True)
    old = decode(read(path))
    if not is_native_amp(path.name, old.code):
        raise FileExistsError(
            f"{path} is there and is not what ampcompat writes; move it, or rename it and what imports it, and migrate"
            " again"
        )
    is_same = old.code == TEXT
    return Change(path, name, notes=[] if is_same else [(1, OTHER_COPY)])


#: What is said of a copy that is not the one of this version.
OTHER_COPY = "it was changed, or another version of ampcompat wrote it; it stays. To have it anew, move it and migrate"


def migrate_file(file: Path, name: str, to: str, package: str = "") -> Change:
    """Describe what becomes of one file.

    Args:
        file: The file.
        name: Its path relative to the migrated directory.
        to: The target.
        package: For ``native``: the package that ``native_amp`` is in.
    """
    try:
        old = decode(read(file))
        if is_native_amp(file.name, old.code):
            return Change(file, name)
        code = _without_apex(file, old.code, to) if is_manifest(str(file)) else old.code
        if is_manifest(str(file)) and file.suffix not in SUFFIXES:
            return Change(file, name, old, code, Result.of(code).todos)
        if is_notebook(file.name):
            is_of_apex = MENTION.search(old.code) is not None
            return Change(file, name, problem=NOTEBOOKS[to] if is_of_apex else "")
        result = migrate_source(code, to, package)
        if result.code == old.code and not result.todos and not result.notes:
            return Change(file, name)
        old.encode(result.code)
        return Change(file, name, old, result.code, result.todos, "", result.notes, result.needs_amp)
    except Unreadable as problem:
        return Change(file, name, problem=f"the file {problem}")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        if file.suffix not in SUFFIXES:
            return Change(file, name, problem="is not a Python file")
        reason = problem.msg if isinstance(problem, SyntaxError) else str(problem) or type(problem).__name__
        return Change(file, name, problem=f"cannot be parsed ({reason})")


def _without_apex(file: Path, text: str, to: str) -> str:
    """A manifest: a line of requirements is replaced or dropped, other places that install apex are marked."""
    lines = lines_of(text, keepends=True)
    for line, start in reversed(list(places(str(file), text))):
        whole = lines[line - 1]
        end = whole[len(whole.rstrip("\r\n")) :] or "\n"
        if start > 1 and MARK.strip() in lines[start - 2]:
            continue
        if file.suffix in REQUIREMENTS and is_requirement(whole):
            lines[line - 1 : line] = [f"{MARK}{FROM_CHECKOUT}{end}", f"ampcompat{end}"] if to == "ampcompat" else []
        else:
            instead = FROM_CHECKOUT if to == "ampcompat" else "nothing takes its place"
            mark = f"{indent_of(lines[start - 1])}{MARK}apex is not needed any more: {instead}{end}"
            lines.insert(start - 1, mark)
    return "".join(lines)


#: Suffixes of files of requirements, one a line.
REQUIREMENTS = (".txt", ".in")
FROM_CHECKOUT = "no package index has ampcompat: install it from a checkout (pip install PATH)"
#: What is said of a notebook that names apex.
NOTEBOOKS = {
    "ampcompat": "is a notebook, and left alone: call ampcompat.install_as_apex() in it above the first import of apex",
    "native": f"is a notebook, and left alone: write import {NAME} as amp in it, and put {NAME}.py next to it by hand",
}
