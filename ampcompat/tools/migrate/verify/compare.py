"""The verdict: each step of the migrated script against the one before, and what ran in which dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ampcompat.tools.dtypes import HALF_NAMES
from ampcompat.tools.migrate.verify.launch import Trace

# What is a matrix product and runs in half on each of apex's and of torch's lists, on every device.
PRODUCTS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "Bilinear")


@dataclass(frozen=True)
class Verdict:
    """Hold the outcome.

    Attributes:
        lines: A line for each step, then what is to be said of dtypes and endings.
        passed: Whether the migrated script does what the script did.
        strays: The first step that differs, from 0; None where none does.
    """

    lines: list[str]
    passed: bool
    strays: int | None = None


def verdict(before: Trace, after: Trace, rtol: float = 0.05, atol: float = 1e-2) -> Verdict:
    """Compare two runs.

    Args:
        before: The script as it was, on ampcompat.
        after: The migrated one.
        rtol: Relative tolerance of a loss: native autocast rounds at other places, and keeps float32 weights at O2.
        atol: Absolute tolerance of a loss.
    """
    lines = [f"{'step':>4}  {'loss before':>12}  {'after':>12}  {'scale before':>12}  {'after':>12}  verdict"]
    if not before.steps and all(scale == 1 for _, scale, _, _ in after.losses):
        # Amp is off: the migrated script has its steps from a scaler that does nothing.
        after = replace(after, losses=list(before.losses), steps=[])
    failures = 0
    strays = None
    for number in range(max(len(before.steps), len(after.steps))):
        problems = _step_problems(before, after, number)
        one, other = _losses(before, number), _losses(after, number)
        problems += _loss_problems(one, other, rtol, atol)
        if problems:
            failures += 1
            strays = number if strays is None else strays
        values = [f"{sum(loss for loss, _ in side):12.6g}" if side else f"{'-':>12}" for side in (one, other)]
        scales = [f"{side[-1][1]:12g}" if side else f"{'-':>12}" for side in (one, other)]
        lines.append(
            f"{number + 1:>4}  {values[0]}  {values[1]}  {scales[0]}  {scales[1]}  {'; '.join(problems) or 'ok'}"
        )
    for name, trace in (("before", before), ("after", after)):
        if trace.error is not None:
            failures += 1
            lines.append(f"{name}: {trace.error}")
    wrong, notes = _dtypes(before, after)
    if not before.steps and not before.dtypes:
        wrong.append("the script neither stepped an optimizer of amp nor ran a module: nothing to compare")
    return Verdict(lines + wrong + notes, not failures and not wrong, strays)


def _losses(trace: Trace, number: int) -> list[tuple[float, float]]:
    return [(value, scale) for value, scale, _, made in trace.losses if made == number]


def _step_problems(before: Trace, after: Trace, number: int) -> list[str]:
    if number >= len(after.steps):
        return ["not made after the migration"]
    if number >= len(before.steps):
        return ["not made before the migration"]
    problems = []
    if before.steps[number][0] != after.steps[number][0]:
        problems.append(f"another optimizer steps ({before.steps[number][0]} before, {after.steps[number][0]} after)")
    if before.steps[number][1] != after.steps[number][1]:
        problems.append(f"skipped {'before' if before.steps[number][1] else 'after'} only")
    return problems


def _loss_problems(
    one: list[tuple[float, float]], other: list[tuple[float, float]], rtol: float, atol: float
) -> list[str]:
    if len(one) != len(other):
        return [f"{len(one)} losses before, {len(other)} after"]
    problems = []
    for (was, scale), (is_now, new_scale) in zip(one, other, strict=True):
        if math.isfinite(was) != math.isfinite(is_now):
            problems.append(f"loss {is_now:g}")
        elif math.isfinite(was) and abs(was - is_now) > atol + rtol * abs(was):
            problems.append(f"loss is {is_now - was:+.3g} off")
        # Without a scale: bfloat16, or amp switched off.
        if scale != new_scale:
            problems.append(f"scale {new_scale:g}, was {scale:g}")
    return problems


def _dtypes(before: Trace, after: Trace) -> tuple[list[str], list[str]]:
    """Products whose precision changed, which is wrong, and other modules, for which the lists differ."""
    wrong, notes = [], []
    for module, training in sorted(before.dtypes.keys() | after.dtypes.keys()):
        was, now = (trace.dtypes.get((module, training), set()) for trace in (before, after))
        mode = "training" if training else "evaluation"
        shown = ["/".join(sorted(dtypes)) or "not run" for dtypes in (was, now)]
        told = f"{module} in {mode}: {shown[0]} before, {shown[1]} after"
        if was == now:
            continue
        if module in PRODUCTS and bool(was & HALF_NAMES) != bool(now & HALF_NAMES):
            wrong.append(f"{told}: its forward is not under autocast as it was under apex")
        elif was and now:
            notes.append(f"{told} (the lists of native autocast differ there, more so on the CPU: no fault)")
    return wrong, notes
