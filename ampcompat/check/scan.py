"""Walk a directory, parse each file, collect its apex symbols and traps."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ampcompat._extensions import EXTENSIONS
from ampcompat.check.bindings import apex_name
from ampcompat.check.config import Config, is_ignored
from ampcompat.check.documents import NotANotebook, Notebook, install_lines, installs, is_notebook
from ampcompat.check.files import SUFFIXES, Unreadable, decode, read, sources
from ampcompat.check.findings import DIFFERS, ERROR, NOTE, UNSUPPORTED, WARNING, WORKS, Finding, Report
from ampcompat.check.lines import lines_of
from ampcompat.check.source import Source, called, mentions_apex
from ampcompat.check.symbols import canonical, verdict
from ampcompat.check.traps import TRAPS, Facts, Repository, may_hold_trap
from ampcompat.check.workers import shared

#: Suffixes of files that hold Python.
READ = (*SUFFIXES, ".ipynb")
MENTION = re.compile(rf"^\s*(from|import)\s+({'|'.join(('apex', *EXTENSIONS))})\b", re.MULTILINE)
NAMING = {ast.Import, ast.ImportFrom, ast.Attribute, ast.Name}
PROBES = ("find_spec", "import_module", "__import__", "version", "get_distribution")
# What parsing hostile text raises: bad syntax, null bytes, nesting too deep for the parser or for us.
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


def scan(path: str | Path | Sequence[str | Path], config: Config | None = None) -> Report:
    """Check every Python file and notebook under one or several paths, and what installs apex there.

    Args:
        path: A directory, a file, or several; paths in the report are relative to a single one, else to where they are
            given from.
        config: What is reported; everything by default.

    Raises:
        FileNotFoundError: a path does not exist.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    config = config or Config()
    files = [(name, file) for name, file in _named(paths) if not config.excludes(name)]
    parts = shared(_part, files, config, Repository)
    findings = sorted(f for found in parts for f in found if config.keeps(f))
    return Report(str(paths[0]) if len(paths) == 1 else "", len(files), findings)


def _part(files: Sequence[tuple[str, str]], config: Config) -> Generator[list[Facts], Repository, list[Finding]]:
    """The check of some of the files: yields what they tell of the repository, is sent that, returns findings.

    What does not name apex holds no symbol of it, and without amp nothing is a trap: such files are parsed afterwards,
    one tree at a time, and only where their text may hold a trap.
    """
    findings: list[Finding] = []
    naming: list[Source] = []
    others: list[tuple[str, str]] = []
    for name, file in files:
        try:
            code = decode(read(file)).code
            if installs(os.path.basename(file)):
                findings += _installed(name, code, config)
                continue
            code, lines = _code(file, code)
        except (Unreadable, NotANotebook) as problem:
            reason = f"the file {problem}" if os.path.splitext(file)[1] in READ else f"is not a Python file ({problem})"
            findings.append(Finding(name, 0, 0, "file", "unreadable", WARNING, reason))
            continue
        if mentions_apex(code):
            try:
                naming.append(Source(name, code))
                naming[-1].lines = lines
            except UNPARSABLE as problem:
                findings.append(_unparsable(name, code, problem, file))
        elif not lines and may_hold_trap(code):
            others.append((name, code))
    repository = yield [Facts.of(source) for source in naming]
    for source in naming:
        findings += _kept(_examine(source, repository), source.code, source.lines)
    if repository.is_mixed:
        for name, code in others:
            try:
                findings += _kept(_examine(Source(name, code), repository), code, [])
            except UNPARSABLE as problem:
                findings.append(_unparsable(name, code, problem))
    return findings


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


def _code(file: str, text: str) -> tuple[str, list[int]]:
    """The Python code of a file, and for a notebook the lines that its lines come from."""
    if not is_notebook(os.path.basename(file)):
        return text, []
    notebook = Notebook.read(text)
    return notebook.code, notebook.lines


