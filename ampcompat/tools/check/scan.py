"""Read the files of a directory, parse them, collect their apex symbols and traps.

A file is parsed for its symbols where it names apex. Once it is known what all of them do with amp, every file of a
repository that uses it is searched for traps.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ampcompat._extensions import EXTENSIONS
from ampcompat.tools.check.bindings import apex_name
from ampcompat.tools.check.config import Config, is_ignored
from ampcompat.tools.check.documents import NotANotebook, Notebook, install_lines, installs, installs_apex, is_notebook
from ampcompat.tools.check.files import SUFFIXES, Unreadable, decode, is_native_amp, read, sources
from ampcompat.tools.check.findings import DIFFERS, ERROR, NOTE, UNSUPPORTED, WARNING, WORKS, Finding, Report
from ampcompat.tools.check.source import TRIES, Source, mentions_apex
from ampcompat.tools.check.split_lines import lines_of
from ampcompat.tools.check.symbols import ON_OPTIMIZERS, canonical, verdict
from ampcompat.tools.check.traps import TRAPS, Facts, Repository

#: Suffixes of files that hold Python.
READ = (*SUFFIXES, ".ipynb")
MENTION = re.compile(rf"^[ \t\f]*(from|import)[ \t]+({'|'.join(('apex', *EXTENSIONS))})\b", re.MULTILINE)
#: Nodes of a tree that is searched for traps, some 15,000 lines: the work grows with their square.
MOST_NODES = 150_000
PROBES = ("find_spec", "import_module", "__import__", "version", "get_distribution")
ATTRIBUTES = ("hasattr", "getattr", "setattr", "delattr")
# What parsing hostile text raises: bad syntax, null bytes, nesting too deep for the parser or for us.
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass
class CheckedFile:
    """The Python of one file, and what is known of the file by itself.

    Attributes:
        name: Its path in the report.
        text: The code.
        lines: For each line of a notebook's code the line of the file; empty for other files.
        source: The parsed file; None where it does not name apex or cannot be parsed.
        facts: What the traps of every file need to know; None where ``source`` is.
        findings: Symbols and traps in it, and problems of the file itself.
        may_hold_traps: Whether it is searched for traps, if the repository uses amp.
        has_python_suffix: Whether it is called what Python files and notebooks are; others may be given by their path.
    """

    name: str
    text: str = ""
    lines: list[int] = field(default_factory=list)
    source: Source | None = None
    facts: Facts | None = None
    findings: list[Finding] = field(default_factory=list)
    may_hold_traps: bool = False
    has_python_suffix: bool = True

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings at lines of the code, but for those that a comment there ignores."""
        found = list(findings)
        if "ampcompat:" in self.text:
            lines = lines_of(self.text)
            found = [finding for finding in found if not is_ignored(finding, lines)]
        if self.lines:
            found = [replace(finding, line=self._line_of_file(finding.line)) for finding in found]
        self.findings += found

    def _line_of_file(self, line: int) -> int:
        return self.lines[line - 1] if 0 < line <= len(self.lines) else 0


