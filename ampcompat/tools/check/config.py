"""Choose what is reported: rules named on the command line, in ``[tool.ampcompat]``, or by a comment."""

from __future__ import annotations

import difflib
import fnmatch
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ampcompat.tools.check.findings import KINDS, LEVELS, Finding
from ampcompat.tools.check.symbols import MODULES, ON_OPTIMIZERS, SYMBOLS
from ampcompat.tools.check.traps import FORMER_TRAPS, TRAPS

COMMENT = re.compile(r"#\s*ampcompat:\s*ignore(?:\[([^\]]*)\])?")
KEYS = ("select", "ignore", "exclude")
#: Names of findings about a file.
FILE_RULES = ("unreadable", "unparsable", "not_python", "too_long", "installs_apex", "unknown_rule")


class BadConfig(ValueError):
    """``[tool.ampcompat]`` or a rule cannot be used; the message says why."""


@dataclass(frozen=True)
class Config:
    """Which findings are kept.

    A rule is the name of a trap (``overflowing_fill``), a symbol or the start of one (``apex.contrib``), or a kind of
    finding (``symbol``, ``trap``, ``file``).

    Attributes:
        select: Rules to report; empty for all.
        ignore: Rules not to report.
        exclude: Patterns of paths, relative to what is checked, that are not read.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def keeps(self, finding: Finding) -> bool:
        """Whether a finding is reported."""
        chosen = not self.select or any(matches(finding, rule) for rule in self.select)
        return chosen and not any(matches(finding, rule) for rule in self.ignore)

    def excludes(self, name: str) -> bool:
        """Whether a path is left out."""
        return any(fnmatch.fnmatch(name, p) or fnmatch.fnmatch(name, f"{p.rstrip('/')}/*") for p in self.exclude)

    def with_options(self, select: Sequence[str], ignore: Sequence[str]) -> Config:
        """The configuration with the command line's rules: they replace ``select`` and add to ``ignore``.

        Raises:
            BadConfig: One of them names nothing that is ever found.
        """
        check_rules("--select", select)
        check_rules("--ignore", ignore)
        return Config(tuple(select) or self.select, (*self.ignore, *ignore), self.exclude)


def matches(finding: Finding, rule: str) -> bool:
    """Whether a rule names a finding."""
    return rule in (finding.name, finding.kind, finding.level) or finding.name.startswith(f"{rule}.")


def check_rules(where: str, rules: Iterable[str]) -> None:
    """Refuse rules that no finding has.

    Args:
        where: What names them, for the message.
        rules: See :class:`Config`.

    Raises:
        BadConfig: A rule names no finding.
    """
    for rule in rules:
        problem = problem_with(rule)
        if problem is not None:
            raise BadConfig(f"{where}: {problem}")


def problem_with(rule: str) -> str | None:
    """Why no finding has a rule, and which is meant; None where some can have it."""
    if rule in FORMER_TRAPS:
        return f"{rule!r} is no longer a rule - {FORMER_TRAPS[rule]} - leave it out"
    known = {*KINDS, *LEVELS, *FILE_RULES, *(trap.__name__ for trap in TRAPS), *SYMBOLS}
    known |= {f"optimizer.{name}" for name in ON_OPTIMIZERS}
    # An unknown name of a module of apex is reported by that name; "optimizer" stands for all that begin so.
    parent = rule.rpartition(".")[0]
    if rule in known or parent in MODULES or any(name.startswith(f"{rule}.") for name in known):
        return None
    close = difflib.get_close_matches(rule, known, n=1)
    meant = f"did you mean {close[0]}?" if close else f"name a trap, a symbol of apex, or {', '.join(KINDS)}."
    return f"{rule!r} names no rule - {meant}"


def unknown_rules(code: str) -> Iterator[tuple[int, str]]:
    """The rules that comments of a Python source ignore and no finding has: the line, and what is wrong."""
    if COMMENT.search(code) is None:
        return
    for line, comment in _comments(code):
        found = COMMENT.search(comment)
        if found is None or found[1] is None:
            continue
        for rule in found[1].split(","):
            problem = problem_with(rule.strip())
            if problem is not None:
                yield line, problem


def _comments(code: str) -> Iterator[tuple[int, str]]:
    """The comments of a Python source, with their lines; those above the place where it cannot be parsed."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    except (tokenize.TokenError, SyntaxError):
        return


def is_ignored(finding: Finding, lines: Sequence[str]) -> bool:
    """Whether the line of a finding has a comment that ignores it: ``# ampcompat: ignore[rule]``, or all rules."""
    if not 0 < finding.line <= len(lines):
        return False
    found = COMMENT.search(lines[finding.line - 1])
    if found is None:
        return False
    return found[1] is None or any(matches(finding, rule.strip()) for rule in found[1].split(","))


def read_config(paths: Iterable[str | Path]) -> Config:
    """``[tool.ampcompat]`` of the pyproject.toml nearest above the first path; the default without one.

    Raises:
        BadConfig: the file is not TOML, the table has unknown keys or rules, or a value is not a list of strings.
    """
    first = Path(next(iter(paths), ".")).resolve()
    for folder in (first, *first.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            return _parsed(file)
    return Config()


def _parsed(file: Path) -> Config:
    table = _table(file)
    rules: dict[str, tuple[str, ...]] = {}
    for key, value in table.items():
        if key not in KEYS:
            raise BadConfig(f"{file}: [tool.ampcompat] has no {key!r}; use {', '.join(KEYS)}")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise BadConfig(f"{file}: {key} in [tool.ampcompat] is {value!r}; give a list of strings")
        if key != "exclude":
            check_rules(f"{file}: {key} in [tool.ampcompat]", value)
        rules[key] = tuple(value)
    return Config(**rules)


def _table(file: Path) -> dict[str, object]:
    """``[tool.ampcompat]`` of a project file; empty where it has none."""
    try:
        text = file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise BadConfig(f"{file} cannot be read: {problem}") from None
    module = _toml_module()
    if module is None:
        if "tool.ampcompat" in text:
            raise BadConfig(f"{file}: reading it needs Python 3.11, or tomli: pip install tomli")
        return {}
    try:
        content = module.loads(text)
    except ValueError as problem:
        raise BadConfig(f"{file} cannot be read: {problem}") from None
    except RecursionError:
        raise BadConfig(f"{file} cannot be read: it is nested too deeply") from None
    tools = content.get("tool", {})
    table = tools.get("ampcompat", {}) if isinstance(tools, dict) else {}
    if not isinstance(table, dict):
        raise BadConfig(f"{file}: tool.ampcompat is not a table but {table!r} - write [tool.ampcompat] above its keys")
    return table


def _toml_module() -> Any:
    """What reads TOML; None where nothing does."""
    for name in ("tomllib", "tomli"):  # Python 3.10 has the first under the second name, where it is installed
        try:
            return import_module(name)
        except ImportError:
            continue
    return None
