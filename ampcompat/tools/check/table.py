"""The report as text for a terminal."""

from __future__ import annotations

from collections.abc import Callable

from ampcompat.tools.check.findings import UNSUPPORTED, Report

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
    for title, kinds in (("apex symbols", ("symbol",)), ("traps", ("trap",)), ("files", ("file",))):
        chosen = [f for f in report.findings if f.kind in kinds]
        if not chosen:
            continue
        lines.append(title)
        places = [f"{f.path}:{f.line}" if f.line else f.path for f in chosen]
        wide = min(max(map(len, places)), 48)
        for place, finding in zip(places, chosen, strict=True):
            verdict = VERDICTS.get(finding.level, finding.level)
            cell = f"{plain(verdict):<{23 if 'symbol' in kinds else 8}}"
            if finding.level in COLOURS:
                cell = paint(cell, COLOURS[finding.level])
            lines.append(f"  {plain(place):<{wide}}  {cell}  {plain(finding.name)}")
            if finding.note:
                lines.append(plain(f"  {'':<{wide}}    {finding.note}"))
        lines.append("")
    counts = ", ".join(f"{n} {VERDICTS.get(level, level)}" for level, n in report.counts.items() if n)
    lines.append(f"{report.files} files: {counts or 'no apex symbol found'}")
    return "\n".join(lines)
