"""Hold what the check reports: findings, and a report that knows its exit status."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field

WORKS, DIFFERS, UNSUPPORTED, ERROR, WARNING, NOTE = "works", "differs", "unsupported", "error", "warning", "note"
LEVELS = (UNSUPPORTED, ERROR, WARNING, DIFFERS, NOTE, WORKS)
KINDS = ("symbol", "trap", "file")


@dataclass(frozen=True, order=True)
class Finding:
    """One line of the report.

    Attributes:
        path: The file, relative to the scanned directory, with ``/`` between its parts.
        line: Line in the file, from 1; 0 where the finding is about the file.
        column: Column, from 1; 0 where there is none.
        kind: ``"symbol"`` (an apex name in use), ``"trap"`` (a mistake in mixed precision) or ``"file"``.
        name: The apex symbol in full, or the name of the trap.
        level: ``works``, ``differs``, ``unsupported`` for symbols; ``error``, ``warning``, ``note`` for the others.
        note: What differs or goes wrong, and the fix.
    """

    path: str
    line: int
    column: int
    kind: str
    name: str
    level: str
    note: str = ""


@dataclass
class Report:
    """All findings of one scan, in the order of files and lines."""

    root: str
    files: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Number of findings at each level."""
        found = Counter(finding.level for finding in self.findings)
        return {level: found[level] for level in LEVELS}

    @property
    def exit_status(self) -> int:
        """1 when something is unsupported or is an error, else 0."""
        return int(any(finding.level in (UNSUPPORTED, ERROR) for finding in self.findings))

    def as_dict(self) -> dict[str, object]:
        """The report as plain values; the layout that ``--format json`` writes."""
        return {
            "format": 1,
            "path": self.root,
            "files": self.files,
            "exit_status": self.exit_status,
            "summary": self.counts,
            "findings": [asdict(finding) for finding in self.findings],
        }
