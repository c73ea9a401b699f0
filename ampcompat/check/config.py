"""Choose what is reported: rules named on the command line, in ``[tool.ampcompat]``, or by a comment."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ampcompat.check.findings import Finding

COMMENT = re.compile(r"#\s*ampcompat:\s*ignore(?:\[([^\]]*)\])?")
KEYS = ("select", "ignore", "exclude")


class BadConfig(ValueError):
    """``[tool.ampcompat]`` cannot be used; the message says why."""


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
        """The configuration with the command line's rules: they replace ``select`` and add to ``ignore``."""
        return Config(tuple(select) or self.select, (*self.ignore, *ignore), self.exclude)


def matches(finding: Finding, rule: str) -> bool:
    """Whether a rule names a finding."""
    return rule in (finding.name, finding.kind, finding.level) or finding.name.startswith(f"{rule}.")


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
        BadConfig: the table has unknown keys, or values that are no lists of strings.
    """
    first = Path(next(iter(paths), ".")).resolve()
    for folder in (first, *first.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            return _parsed(file)
    return Config()


def _parsed(file: Path) -> Config:
    text = file.read_text(encoding="utf-8", errors="replace")
    if "[tool.ampcompat]" not in text:
        return Config()
    rules: dict[str, tuple[str, ...]] = {}
    for key, value in _toml(text, file).get("tool", {}).get("ampcompat", {}).items():
        if key not in KEYS:
            raise BadConfig(f"{file}: [tool.ampcompat] has no {key!r}; use {', '.join(KEYS)}")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise BadConfig(f"{file}: {key} in [tool.ampcompat] is {value!r}; give a list of strings")
        rules[key] = tuple(value)
    return Config(**rules)


def _toml(text: str, file: Path) -> dict[str, dict[str, dict[str, object]]]:
    for name in ("tomllib", "tomli"):  # Python 3.10 has the first under the second name, where it is installed
        try:
            module = import_module(name)
        except ImportError:
            continue
        try:
            content: dict[str, dict[str, dict[str, object]]] = module.loads(text)
        except ValueError as problem:
            raise BadConfig(f"{file} cannot be read: {problem}") from None
        return content
    raise BadConfig(f"{file}: reading it needs Python 3.11, or tomli: pip install tomli")
