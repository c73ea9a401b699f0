"""The comparison as files: everything as JSON, the steps as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ampcompat.tools.data import to_json
from ampcompat.tools.parity.compare import Result
from ampcompat.tools.recording.steps import Step

COLUMNS = ("level", "step", "optimizer", "loss", "deviation", "scale", "grad_norm", "skipped", "seconds", "memory")


def save_json(path: Path, results: Sequence[Result], settings: Mapping[str, object]) -> None:
    """Write settings, summaries and steps; non-finite numbers are the strings "nan", "inf" and "-inf"."""
    levels = [_summary(result) for result in results]
    content = {**settings, "passed": passed(results), "levels": levels}
    path.write_text(to_json(content, indent=1) + "\n", encoding="utf-8")


def passed(results: Sequence[Result]) -> bool:
    """Whether every level that is judged is within the tolerance."""
    return all(result.passed for result in results if result.judged)


def save_csv(path: Path, results: Sequence[Result]) -> None:
    """Write a row per level and step; what is not known is empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for result in results:
            for step, deviation in result.steps():
                known = {**_as_dict(step, deviation), "level": result.run.level.name}
                rows.writerow([known[column] for column in COLUMNS])


def _summary(result: Result) -> dict[str, object]:
    run, deviation = result.run, result.deviation
    return {
        "level": run.level.name,
        "opt_level": run.level.opt_level,
        "dtype": run.level.dtype,
        "passed": result.passed,
        "judged": result.judged,
        "verdict": result.verdict,
        "ending": run.ending,
        "message": run.message,
        "max_deviation": deviation.largest if deviation else None,
        "mean_deviation": deviation.mean if deviation else None,
        "first_beyond": deviation.first_beyond if deviation else None,
        "skipped": len(run.skipped_steps),
        "skipped_steps": run.skipped_steps,
        "seconds_per_step": run.seconds_per_step,
        "peak_memory": run.peak_memory,
        "steps": [_as_dict(step, value) for step, value in result.steps()],
    }


def _as_dict(step: Step, deviation: float | None) -> dict[str, object]:
    return {**asdict(step), "loss": step.loss, "deviation": deviation}
