"""Migrating a directory: which files are read, and what one file tells of another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ampcompat.tools.check.documents import NotANotebook, Notebook, install_lines, installs, is_notebook
from ampcompat.tools.check.files import SUFFIXES, Unreadable, decode, read, sources
from ampcompat.tools.check.split_lines import lines_of
from ampcompat.tools.migrate.change import Change
from ampcompat.tools.migrate.elsewhere import USES, connected, imported_names, mark_uses
from ampcompat.tools.migrate.notebook import as_source, written
from ampcompat.tools.migrate.result import ALONE, MARK, Result, Tree
from ampcompat.tools.migrate.shared import codes_of, module_for, with_one_helper
from ampcompat.tools.migrate.source import migrate_source
from ampcompat.tools.migrate.workers import workers

#: Below this many files a process costs more to start than it saves: one file takes some 0.3 s.
FEW = 8


def migrate_tree(path: str | Path, to: str = "ampcompat") -> Iterator[Change]:
    """Changes for every file under ``path`` that could have some; nothing is written.

    Raises:
        FileNotFoundError: ``path`` does not exist.
        MissingLibcst: libcst is not installed.
    """
    for _, _, change in migrate_paths([path], to):
        if change is not None:
            yield change


def migrate_paths(paths: Sequence[str | Path], to: str = "ampcompat") -> Iterator[tuple[int, int, Change | None]]:
    """The changes under several paths, after lines without one that tell how many of how many files are done.

    Raises:
        FileNotFoundError: A path does not exist.
        MissingLibcst: libcst is not installed.
    """
    jobs: dict[Path, tuple[Path, str, str]] = {}
    for path in paths:
        root = Path(path)
        if not root.exists():
            raise FileNotFoundError(f"{path} does not exist; give a directory or a Python file")
        for name, path in sources(root.resolve()):
            file = Path(path)
            jobs.setdefault(file, (file, name, to))
    wanted = list(jobs.values())
    with workers(len(wanted), FEW) as apply:
        changes: list[Change] = []
        for change in apply(_job, wanted):
            changes.append(change)
            yield len(changes), len(wanted), None
    for change in with_one_helper(_told_of_each_other(changes, to)):
        yield len(wanted), len(wanted), change


def _job(job: tuple[Path, str, str]) -> Change:
    return migrate_file(*job)


def _told_of_each_other(changes: list[Change], to: str) -> list[Change]:
    """``changes`` of files that reach the scaler of another, or with marks that say where ``amp.initialize`` stands."""
    makers = [change for change in changes if change.makes]
    if not makers:
        return changes
    codes = codes_of(changes)
    imports = {path.stem: imported_names(code) for path, code in codes.items()}
    near = {maker.path: connected(maker.path.stem, imports) for maker in makers}
    made_in = ", ".join(f"{change.name}:{change.makes}" for change in makers)
    told = []
    for change in changes:
        if change.needs:
            mine = [maker for maker in makers if change.path.stem in near[maker.path]]
            helper = _helper_for(change.path, mine, codes)
            change = migrate_file(change.path, change.name, to, Tree(made_in, helper))
        told.append(change)
    sharing = {change.path.stem for change in told if change.shares}
    told = [
        migrate_file(c.path, c.name, to, Tree(trains_elsewhere=True)) if sharing & near.get(c.path, set()) else c
        for c in told
    ]
    for maker in makers:
        told = [
            _with_uses_marked(c, maker, codes[c.path]) if c.path.stem in near[maker.path] and c.path in codes else c
            for c in told
        ]
    return told


def _helper_for(path: Path, makers: list[Change], codes: Mapping[Path, str]) -> str:
    """What a file imports to reach the scaler that others make; ``""`` where it cannot."""
    folders = {maker.path.parent for maker in makers}
    if len(folders) != 1 or any(maker.caller is None for maker in makers):
        return ""
    folder = folders.pop()
    if not all(module_for(maker.path, folder, codes) for maker in makers):
        return ""
    return module_for(path, folder, codes)


def _with_uses_marked(change: Change, maker: Change, code: str) -> Change:
    """A file with marks where it steps an optimizer, or reads gradients, that the scaler of another file scales."""
    if change.makes or change.shares or not USES.search(code):
        return change
    try:
        result = mark_uses(change.new or code, maker.optimizers, f"{maker.name}:{maker.makes}")
        if result.code == (change.new or code):
            return change
        return replace(change, old=change.old or decode(read(change.path)), new=result.code, todos=result.todos)
    except (Unreadable, SyntaxError, ValueError, RecursionError, MemoryError):
        return change  # said of the file already


def migrate_file(file: Path, name: str, to: str, tree: Tree = ALONE) -> Change:
    """Describe what becomes of one file.

    Args:
        file: The file.
        name: Its path relative to the migrated directory.
        to: The target.
        tree: What the other files say.

    Raises:
        MissingLibcst: libcst is not installed.
    """
    try:
        old = decode(read(file))
        if installs(file.name):
            return Change(file, name, old, *_installs(old.code, to))
        if is_notebook(file.name):
            return Change(file, name, old, *_notebook(old.code, to))
        result = migrate_source(old.code, to, tree)
        if result.code == old.code and not result.todos:
            return Change(file, name, makes=result.makes, needs=result.needs)
        old.encode(result.code)
        made = (result.notes, result.makes, result.needs, result.shares, result.optimizers, result.caller)
        return Change(file, name, old, result.code, result.todos, "", *made)
    except Unreadable as problem:
        return Change(file, name, problem=f"the file {problem}")
    except NotANotebook as problem:
        return Change(file, name, problem=str(problem))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        if file.suffix not in (*SUFFIXES, ".ipynb"):
            return Change(file, name, problem="is not a Python file")
        reason = problem.msg if isinstance(problem, SyntaxError) else str(problem) or type(problem).__name__
        return Change(file, name, problem=f"cannot be parsed ({reason})")


def _notebook(text: str, to: str) -> tuple[str, list[tuple[int, str]]]:
    """A notebook with its cells migrated as one source."""
    notebook = Notebook.read(text)
    code = as_source(notebook)
    result = migrate_source(code, to)
    new = written(text, notebook, result.code) if result.code != code else text
    notes = [message for _, message in result.todos]
    lines = [(number, line) for number, line in enumerate(lines_of(new), 1) if MARK in line]
    return new, [(next((n for n, line in lines if message[:40] in line), 1), message) for message in notes]


def _installs(text: str, to: str) -> tuple[str, list[tuple[int, str]]]:
    """A file that says what is to be installed: a requirement is replaced or dropped, other ways are marked."""
    lines = lines_of(text, keepends=True)
    for number in reversed(list(install_lines(text))):
        line = lines[number - 1]
        end = line[len(line.rstrip("\r\n")) :]
        if number > 1 and MARK.strip() in lines[number - 2]:
            continue
        if REQUIREMENT.match(line):
            lines[number - 1] = f"ampcompat{end}" if to == "ampcompat" else ""
            continue
        instead = "install ampcompat" if to == "ampcompat" else "nothing takes its place"
        indent = line[: len(line) - len(line.lstrip())]
        lines.insert(number - 1, f"{indent}{MARK}apex is not needed any more: {instead}{end or chr(10)}")
    new = "".join(lines)
    return new, Result.of(new).todos


# A line of a requirements file that asks for nothing but apex.
REQUIREMENT = re.compile(r"(-e\s+)?(apex\b|nvidia[-_]apex\b|git\+\S*nvidia/apex\S*)[^'\"\],]*$", re.IGNORECASE)
