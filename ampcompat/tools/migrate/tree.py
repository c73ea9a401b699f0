"""Migrating a directory: which files are read, and where ``native_amp.py`` goes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ampcompat.tools.check.documents import is_notebook
from ampcompat.tools.check.files import SUFFIXES, Text, Unreadable, decode, is_native_amp, read, sources
from ampcompat.tools.check.manifests import is_manifest, is_requirement, places
from ampcompat.tools.check.split_lines import indent_of, lines_of
from ampcompat.tools.migrate.change import Change
from ampcompat.tools.migrate.home import Home, homes, imported
from ampcompat.tools.migrate.methods import Program, program_of
from ampcompat.tools.migrate.parts import NAME, PARTS, needed_by, parts_named_in, parts_of, written
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
        changes = _with_native_amp(changes, [Path(path).resolve() for path in paths])
    return changes


def _with_native_amp(changes: list[Change], paths: Sequence[Path]) -> list[Change]:
    """``changes`` with the imports of ``native_amp`` as each file has to write them, and with its copies."""
    wanting = {change.path: _root_of(change) for change in changes if change.needs_amp}
    codes = {change.path: code for change in changes if (code := change.source()) is not None}
    copies = [change for change in changes if is_native_amp(change.path.name, codes.get(change.path, ""))]
    if not wanting and not copies:
        return changes
    found = homes(wanting, codes)
    program = program_of(codes)
    done = [_again(change, found.get(change.path), program) for change in changes]
    wanted_in: dict[Path, Change] = {copy.path.parent: copy for copy in copies}
    for change in changes:
        if change.path in found:
            wanted_in.setdefault(found[change.path].folder, change)
    parts = needed_by(_texts(changes, paths))
    read_in = [path.parent if path.is_file() else path for path in paths]
    kept = [change for change in done if change not in copies]
    for folder, wanting_it in wanted_in.items():
        is_wanted = any(home.folder == folder for home in found.values())
        is_seen = any(path in (folder, *folder.parents) for path in read_in)
        kept += _copy_in(folder, wanting_it, parts if is_seen else PARTS, is_wanted)
    return kept


def _again(change: Change, home: Home | None, program: Program) -> Change:
    """Migrate the file again, now that it is known where ``native_amp`` goes, and what the other files have."""
    if home is None and not change.todos and not program.models:
        return change  # nothing in it depends on them
    return migrate_file(change.path, change.name, "native", "" if home is None else home.package, program)


def _texts(changes: Sequence[Change], paths: Sequence[Path]) -> Iterator[str | None]:
    """The texts of a program: of what is migrated, and beside a single file of its neighbours. None: unreadable."""
    seen: set[Path] = set()
    for change in changes:
        if change.path.suffix in (*SUFFIXES, ".ipynb") and change.path.name != f"{NAME}.py":
            seen.add(change.path)
            yield _text(change.path)
    for path in paths:
        if path.is_file():
            beside = set(path.parent.glob("*.py")) - seen
            yield from (_text(file) for file in sorted(beside) if file.name != f"{NAME}.py")
            yield from (None for folder in imported(_text(path) or "") if (path.parent / folder).is_dir())


def _text(file: Path) -> str | None:
    try:
        return decode(read(file)).code
    except Unreadable:
        return None


def _root_of(change: Change) -> Path:
    """The directory that is migrated, which the names of changes are relative to."""
    return change.path.parents[len(Path(change.name).parts) - 1]


def _copy_in(folder: Path, wanting: Change, parts: frozenset[str], is_wanted: bool) -> list[Change]:
    """The copy in a folder: a new one, or one that has to get more parts.

    Args:
        folder: Its folder.
        wanting: A file that imports it, or the copy itself.
        parts: The parts that the program needs.
        is_wanted: Whether a file that is migrated now imports it.
    """
    path = folder / f"{NAME}.py"
    name = Path(os.path.relpath(path, _root_of(wanting))).as_posix()
    if not path.exists():
        return [Change(path, name, Text("", "utf-8"), written(parts), is_new=True)]
    old = decode(read(path))
    known = parts_of(old.code)
    if known is not None:
        return [Change(path, name, old, written(parts | known))]
    named = parts_named_in(old.code)
    if named is None and is_wanted:
        raise FileExistsError(
            f"{path} is there and is not what ampcompat writes; move it, or rename it and what imports it, and migrate"
            " again"
        )
    lacking = sorted(parts - named) if named is not None else []
    return [Change(path, name, problem=LACKING.format(", ".join(lacking)) if lacking else "")]


#: What is said of a copy that is not replaced, and has too few parts.
LACKING = (
    "was changed, or another version wrote it, and lacks what the code now needs: {}; move it and migrate again, or "
    "add what stands between these marks in the native_amp.py of ampcompat, and their names to its docstring"
)


def migrate_file(file: Path, name: str, to: str, package: str = "", program: Program | None = None) -> Change:
    """Describe what becomes of one file.

    Args:
        file: The file.
        name: Its path relative to the migrated directory.
        to: The target.
        package: For ``native``: the package that ``native_amp`` is in.
        program: For ``native``: what is known of all files that are migrated together.
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
        result = migrate_source(code, to, package, program)
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
