"""Read the files of a directory, parse them, collect their apex symbols and mistakes.

Rules look at one file alone. What their hits come to is decided once all files are read: by the calls of
``amp.initialize`` in the same file, or else in files that an import ties to it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ampcompat._extensions import EXTENSIONS
from ampcompat.tools.check.documents import NotANotebook, Notebook, is_notebook
from ampcompat.tools.check.files import SUFFIXES, Unreadable, decode, is_native_amp, read, sources
from ampcompat.tools.check.findings import ERROR, NOTE, WARNING, Finding, Report
from ampcompat.tools.check.initializations import INITIALIZE, Initialization, initializations
from ampcompat.tools.check.manifests import in_commands, is_manifest, places
from ampcompat.tools.check.programs import Import, Programs, imports
from ampcompat.tools.check.rules import RULES, Suspect
from ampcompat.tools.check.source import SCALE_LOSS, UNPARSABLE, Source, mentions_apex
from ampcompat.tools.check.split_lines import lines_of
from ampcompat.tools.check.uses import symbols_of

#: Suffixes of files that hold Python.
READ = (*SUFFIXES, ".ipynb")
#: A comment that keeps the findings of its line out of the report.
IGNORE = re.compile(r"#\s*ampcompat:\s*ignore\b")
MENTION = re.compile(rf"^[ \t\f]*(from|import)[ \t]+({'|'.join(('apex', *EXTENSIONS))})\b", re.MULTILINE)
INSTALLED = (
    "apex is installed here: nothing has to be built any more; drop this, and install ampcompat from a checkout,"
    " since no package index has it"
)


@dataclass
class CheckedFile:
    """The Python of one file, and what is known of the file by itself.

    Attributes:
        name: Its path in the report.
        path: Where it is.
        text: The code; None where the file holds no Python, or cannot be read.
        lines: For each line of a notebook's code the line of the file; empty for other files.
        findings: Symbols in it, problems of the file itself, and its mistakes.
        suspects: What rules have found, before it is known which levels are in force.
        initializations: Its calls of ``amp.initialize``.
        imports: What it imports.
        uses_amp: Whether it initializes amp or scales a loss.
        has_python_suffix: Whether it is called what Python files and notebooks are; others may be given by their path.
    """

    name: str
    path: str
    text: str | None = None
    lines: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)
    initializations: list[Initialization] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)
    uses_amp: bool = False
    has_python_suffix: bool = True

    @property
    def names_apex(self) -> bool:
        """Whether its code names apex at all."""
        return self.text is not None and mentions_apex(self.text)

    def search(self, source: Source) -> None:
        """Ask the rules, and note what the judgement of this file and of others needs."""
        self.suspects = [suspect for rule in RULES for suspect in rule.suspects(source)]
        self.initializations = list(initializations(source))
        self.imports = list(imports(source))
        self.uses_amp = bool(source.calls_to(*INITIALIZE, *SCALE_LOSS, "apex.amp.init"))

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings at lines of the code, but for those that a comment there ignores."""
        ignored = self._ignored_lines()
        found = [finding for finding in findings if finding.line not in ignored]
        if self.lines:
            found = [replace(finding, line=self._line_of_file(finding.line)) for finding in found]
        self.findings += found

    def _ignored_lines(self) -> set[int]:
        """The lines of the code, from 1, with ``# ampcompat: ignore``."""
        if self.text is None or "ampcompat:" not in self.text:
            return set()
        return {number for number, line in enumerate(lines_of(self.text), 1) if IGNORE.search(line)}

    def _line_of_file(self, line: int) -> int:
        return self.lines[line - 1] if 0 < line <= len(self.lines) else 0


