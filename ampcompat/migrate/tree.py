"""Migrating a directory: read, rewrite, show the difference, and write inside the directory only."""

from __future__ import annotations

import difflib
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ampcompat.check.documents import NotANotebook, Notebook, install_lines, installs, is_notebook
from ampcompat.check.files import SUFFIXES, Text, Unreadable, decode, read, sources
from ampcompat.check.lines import lines_of
from ampcompat.check.workers import Apply, workers
from ampcompat.migrate.result import MARK, Result
from ampcompat.migrate.source import migrate_source
from ampcompat.migrate.spread import Exposed, marked_uses, related


@dataclass(frozen=True)
class Change:
    """Describe what becomes of one file.

    Attributes:
        path: The file.
        name: Its path relative to the migrated directory.
        old: The text as read; None where nothing was translated.
        new: The text after the migration.
        todos: What was left to the reader, ``(line in the new text, message)``.
        problem: Why the file was left alone, or ``""``.
        exposed: What other files may use of it.
    """

    path: Path
    name: str
    old: Text | None = None
    new: str = ""
    todos: list[tuple[int, str]] = field(default_factory=list)
    problem: str = ""
    exposed: Exposed | None = None

    def text(self) -> str:
        """The text of the file after the migration, ``""`` where it cannot be read."""
        if self.old is not None:
            return self.new
        try:
            return decode(read(self.path)).code
        except Unreadable:
            return ""

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
        lines = difflib.unified_diff(old, new, f"a/{self.name}", f"b/{self.name}")
        return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)

    def write(self) -> None:
        """Replace the file in one move: it is never half written, and a link put in its place is not followed.

        Raises:
            OSError: the directory or the disk refuses it, or the path leads elsewhere by now; the file is as before.
        """
        if self.old is None:
            return
        if self.path.parent.resolve() != self.path.parent:
            raise OSError(f"{self.path.parent} became a link since it was read; nothing is written through it")
        mode = stat.S_IMODE(os.lstat(self.path).st_mode)
        descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name[:40]}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.old.encode(self.new))
            os.chmod(temporary, mode)
            os.replace(temporary, self.path)
        except BaseException:
            os.unlink(temporary)
            raise


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
    with workers(len(wanted)) as apply:
        changes: list[Change] = []
        for change in apply(_job, wanted):
            changes.append(change)
            yield len(changes), len(wanted), None
        changes = _across(changes, apply)
    for change in changes:
        yield len(wanted), len(wanted), change


def _job(job: tuple[Path, str, str]) -> Change:
    return migrate_file(*job)


def _across(changes: list[Change], apply: Apply) -> list[Change]:
    """``changes`` with marks in files that use what a translated one put under amp."""
    shown = {change.path.as_posix(): change.exposed for change in changes if change.exposed}
    if not shown:
        return changes
    texts = {c.path.as_posix(): text for c in changes if c.path.suffix == ".py" and (text := c.text())}
    uses = related(texts, shown)
    jobs = [
        (number, texts[path], path, {module: shown[module] for module in sorted(uses[path])})
        for number, change in enumerate(changes)
        if (path := change.path.as_posix()) in uses and not (change.exposed and change.exposed.managed)
    ]
    changes = list(changes)
    for number, marked in apply(_marked, jobs):
        change = changes[number]
        if marked not in ("", change.text()):
            old = change.old or decode(read(change.path))
            changes[number] = replace(change, old=old, new=marked, todos=Result.of(marked).todos)
    return changes


def _marked(job: tuple[int, str, str, dict[str, Exposed]]) -> tuple[int, str]:
    number, text, path, others = job
    try:
        return number, marked_uses(text, path, others)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return number, ""  # said of the file already


def migrate_file(file: Path, name: str, to: str) -> Change:
    """Describe what becomes of one file.

    Raises:
        MissingLibcst: libcst is not installed.
    """
    try:
        old = decode(read(file))
        if installs(file.name):
            return Change(file, name, old, *_installs(old.code, to))
        if is_notebook(file.name):
            return Change(file, name, old, *_notebook(old.code, to))
        result = migrate_source(old.code, to)
        if result.code == old.code and not result.todos and not result.exposed:
            return Change(file, name)
        old.encode(result.code)
        return Change(file, name, old, result.code, result.todos, exposed=result.exposed)
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
    result = migrate_source(notebook.code, to)
    new = notebook.written(result.code) if result.code != notebook.code else text
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
