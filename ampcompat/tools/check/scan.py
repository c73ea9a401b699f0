"""Read the files of a directory, parse them, collect their apex symbols and traps.

What is found in a file is found in it alone; what it comes to is decided once all are read (see :mod:`judgement`).
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
from ampcompat.tools.check.config import Config, is_ignored, unknown_rules
from ampcompat.tools.check.documents import NotANotebook, Notebook, is_notebook
from ampcompat.tools.check.facts import Facts
from ampcompat.tools.check.files import SUFFIXES, Unreadable, decode, is_native_amp, read, sources
from ampcompat.tools.check.findings import DIFFERS, ERROR, NOTE, UNSUPPORTED, WARNING, WORKS, Finding, Report
from ampcompat.tools.check.judgement import judged
from ampcompat.tools.check.manifests import installs_apex, is_manifest, places
from ampcompat.tools.check.source import TRIES, Source, mentions_apex
from ampcompat.tools.check.split_lines import lines_of
from ampcompat.tools.check.symbols import ON_OPTIMIZERS, canonical, verdict

#: Suffixes of files that hold Python.
READ = (*SUFFIXES, ".ipynb")
MENTION = re.compile(rf"^[ \t\f]*(from|import)[ \t]+({'|'.join(('apex', *EXTENSIONS))})\b", re.MULTILINE)
PROBES = ("find_spec", "import_module", "__import__", "version", "get_distribution")
ATTRIBUTES = ("hasattr", "getattr", "setattr", "delattr")
# What parsing hostile text raises: bad syntax, null bytes, nesting too deep for the parser or for us.
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


@dataclass
class CheckedFile:
    """The Python of one file, and what is known of the file by itself.

    Attributes:
        name: Its path in the report.
        path: Where it is.
        text: The code.
        lines: For each line of a notebook's code the line of the file; empty for other files.
        facts: What the traps found and need to know.
        findings: Symbols in it, and problems of the file itself.
        is_python: Whether it holds Python that was not parsed yet.
        has_python_suffix: Whether it is called what Python files and notebooks are; others may be given by their path.
    """

    name: str
    path: str
    text: str = ""
    lines: list[int] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)
    findings: list[Finding] = field(default_factory=list)
    is_python: bool = False
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
        files.append(read_file(name, file))
        if progress is not None:
            progress("reading", len(files), len(wanted))
    waiting = [checked for checked in files if checked.is_python]
    uses_apex = any(checked.facts.is_mixed for checked in files)
    for done, checked in enumerate(waiting, 1):
        _parse_without_apex(checked, search=uses_apex)
        if progress is not None:
            progress("looking for traps", done, len(waiting))
    _judge(files)
    findings = sorted(finding for checked in files for finding in checked.findings if config.keeps(finding))
    return Report(str(paths[0]) if len(paths) == 1 else "", len(files), findings)


def scan_source(text: str, path: str = "<string>") -> list[Finding]:
    """Findings of one source text."""
    checked = CheckedFile(path, path, text)
    _parse(checked)
    _judge([checked])
    return sorted(checked.findings)


def read_file(name: str, file: str) -> CheckedFile:
    """A file with the symbols in it, and with its facts where it names apex."""
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
        checked.add(_installing(name, (line for line, command in notebook.commands() if installs_apex(command))))
    if is_manifest(file):
        checked.add(_installing(name, (place.line for place in places(file, text))))
        if not is_python:
            return checked
    if mentions_apex(checked.text):
        _parse(checked)
    else:
        checked.is_python = notebook is None  # notebooks are not imported
    return checked


def _parse(checked: CheckedFile) -> None:
    """Parse a file for its symbols and its facts."""
    unknown = unknown_rules(checked.text)
    checked.add(Finding(checked.name, line, 0, "file", "unknown_rule", WARNING, problem) for line, problem in unknown)
    try:
        source = Source(checked.name, checked.text)
        checked.add(_symbols(source))
        checked.facts = Facts.of(source)
    except UNPARSABLE as problem:
        checked.add([_unparsable(checked, problem)])


def _parse_without_apex(checked: CheckedFile, search: bool) -> None:
    """Parse a file that does not name apex: whether it can be, and, where another file uses apex, for its facts."""
    try:
        source = Source(checked.name, checked.text)
        if search:
            checked.facts = Facts.of(source)
    except UNPARSABLE as problem:
        checked.add([_unparsable(checked, problem)])


def _judge(files: Iterable[CheckedFile]) -> None:
    """Add the traps to the files that have them."""
    by_path = {checked.path: checked for checked in files}
    for path, findings in judged({path: checked.facts for path, checked in by_path.items()}):
        by_path[path].add(findings)


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


INSTALLED = (
    "apex is installed here: nothing has to be built any more; drop this, and install ampcompat from a checkout,"
    " since no package index has it"
)


def _installing(name: str, lines: Iterable[int]) -> list[Finding]:
    """Lines that install apex, which nothing needs any more."""
    return [Finding(name, line, 0, "file", "installs_apex", NOTE, INSTALLED) for line in lines]


def _unparsable(checked: CheckedFile, problem: BaseException) -> Finding:
    if not checked.has_python_suffix:
        return Finding(checked.name, 0, 0, "file", "not_python", ERROR, "is not a Python file")
    uses_apex = MENTION.search(checked.text) is not None
    line, reason = 0, str(problem) or type(problem).__name__
    if isinstance(problem, SyntaxError):
        line, reason = problem.lineno or 0, problem.msg
    note = f"Python 3 cannot parse the file ({reason})"
    if uses_apex:
        note += "; it imports apex - correct it first, or port it (2to3) if it is Python 2"
    return Finding(checked.name, max(line, 0), 0, "file", "unparsable", ERROR, note)


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
