"""The report as GitHub annotations and as SARIF, for CI."""

from __future__ import annotations

import json
import posixpath
from pathlib import Path

from ampcompat import __version__
from ampcompat.tools.check.findings import DIFFERS, ERROR, NOTE, UNSUPPORTED, WARNING, WORKS, Finding, Report

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
