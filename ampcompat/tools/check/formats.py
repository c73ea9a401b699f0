"""The report as text for a terminal, and as GitHub annotations."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from pathlib import Path

from ampcompat.tools.check.findings import DIFFERS, ERROR, NOTE, UNSUPPORTED, WARNING, WORKS, Finding, Report

VERDICTS = {"works": "works", "differs": "works with a difference", UNSUPPORTED: "not supported"}
COLOURS = {"works": "green", "differs": "yellow", "warning": "yellow", UNSUPPORTED: "red", "error": "red"}


def plain(text: str) -> str:
    """``text`` without what a terminal would obey: file names and messages come from the scanned directory."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def table(report: Report, paint: Callable[[str, str], str] = lambda text, colour: text) -> str:
    """Symbols first, then traps and files, each with ``file:line``; a summary line last.

    ``paint(text, colour)`` gives verdicts their colour.
    """
    lines: list[str] = []
    for title, kind in (("apex symbols", "symbol"), ("traps", "trap"), ("files", "file")):
        chosen = [f for f in report.findings if f.kind == kind]
        if not chosen:
            continue
        lines.append(title)
        places = [f"{f.path}:{f.line}" if f.line else f.path for f in chosen]
        wide = min(max(map(len, places)), 48)
        for where, finding in zip(places, chosen, strict=True):
            verdict = VERDICTS.get(finding.level, finding.level)
            cell = f"{verdict:<{23 if kind == 'symbol' else 8}}"
            if finding.level in COLOURS:
                cell = paint(cell, COLOURS[finding.level])
            lines.append(f"  {plain(where):<{wide}}  {cell}  {plain(finding.name)}")
            if finding.note:
                lines.append(plain(f"  {'':<{wide}}    {finding.note}"))
        lines.append("")
    counts = ", ".join(f"{n} {VERDICTS.get(level, level)}" for level, n in report.counts.items() if n)
    files = "1 file" if report.files == 1 else f"{report.files} files"
    lines.append(f"{files}: {counts or 'no apex symbol found'}")
    return "\n".join(lines)


GITHUB = {UNSUPPORTED: "error", ERROR: "error", WARNING: "warning", DIFFERS: "notice", NOTE: "notice"}


def place(report: Report, finding: Finding) -> str:
    """The path of a finding from where the command runs."""
    root = report.root
    if not root or root == ".":
        return finding.path
    return posixpath.join(Path(root).as_posix(), finding.path) if Path(root).is_dir() else Path(root).as_posix()


def github(report: Report) -> str:
    """Workflow commands, one a line: GitHub shows them beside the code. What works is left out."""
    lines = []
    for finding in report.findings:
        if finding.level == WORKS:
            continue
        where = f"file={_property(place(report, finding))}"
        where += f",line={finding.line}" if finding.line else ""
        where += f",col={finding.column}" if finding.column else ""
        where += f",title={_property(finding.name)}"
        lines.append(f"::{GITHUB[finding.level]} {where}::{_message(finding.note or finding.level)}")
    return "\n".join(lines)


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
