"""How far a run's losses are from those of the reference, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ampcompat.tools.parity.runs import Run
from ampcompat.tools.recording.steps import Step

#: Two float32 runs of the same sums, whose order a GPU may change, differ by less than this before any step was made.
REPEATED = 1e-5


@dataclass(frozen=True)
class Tolerance:
    """A loss agrees with its reference when ``|loss - reference| <= atol + rtol * |reference|``."""

    rtol: float
    atol: float = 0.0

    def holds(self, loss: float, reference: float) -> bool:
        """Whether ``loss`` agrees; a non-finite one only with a non-finite reference."""
        if not math.isfinite(loss) or not math.isfinite(reference):
            return math.isfinite(loss) or not math.isfinite(reference)
        return abs(loss - reference) <= self.atol + self.rtol * abs(reference)


@dataclass(frozen=True)
class Deviation:
    """A run against the reference.

    Attributes:
        by_step: Relative deviation of the loss at each step that both have: infinite where the loss is not finite,
            None where there is nothing to compare (no loss, or a reference that is not finite).
        first_beyond: Number of the first step out of tolerance, from 1; None if there is none.
    """

    by_step: list[float | None]
    first_beyond: int | None

    @property
    def largest(self) -> float | None:
        """The largest relative deviation; None with nothing to compare."""
        return max((one for one in self.by_step if one is not None), default=None)


def compare(losses: Sequence[float | None], reference: Sequence[float | None], tolerance: Tolerance) -> Deviation:
    """The deviation of ``losses`` from ``reference``, over the steps that both have."""
    by_step: list[float | None] = []
    first = None
    for number, (loss, base) in enumerate(zip(losses, reference, strict=False), start=1):
        if loss is None or base is None:
            by_step.append(None)
            continue
        by_step.append(relative_deviation(loss, base))
        if first is None and not tolerance.holds(loss, base):
            first = number
    return Deviation(by_step, first)


def relative_deviation(loss: float, reference: float) -> float | None:
    """``|loss - reference| / |reference|``; see :class:`Deviation` for what is not finite."""
    if not math.isfinite(reference):
        return None
    if not math.isfinite(loss):
        return math.inf
    if loss == reference:
        return 0.0
    return abs(loss - reference) / abs(reference) if reference else math.inf


@dataclass(frozen=True)
class Result:
    """A run and the judgement.

    Attributes:
        run: The run.
        deviation: From the reference; None for the reference itself.
        passed: Whether it is within the tolerance.
        verdict: The same in words, with the reason.
        not_repeatable: How two runs of the reference differ, where that makes a judgement impossible.
    """

    run: Run
    deviation: Deviation | None
    passed: bool
    verdict: str
    not_repeatable: str = ""

    @property
    def is_off(self) -> bool:
        """Whether its losses are finite, and one is out of tolerance."""
        if self.passed or self.deviation is None or self.run.first_not_finite:
            return False
        return self.deviation.first_beyond is not None

    def steps(self) -> list[tuple[Step, float | None]]:
        """Each step with its deviation, None beyond what could be compared."""
        values = self.deviation.by_step if self.deviation else []
        return [(step, values[at] if at < len(values) else None) for at, step in enumerate(self.run.steps)]


def passed(results: Sequence[Result]) -> bool:
    """Whether every level is within the tolerance."""
    return all(result.passed for result in results)


def must_repeat(results: Sequence[Result]) -> bool:
    """Whether a level fails for losses that are off, which says nothing if the reference itself is not repeatable."""
    return any(result.is_off for result in results)


def judge_again(results: Sequence[Result], repeated: Run) -> list[Result]:
    """The results once the reference has run again: losses are not judged if it differs before any step was made."""
    first, again = results[0].run.losses[0], next(iter(repeated.losses), None)
    if first is None or again is None or (relative_deviation(again, first) or 0.0) <= REPEATED:
        return list(results)
    level = results[0].run.level.opt_level
    told = (
        f"Two runs of {level} differ before any step was made: the loss was {first:g}, and then {again:g}. What takes "
        "its seed from the clock or the system must be seeded with constants."
    )
    return [
        replace(result, verdict="not repeatable", not_repeatable=told) if result.is_off else result
        for result in results
    ]


def judge(runs: Sequence[Run], tolerance: Tolerance) -> list[Result]:
    """Compare all of ``runs`` with the first, the reference, or with one that skipped the same steps.

    A run passes when no loss is out of tolerance, at least half of its steps were made, and it got as far as it should:
    through all its steps, or, where the reference ended by itself, as far as that.

    Args:
        runs: The reference and the others; the reference alone where it is not comparable.
        tolerance: What a loss may be off.
    """
    reference = runs[0]
    results = [_of_reference(reference)]
    for run in runs[1:]:
        compared_with = run.reference or reference
        deviation = compare(run.losses, compared_with.losses, tolerance)
        fault = _fault(run, deviation, compared_with)
        results.append(Result(run, deviation, not fault, fault or "within tolerance"))
    return results


def _of_reference(reference: Run) -> Result:
    if not reference.is_comparable:
        return Result(reference, None, False, reference.message)
    broken = reference.first_not_finite
    if broken is not None:
        return Result(reference, None, False, f"{broken} in float32 itself")
    return Result(reference, None, True, "reference")


def _fault(run: Run, deviation: Deviation, reference: Run) -> str:
    """Why ``run`` does not pass; "" where it does."""
    ended_with_reference = run.ending == "ended" and len(run.steps) == len(reference.steps)
    if run.message and not ended_with_reference:
        return run.message
    if deviation.largest is None:
        return "no loss to compare"
    if run.is_mostly_skipped:
        return f"{len(run.skipped_steps)} of {len(run.steps)} steps were skipped"
    if deviation.first_beyond is None:
        is_as_long = run.message or len(run.losses) == len(reference.losses)
        return "" if is_as_long else f"{len(run.losses)} losses, where the reference has {len(reference.losses)}"
    loss = run.losses[deviation.first_beyond - 1]
    base = reference.losses[deviation.first_beyond - 1]
    told = f"loss {loss:.6g} at step {deviation.first_beyond}"
    return f"{told}, {reference.level.opt_level}'s {base:.6g}"