def scan(path: str | Path | Sequence[str | Path]) -> Report:
    """Check every Python file and notebook under one or several paths, and what installs apex there.

    Args:
        path: A directory, a file, or several; paths in the report are relative to a single one, else to where they are
            given from.

    Raises:
        FileNotFoundError: a path does not exist.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    files = [_read(name, file) for name, file in _named(paths)]
    is_searched = any(checked.names_apex for checked in files)
    for checked in files:
        _parse(checked, is_searched)
    _judge(files)
    findings = sorted(finding for checked in files for finding in checked.findings)
    return Report(str(paths[0]) if len(paths) == 1 else "", len(files), findings)


def scan_source(text: str, path: str = "<string>") -> list[Finding]:
    """Findings of one source text."""
    checked = CheckedFile(path, path, text)
    _parse(checked, is_searched=True)
    _judge([checked])
    return sorted(checked.findings)


def _named(paths: Sequence[str | Path]) -> Iterator[tuple[str, str]]:
    """Each file with its name for the report, once."""
    seen: set[str] = set()
    for path in paths:
        root = Path(path)
        if not str(path) or not root.exists():  # Path("") is the current folder
            raise FileNotFoundError(f"{str(path) or repr('')} does not exist; give a directory or a Python file")
        given, root = root, root.resolve()
        whole = root.is_dir()
        for name, file in sources(root):
            if file in seen:
                continue
            seen.add(file)
            yield (name if len(paths) == 1 else (given / name if whole else given).as_posix()), file


def _read(name: str, file: str) -> CheckedFile:
    """A file, with the lines of it that install apex."""
    is_python = os.path.splitext(file)[1] in READ
    try:
        text = decode(read(file)).code
        if is_native_amp(os.path.basename(file), text):
            return CheckedFile(name, file)
        notebook = Notebook.read(text) if is_notebook(os.path.basename(file)) else None
    except (Unreadable, NotANotebook) as problem:
        reason = f"the file {problem}" if is_python or is_manifest(file) else f"is not a Python file ({problem})"
        return CheckedFile(name, file, findings=[Finding(name, 0, 0, "file", "unreadable", WARNING, reason)])
    checked = CheckedFile(name, file, text, has_python_suffix=is_python)
    if notebook is not None:
        checked.text, checked.lines = notebook.code, notebook.lines
        checked.add(_installing(name, (place.line for place in in_commands(notebook.shell))))
        if checked.names_apex:
            checked.add(_left_out(name, line, reason) for line, reason in notebook.left_out)
    if is_manifest(file):
        checked.add(_installing(name, (place.line for place in places(file, text))))
        checked.text = text if is_python else None
    return checked


def _installing(name: str, lines: Iterable[int]) -> list[Finding]:
    """Lines that install apex, which nothing needs any more."""
    return [Finding(name, line, 0, "file", "installs_apex", NOTE, INSTALLED) for line in lines]


def _left_out(name: str, line: int, reason: str) -> Finding:
    note = f"Python 3 cannot parse this cell ({reason}); it is left out, and the others are read"
    return Finding(name, line, 0, "file", "unparsable_cell", NOTE, note)


def _parse(checked: CheckedFile, is_searched: bool) -> None:
    """Parse the code of a file, for the symbols in it.

    Args:
        checked: The file.
        is_searched: Whether the rules are asked, too.
    """
    is_other_notebook = bool(checked.lines) and not checked.names_apex  # no other file imports it
    if checked.text is None or is_other_notebook:
        return
    try:
        source = Source(checked.name, checked.text)
        if checked.names_apex:
            checked.add(symbols_of(source))
        if is_searched:
            checked.search(source)
    except UNPARSABLE as problem:
        checked.add([_unparsable(checked, checked.text, problem)])


def _unparsable(checked: CheckedFile, text: str, problem: BaseException) -> Finding:
    if not checked.has_python_suffix:
        return Finding(checked.name, 0, 0, "file", "not_python", ERROR, "is not a Python file")
    line, reason = 0, str(problem) or type(problem).__name__
    if isinstance(problem, SyntaxError):
        line, reason = problem.lineno or 0, problem.msg
    note = f"Python 3 cannot parse the file ({reason})"
    if MENTION.search(text):
        note += "; it imports apex - correct it first, or port it (2to3) if it is Python 2"
    return Finding(checked.name, max(line, 0), 0, "file", "unparsable", ERROR, note)


def _judge(files: Iterable[CheckedFile]) -> None:
    """Add to each file what its suspects come to, if a program that it is a part of uses amp."""
    by_path = {checked.path: checked for checked in files}
    programs = Programs({path: checked.imports for path, checked in by_path.items()})
    for path, checked in by_path.items():
        if not checked.suspects or not any(by_path[other].uses_amp for other in programs.program(path)):
            continue
        relatives = [by_path[other] for other in programs.relatives(path)]
        calls = checked.initializations or [call for other in relatives for call in other.initializations]
        judged = [suspect.judged(calls) for suspect in checked.suspects]
        checked.add(finding for finding in judged if finding is not None)