def _installed(name: str, text: str, config: Config) -> list[Finding]:
    """Lines that install apex, which nothing needs any more."""
    note = "apex is installed here: nothing has to be built any more; install ampcompat, and drop this"
    lines = lines_of(text)
    found = [Finding(name, line, 0, "file", "installs_apex", NOTE, note) for line in install_lines(text)]
    return [finding for finding in found if not is_ignored(finding, lines)]


def _kept(found: list[Finding], code: str, places: list[int]) -> list[Finding]:
    """Findings without those that a comment ignores, at the lines of the file."""
    if "ampcompat:" in code:
        lines = lines_of(code)
        found = [finding for finding in found if not is_ignored(finding, lines)]
    if not places:
        return found
    return [replace(f, line=places[f.line - 1] if 0 < f.line <= len(places) else 0) for f in found]


def _examine(source: Source, repository: Repository) -> list[Finding]:
    try:
        return _symbols(source) + _traps(source, repository)
    except RecursionError as problem:
        return [_unparsable(source.path, "", problem)]


def scan_source(code: str, path: str = "<string>") -> list[Finding]:
    """Findings of one source text."""
    try:
        source = Source(path, code)
        return sorted(_kept(_symbols(source) + _traps(source, Repository([Facts.of(source)])), code, []))
    except UNPARSABLE as problem:
        return [_unparsable(path, code, problem)]


def _unparsable(path: str, code: str, problem: BaseException, file: str = "x.py") -> Finding:
    if os.path.splitext(file)[1] not in READ:
        return Finding(path, 0, 0, "file", "not_python", WARNING, "is not a Python file")
    uses_apex = MENTION.search(code) is not None
    line = problem.lineno or 0 if isinstance(problem, SyntaxError) else 0
    reason = problem.msg if isinstance(problem, SyntaxError) else str(problem) or type(problem).__name__
    note = f"Python 3 cannot parse the file ({reason})" + ("; it imports apex: port it (2to3) first" * uses_apex)
    return Finding(path, max(line, 0), 0, "file", "unparsable", ERROR if uses_apex else WARNING, note)


def _symbols(source: Source) -> list[Finding]:
    found: list[Finding] = []
    if not source.mentions_apex:
        return found
    for node in source.nodes:
        if node.__class__ not in NAMING:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or "" if a.name == "*" else f"{node.module}.{a.name}" for a in node.names]
        else:
            if symbol := used(source, node):
                found.append(_symbol(source, node, symbol))
            continue
        found += [_symbol(source, node, symbol) for name in names if (symbol := apex_name(name)) is not None]
    found += [f for call in source.calls if (f := _probe(source, call)) is not None]
    # Two mentions on one line (`amp.initialize(amp.x)`) stay two only when they name different symbols.
    return list({(f.line, f.name): f for f in found}.values())


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
        level, note = DIFFERS, f"imported inside try: the probe is answered, each use of it is refused ({note})"
    return source.finding(node, "symbol", canonical(name), level, note)


def _guarded(source: Source, node: ast.AST) -> bool:
    child = node
    for parent in source.ancestors(node):
        if isinstance(parent, ast.Try) and child in parent.body and parent.handlers:
            return True
        child = parent
    return False


def _probe(source: Source, call: ast.Call) -> Finding | None:
    first = call.args[0] if call.args else None
    if called(call) not in PROBES or not isinstance(first, ast.Constant) or not isinstance(first.value, str):
        return None
    if first.value.partition(".")[0] != "apex":
        return None
    level, note = verdict(first.value)
    note = note or "asked for by name: answered under `ampcompat run` or install_as_apex()"
    return source.finding(call, "symbol", canonical(first.value), NOTE if level == WORKS else level, note)


def _traps(source: Source, repository: Repository) -> list[Finding]:
    if not repository.is_mixed:
        return []
    return [finding for trap in TRAPS for finding in trap(source, repository)]
