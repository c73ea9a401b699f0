"""The comparison as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ampcompat.tools.data import to_json
from ampcompat.tools.parity.compare import Result, passed


def save_json(path: Path, results: Sequence[Result], settings: Mapping[str, object]) -> None:
    """Write settings, summaries and steps; non-finite numbers are the strings "nan", "inf" and "-inf"."""
    levels = [_summary(result) for result in results]
    content = {**settings, "passed": passed(results), "levels": levels}
    path.write_text(to_json(content, indent=1) + "\n", encoding="utf-8")


def _summary(result: Result) -> dict[str, object]:
    run, deviation = result.run, result.deviation
    return {
        "level": run.level.name,
        "opt_level": run.level.opt_level,
        "dtype": run.level.dtype,
        "passed": result.passed,
        "verdict": result.verdict,
        "ending": run.ending,
        "message": run.message,
        "max_deviation": deviation.largest if deviation else None,
        "first_beyond": deviation.first_beyond if deviation else None,
        "skipped_steps": run.skipped_steps,
        "steps": [{**asdict(step), "loss": step.loss, "deviation": value} for step, value in result.steps()],
    }
