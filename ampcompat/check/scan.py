"""Walk a directory, parse each file, collect its apex symbols and traps."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from ampcompat.check.bindings import apex_name
from ampcompat.check.files import Unreadable, decode, python_files, read
from ampcompat.check.findings import DIFFERS, ERROR, NOTE, UNSUPPORTED, WARNING, WORKS, Finding, Report
from ampcompat.check.source import Source, called, mentions_apex
from ampcompat.check.symbols import canonical, verdict
from ampcompat.check.traps import TRAPS, Repository

MENTION = re.compile(r"^\s*(from|import)\s+(apex|amp_C|apex_C)\b", re.MULTILINE)
PROBES = ("find_spec", "import_module", "__import__", "version", "get_distribution")
# What parsing hostile text raises: bad syntax, null bytes, nesting too deep for the parser or for us.
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


def scan(path: str | Path) -> Report:
    """Check every Python file under ``path``.

    Raises:
        FileNotFoundError: ``path`` does not exist.
    """
    root = Path(path)
    if not root.exists():
        raise FileNotFoundError(f"{path} does not exist; give a directory or a Python file")
    root = root.resolve()
    report = Report(str(path))
    naming: list[Source] = []
    others: list[tuple[str, str]] = []
    for file in python_files(root):
        report.files += 1
        name = file.relative_to(root).as_posix() if file != root else file.name
        try:
            code = decode(read(file)).code
        except Unreadable as problem:
            report.findings.append(Finding(name, 0, 0, "file", "unreadable", WARNING, f"the file {problem}"))
            continue
        if mentions_apex(code):
            naming += _parsed(report, name, code)
        else:
            others.append((name, code))
    repository = Repository(naming)
    for source in naming:
        _examine(report, source, repository)
    # What does not name apex holds no symbol of it, and without amp nothing is a trap. One tree at a time: with all of
    # them alive, the garbage collector takes longer than the parser.
    for name, code in others if repository.is_mixed else ():
        for source in _parsed(report, name, code):
            _examine(report, source, repository)
    report.findings.sort()
    return report


def _parsed(report: Report, name: str, code: str) -> list[Source]:
    """The file's source, or none and a finding."""
    try:
        return [Source(name, code)]
    except UNPARSABLE as problem:
        report.findings.append(_unparsable(name, code, problem))
        return []


def _examine(report: Report, source: Source, repository: Repository) -> None:
    try:
        report.findings += _symbols(source) + _traps(source, repository)
    except RecursionError as problem:
        report.findings.append(_unparsable(source.path, "", problem))


def scan_source(code: str, path: str = "<string>") -> list[Finding]:
    """Findings of one source text."""
    try:
        source = Source(path, code)
        return sorted(_symbols(source) + _traps(source, Repository([source])))
    except UNPARSABLE as problem:
        return [_unparsable(path, code, problem)]


def _unparsable(path: str, code: str, problem: BaseException) -> Finding:
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