def scan(
    path: str | Path | Sequence[str | Path],
    config: Config | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> Report:
    """Check every Python file and notebook under one or several paths, and what installs apex there.

    Args:
        path: A directory, a file, or several; paths in the report are relative to a single one, else to where they are
            given from.
        config: What is reported; everything by default.
        progress: Called with what is being done, how many files are done, and how many there are.

    Raises:
        FileNotFoundError: a path does not exist.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    config = config or Config()
    wanted = [(name, file) for name, file in _named(paths) if not config.excludes(name)]
    files: list[CheckedFile] = []
    for name, file in wanted:
        files.append(_read(name, file))
        if progress is not None:
            progress("reading", len(files), len(wanted))
    repository = Repository(checked.facts for checked in files if checked.facts is not None)
    searched = [checked for checked in files if checked.may_hold_traps and repository.is_mixed]
    for done, checked in enumerate(searched, 1):
        _search(checked, repository)
        if progress is not None:
            progress("looking for traps", done, len(searched))
    findings = sorted(finding for checked in files for finding in checked.findings if config.keeps(finding))
    return Report(str(paths[0]) if len(paths) == 1 else "", len(files), findings)


def scan_source(text: str, path: str = "<string>") -> list[Finding]:
    """Findings of one source text."""
    checked = CheckedFile(path, text)
    _parse(checked)
    if checked.facts is not None:
        _search(checked, Repository([checked.facts]))
    return sorted(checked.findings)


def _read(name: str, file: str) -> CheckedFile:
    """A file with the symbols in it. One that does not name apex has none, and is not parsed for them."""
    is_python = os.path.splitext(file)[1] in READ
    try:
        text = decode(read(file)).code
        if is_native_amp(os.path.basename(file), text):
            return CheckedFile(name)
        notebook = Notebook.read(text) if is_notebook(os.path.basename(file)) else None
    except (Unreadable, NotANotebook) as problem:
        reason = f"the file {problem}" if is_python else f"is not a Python file ({problem})"
        return CheckedFile(name, findings=[Finding(name, 0, 0, "file", "unreadable", WARNING, reason)])
    checked = CheckedFile(name, text, has_python_suffix=is_python)
    if notebook is not None:
        checked.text, checked.lines = notebook.code, notebook.lines
        checked.add(_installing(name, (line for line, command in notebook.commands() if installs_apex(command))))
    if installs(file):
        checked.add(_installing(name, install_lines(text)))
    elif mentions_apex(checked.text):
        _parse(checked)
    else:
        checked.may_hold_traps = notebook is None  # notebooks are not imported
    return checked


def _parse(checked: CheckedFile) -> None:
    """Parse a file for its symbols."""
    try:
        source = Source(checked.name, checked.text)
        checked.add(_symbols(source))
        checked.source, checked.facts, checked.may_hold_traps = source, Facts.of(source), True
    except UNPARSABLE as problem:
        checked.add([_unparsable(checked, problem)])


def _search(checked: CheckedFile, repository: Repository) -> None:
    """Add the traps in a file, judged by what the repository does."""
    try:
        checked.add(_traps(checked.source or Source(checked.name, checked.text), repository))
    except UNPARSABLE as problem:
        checked.add([_unparsable(checked, problem)])


def _named(paths: Sequence[str | Path]) -> Iterator[tuple[str, str]]:
    """Each file with its name for the report, once."""
    seen: set[str] = set()
    for path in paths:
        root = Path(path)
        if not root.exists():
            raise FileNotFoundError(f"{path} does not exist; give a directory or a Python file")
        given, root = root, root.resolve()
        whole = root.is_dir()
        for name, file in sources(root):
            if file in seen:
                continue
            seen.add(file)
            yield (name if len(paths) == 1 else (given / name if whole else given).as_posix()), file


INSTALLED = "apex is installed here: nothing has to be built any more; install ampcompat, and drop this"


def _installing(name: str, lines: Iterable[int]) -> list[Finding]:
    """Lines that install apex, which nothing needs any more."""
    return [Finding(name, line, 0, "file", "installs_apex", NOTE, INSTALLED) for line in lines]


def _unparsable(checked: CheckedFile, problem: BaseException) -> Finding:
    if not checked.has_python_suffix:
        return Finding(checked.name, 0, 0, "file", "not_python", WARNING, "is not a Python file")
    uses_apex = MENTION.search(checked.text) is not None
    line, reason = 0, str(problem) or type(problem).__name__
    if isinstance(problem, SyntaxError):
        line, reason = problem.lineno or 0, problem.msg
    note = f"Python 3 cannot parse the file ({reason})"
    if uses_apex:
        note += "; it imports apex - correct it first, or port it (2to3) if it is Python 2"
    return Finding(checked.name, max(line, 0), 0, "file", "unparsable", ERROR if uses_apex else WARNING, note)


def _symbols(source: Source) -> list[Finding]:
    found: list[Finding] = []
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [_symbol(source, node, name) for name in filter(None, map(apex_name, _imported(node)))]
        elif (symbol := used(source, node)) is not None and not _is_of_native_amp(source, symbol):
            found.append(_symbol(source, node, symbol))
    found += [f for call in source.calls_named(*PROBES) if (f := _probe(source, call)) is not None]
    found += _left_on_optimizers(source)
    # Two mentions on one line (`amp.initialize(amp.x)`) stay two only when they name different symbols.
    return list({(f.line, f.name): f for f in found}.values())


def _is_of_native_amp(source: Source, symbol: str) -> bool:
    """Whether a symbol that counts as one of ``apex.amp`` is one of ``native_amp``."""
    return source.bindings.is_native and symbol.startswith("apex.amp.")


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The names that a statement imports, in full; of a star the module's."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.level > 0:
        return []
    return [node.module or "" if alias.name == "*" else f"{node.module}.{alias.name}" for alias in node.names]


def used(source: Source, node: ast.AST) -> str | None:
    """The apex symbol that a node uses; of a chain of attributes the whole speaks."""
    if not isinstance(node, ast.Attribute | ast.Name) or not isinstance(node.ctx, ast.Load):
        return None
    if isinstance(source.parents.get(node), ast.Attribute):
        return None  # the longer chain speaks
    symbol = source.apex(node)
    # A bare module (`if amp is not None`, `amp` passed on) says nothing that its import did not.
    return None if symbol is None or (isinstance(node, ast.Name) and symbol.count(".") < 2) else symbol


def _symbol(source: Source, node: ast.AST, name: str) -> Finding:
    level, note = verdict(name)
    if level == UNSUPPORTED and isinstance(node, ast.Import | ast.ImportFrom) and _guarded(source, node):
        level, note = DIFFERS, f"imported inside try: the probe finds ampcompat, each use of it is refused ({note})"
    return source.finding(node, "symbol", canonical(name), level, note)


def _guarded(source: Source, node: ast.AST) -> bool:
    """Whether a statement stands in the body of a ``try`` with handlers."""
    for child, parent in source.around(node):
        if isinstance(parent, TRIES) and source.field(child) == "body" and getattr(parent, "handlers", []):
            return True
    return False


def _probe(source: Source, call: ast.Call) -> Finding | None:
    first = call.args[0] if call.args else None
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
        return None
    if first.value.partition(".")[0] != "apex":
        return None
    level, note = verdict(first.value)
    note = note or "asked for by name: answered under `ampcompat run` or install_as_apex()"
    return source.finding(call, "symbol", canonical(first.value), NOTE if level == WORKS else level, note)


def _left_on_optimizers(source: Source) -> Iterator[Finding]:
    """What amp leaves on an optimizer, as an attribute, or asked for by name: ``hasattr(optimizer, "_amp_stash")``."""
    for attribute in source.kind(ast.Attribute):
        if attribute.attr in ON_OPTIMIZERS:
            yield source.finding(attribute, "symbol", f"optimizer.{attribute.attr}", WORKS)
    for call in source.calls_named(*ATTRIBUTES):
        name = call.args[1] if len(call.args) > 1 else None
        if isinstance(name, ast.Constant) and name.value in ON_OPTIMIZERS:
            yield source.finding(call, "symbol", f"optimizer.{name.value}", WORKS)


def _traps(source: Source, repository: Repository) -> list[Finding]:
    if not repository.is_mixed:
        return []
    if len(source.nodes) > MOST_NODES:
        note = "has too much code to be searched for traps: split it, or leave it out ([tool.ampcompat] exclude)"
        return [Finding(source.path, 0, 0, "file", "too_long", NOTE, note)]
    return [finding for trap in TRAPS for finding in trap(source, repository)]
