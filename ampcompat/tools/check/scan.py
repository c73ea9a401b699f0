"""Read the files of a directory, parse them, collect their apex symbols and traps.

A file is parsed for its symbols where it names apex. Once all files have told what they do with amp, the files of a
repository that uses it are searched for traps: the few that name apex are parsed once more for that.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from ampcompat._extensions import EXTENSIONS
from ampcompat.tools.check.bindings import apex_name
from ampcompat.tools.check.config import Config, is_ignored
from ampcompat.tools.check.documents import NotANotebook, Notebook, install_lines, installs, installs_apex, is_notebook
from ampcompat.tools.check.files import SUFFIXES, Unreadable, decode, read, sources
from ampcompat.tools.check.findings import DIFFERS, ERROR, NOTE, UNSUPPORTED, WARNING, WORKS, Finding, Report
from ampcompat.tools.check.lines import lines_of
from ampcompat.tools.check.source import TRIES, Source, mentions_apex
from ampcompat.tools.check.symbols import ON_OPTIMIZERS, canonical, verdict
from ampcompat.tools.check.traps import TRAPS, Facts, Repository
from ampcompat.tools.check.workers import workers

T = TypeVar("T")
#: Suffixes of files that hold Python.
READ = (*SUFFIXES, ".ipynb")
MENTION = re.compile(rf"^[ \t\f]*(from|import)[ \t]+({'|'.join(('apex', *EXTENSIONS))})\b", re.MULTILINE)
#: Nodes of a tree that is searched for traps, some 15,000 lines: the work grows with their square.
MOST_NODES = 150_000
PROBES = ("find_spec", "import_module", "__import__", "version", "get_distribution")
ATTRIBUTES = ("hasattr", "getattr", "setattr", "delattr")
# What parsing hostile text raises: bad syntax, null bytes, nesting too deep for the parser or for us.
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)


class Read(NamedTuple):
    """What is known of one file by itself.

    Attributes:
        findings: Symbols, and what is to be said of the file.
        facts: What the traps of every file need to know; None where it never names apex.
        may_hold_traps: Whether it is a Python file that can be parsed.
    """

    findings: list[Finding]
    facts: Facts | None = None
    may_hold_traps: bool = False


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
        ChildProcessError: one of the processes that read files was ended from outside.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    config = config or Config()
    files = [(name, file) for name, file in _named(paths) if not config.excludes(name)]
    findings: list[Finding] = []
    with workers(len(files)) as apply:
        read = list(_counted(apply(_read_file, files), "reading", len(files), progress))
        findings += [finding for one in read for finding in one.findings]
        repository = Repository([one.facts for one in read if one.facts is not None])
        if repository.is_mixed:  # without amp nothing is a trap
            rest = [file for file, one in zip(files, read, strict=True) if one.may_hold_traps]
            found = apply(functools.partial(_traps_of_file, repository), rest)
            for some in _counted(found, "looking for traps", len(rest), progress):
                findings += some
    kept = sorted(finding for finding in findings if config.keeps(finding))
    return Report(str(paths[0]) if len(paths) == 1 else "", len(files), kept)


def _counted(
    results: Iterable[T], what: str, total: int, progress: Callable[[str, int, int], object] | None
) -> Iterator[T]:
    for done, result in enumerate(results, 1):
        yield result
        if progress is not None:
            progress(what, done, total)


class Code(NamedTuple):
    """The Python in a file; ``lines`` are those of the file, for each line of a notebook's code."""

    text: str
    lines: list[int]
    notebook: Notebook | None = None


def _code_of(file: str) -> Code:
    text = decode(read(file)).code
    if not is_notebook(os.path.basename(file)):
        return Code(text, [])
    notebook = Notebook.read(text)
    return Code(notebook.code, notebook.lines, notebook)


def _read_file(job: tuple[str, str]) -> Read:
    """The symbols of a file, and its facts. One that does not name apex has none, and is not parsed for them."""
    name, file = job
    try:
        code = _code_of(file)
    except (Unreadable, NotANotebook) as problem:
        return Read([_unreadable(name, file, problem)])
    if installs(file):
        return Read(_kept(_installing(name, install_lines(code.text)), code))
    found: list[Finding] = []
    if code.notebook is not None:
        commands = [number for number, command in code.notebook.commands() if installs_apex(command)]
        found = _kept(_installing(name, commands), code)
    if not mentions_apex(code.text):
        return Read(found, may_hold_traps=code.notebook is None)  # notebooks are not imported
    try:
        source = Source(name, code.text)
        found += _kept(_symbols(source), code)
        return Read(found, Facts.of(source), may_hold_traps=True)
    except UNPARSABLE as problem:
        return Read([*found, *_kept([_unparsable(name, code.text, problem, file)], code)])


def _traps_of_file(repository: Repository, job: tuple[str, str]) -> list[Finding]:
    """The traps in a file that could be read, judged by what the repository does."""
    name, file = job
    try:
        code = _code_of(file)
    except (Unreadable, NotANotebook) as problem:  # it could be read before: it has changed since
        return [_unreadable(name, file, problem)]
    try:
        return _kept(_traps(Source(name, code.text), repository), code)
    except UNPARSABLE as problem:
        return [_unparsable(name, code.text, problem, file)]


def _unreadable(name: str, file: str, problem: Exception) -> Finding:
    is_python = os.path.splitext(file)[1] in READ
    reason = f"the file {problem}" if is_python else f"is not a Python file ({problem})"
    return Finding(name, 0, 0, "file", "unreadable", WARNING, reason)


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


def _kept(found: list[Finding], code: Code) -> list[Finding]:
    """Findings without those that a comment ignores, at the lines of the file."""
    if "ampcompat:" in code.text:
        lines = lines_of(code.text)
        found = [finding for finding in found if not is_ignored(finding, lines)]
    if not code.lines:
        return found
    return [replace(f, line=code.lines[f.line - 1] if 0 < f.line <= len(code.lines) else 0) for f in found]


def scan_source(code: str, path: str = "<string>") -> list[Finding]:
    """Findings of one source text."""
    try:
        source = Source(path, code)
        return sorted(_kept(_symbols(source) + _traps(source, Repository([Facts.of(source)])), Code(code, [])))
    except UNPARSABLE as problem:
        return [_unparsable(path, code, problem)]


def _unparsable(path: str, code: str, problem: BaseException, file: str = "x.py") -> Finding:
    if os.path.splitext(file)[1] not in READ:
        return Finding(path, 0, 0, "file", "not_python", WARNING, "is not a Python file")
    uses_apex = MENTION.search(code) is not None
    level = ERROR if uses_apex else WARNING
    line, reason = 0, str(problem) or type(problem).__name__
    if isinstance(problem, SyntaxError):
        line, reason = problem.lineno or 0, problem.msg
    note = f"Python 3 cannot parse the file ({reason})"
    if uses_apex:
        note += "; it imports apex - correct it first, or port it (2to3) if it is Python 2"
    return Finding(path, max(line, 0), 0, "file", "unparsable", level, note)


def _symbols(source: Source) -> list[Finding]:
    found: list[Finding] = []
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [_symbol(source, node, name) for name in filter(None, map(apex_name, _imported(node)))]
        elif (symbol := used(source, node)) is not None:
            found.append(_symbol(source, node, symbol))
    found += [f for call in source.calls_named(*PROBES) if (f := _probe(source, call)) is not None]
    found += _left_on_optimizers(source)
    # Two mentions on one line (`amp.initialize(amp.x)`) stay two only when they name different symbols.
    return list({(f.line, f.name): f for f in found}.values())


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
