"""The report as text for a terminal."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from pathlib import Path

from ampcompat.tools.check.findings import KINDS, UNSUPPORTED, WORKS, Finding, Report

VERDICTS = {"works": "works", "differs": "works with a difference", UNSUPPORTED: "not supported"}
COLOURS = {"works": "green", "differs": "yellow", "warning": "yellow", UNSUPPORTED: "red", "error": "red"}


def plain(text: str) -> str:
    """``text`` without what a terminal would obey: file names and messages come from the scanned directory."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def lines(report: Report, lists_all: bool, paint: Callable[[str, str], str] = lambda text, colour: text) -> str:
    """One finding a line, ``path:line:col: name verdict: message``: symbols, then traps, then files; a summary last.

    Args:
        report: The report.
        lists_all: Whether symbols that work are listed, too; else they are counted.
        paint: ``paint(text, colour)`` gives verdicts their colour.
    """
    shown = []
    for kind in KINDS:
        for finding in report.findings:
            if finding.kind == kind and (lists_all or finding.level != WORKS):
                shown.append(_line(report, finding, paint))
    counts = ", ".join(f"{n} {VERDICTS.get(level, level)}" for level, n in report.counts.items() if n)
    files = "1 file" if report.files == 1 else f"{report.files} files"
    return "\n".join([*shown, f"{files}: {counts or 'no findings'}"])


def _line(report: Report, finding: Finding, paint: Callable[[str, str], str]) -> str:
    where = f"{_place(report, finding)}:{finding.line or 1}:{finding.column or 1}"
    verdict = VERDICTS.get(finding.level, finding.level)
    if finding.level in COLOURS:
        verdict = paint(verdict, COLOURS[finding.level])
    note = f": {finding.note}" if finding.note else ""
    return f"{plain(where)}: {plain(finding.name)} {verdict}{plain(note)}"


def _place(report: Report, finding: Finding) -> str:
    """The path of a finding from where the command runs."""
    root = report.root
    if not root or root == ".":
        return finding.path
    return posixpath.join(Path(root).as_posix(), finding.path) if Path(root).is_dir() else Path(root).as_posix()
