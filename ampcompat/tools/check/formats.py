"""The report as text for a terminal, and as GitHub annotations and SARIF for CI."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable
from pathlib import Path

from ampcompat import __version__
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
    lines.append(f"{report.files} files: {counts or 'no apex symbol found'}")
    return "\n".join(lines)


SEVERITY = {UNSUPPORTED: ERROR, ERROR: ERROR, WARNING: WARNING, DIFFERS: NOTE, NOTE: NOTE}
GITHUB = {ERROR: "error", WARNING: "warning", NOTE: "notice"}


def place(report: Report, finding: Finding) -> str:
    """The path of a finding from where the command runs."""
    root = report.root
    if not root or root == ".":
        return finding.path
    return posixpath.join(Path(root).as_posix(), finding.path) if Path(root).is_dir() else Path(root).as_posix()


def told(report: Report) -> list[Finding]:
    """Findings that tell something: what works is left out."""
    return [finding for finding in report.findings if finding.level != WORKS]


def github(report: Report) -> str:
    """Workflow commands, one a line: GitHub shows them beside the code."""
    lines = []
    for finding in told(report):
        where = f"file={_property(place(report, finding))}"
        where += f",line={finding.line}" if finding.line else ""
        where += f",col={finding.column}" if finding.column else ""
        kind = GITHUB[SEVERITY[finding.level]]
        lines.append(f"::{kind} {where},title={_property(finding.name)}::{_message(finding.note or finding.level)}")
    return "\n".join(lines)


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def sarif(report: Report) -> str:
    """SARIF 2.1.0, which code-scanning services take."""
    chosen = told(report)
    rules = [{"id": name} for name in sorted({finding.name for finding in chosen})]
    results: list[dict[str, object]] = []
    for finding in chosen:
        region = {"startLine": max(finding.line, 1)}
        if finding.column:
            region["startColumn"] = finding.column
        location = {"artifactLocation": {"uri": place(report, finding)}, "region": region}
        results.append(
            {
                "ruleId": finding.name,
                "level": SEVERITY[finding.level],
                "message": {"text": finding.note or finding.level},
                "locations": [{"physicalLocation": location}],
            }
        )
    driver = {"name": "ampcompat check", "version": __version__, "rules": rules}
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json.dumps(log, indent=2)
