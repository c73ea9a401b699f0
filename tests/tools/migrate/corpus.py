"""Scripts in the manner of public repositories, run before and after ``migrate --to native`` and compared.

They print lines such as ``step 3 loss 0.25 grad_norm 1.5`` or ``{"step": 3, "loss": 0.25}``; each name is a series.
Each script is run under ampcompat's apex, at O0 and at O1 too, then migrated and run where neither apex nor ampcompat
can be imported. How two runs are compared: see ``tolerances``. ``scripts/README.md`` says which kind a script is of.
"""

import contextlib
import importlib.machinery
import io
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from running import imports, migrate, run
from torch.optim.optimizer import register_optimizer_step_pre_hook

SCRIPTS = Path(__file__).resolve().parent / "scripts"
# Scripts in the manner of well-known users; other tests train them at every level.
LEGACY = Path(__file__).resolve().parents[2] / "legacy" / "scripts"
PATHS = {path.stem: path for folder in (SCRIPTS, LEGACY) for path in sorted(folder.glob("*.py"))}

# Command lines of the scripts that are run in more than one way; the others run once, without arguments.
ARGUMENTS: dict[str, list[list[str]]] = {
    "resume_checkpoint": [[], ["--opt-level", "O1"]],
    "uniter_train_vqa": [[], ["--no_fp16"]],
}

LINE = re.compile(r"^(step|eval) (\d+)((?: [A-Za-z_]\w* [-+\w.]+)+)\s*$")
# The tolerance is this many times the distance between the runs before migration, at least ...
NOISE_FACTOR = 8.0
# ... this part of the largest value of the series: half the spacing of float16 numbers.
HALF_EPS = 2.0**-11
# A dynamic loss scale that starts at 65536 settles within a few steps; an optimizer that skips more is at fault.
MOST_SKIPS = 3


@dataclass
class Run:
    """What one run of a script did: what it printed, by name, and for each optimizer whether each step was made."""

    series: dict[str, list[float]]
    steps: list[list[bool]] = field(default_factory=list)


def command_lines(name: str) -> list[list[str]]:
    """Return the argument lists that the script is run with."""
    return ARGUMENTS.get(name, [[]])


def parse(output: str) -> dict[str, list[float]]:
    """Return the series that a script printed."""
    series: dict[str, list[float]] = {}
    for line in output.splitlines():
        for name, value in values_of(line.strip()):
            series.setdefault(name, []).append(value)
    return series


def values_of(line):
    """The values of a line, each with the name of its series."""
    if line.startswith('{"step"'):
        return [(f"step {name}", float(value)) for name, value in json.loads(line).items() if name != "step"]
    match = LINE.match(line)
    if match is None:
        return []
    kind, _, pairs = match.groups()
    words = pairs.split()
    return [(f"{kind} {name}", float(value)) for name, value in zip(words[::2], words[1::2], strict=True)]


class Steps:
    """The optimizers of a run in the order of their first steps, with what became of each step."""

    def __init__(self):
        self.optimizers = []
        self.made = []

    def of(self, optimizer):
        for known, made in zip(self.optimizers, self.made, strict=True):
            if known is optimizer:
                return made
        self.optimizers.append(optimizer)
        self.made.append([])
        return self.made[-1]


@contextlib.contextmanager
def recorded(patch, skips):
    """Record the steps of a run; leave out those that ``skips`` has as not made."""
    steps = Steps()
    exec_module = importlib.machinery.SourceFileLoader.exec_module

    def watched(loader, module):
        exec_module(loader, module)
        if module.__name__.rpartition(".")[2] == "native_amp":
            step = module._step

            def noted(optimizer, *args, **kwargs):
                made = steps.of(optimizer)
                before = len(made)
                result = step(optimizer, *args, **kwargs)
                if len(made) == before:
                    made.append(False)
                return result

            module._step = noted

    def stepping(optimizer, args, kwargs):
        made = steps.of(optimizer)
        number = steps.made.index(made) if skips else 0
        if skips and number < len(skips) and not (skips[number][len(made) :] or [True])[0]:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = None
        made.append(True)

    patch.setattr(importlib.machinery.SourceFileLoader, "exec_module", watched)
    handle = register_optimizer_step_pre_hook(stepping)
    try:
        yield steps
    finally:
        handle.remove()


def run_script(folder, name, arguments, apex, level=None, skips=()):
    """Run a script of a folder; None where it refuses the level."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, imports(folder, apex), recorded(patch, skips) as steps:
        patch.setenv("PYTHONHASHSEED", "0")  # a script sets it
        patch.setattr(sys, "argv", [f"{name}.py", *arguments])
        if level is not None:
            patch.setenv("AMPCOMPAT_OPT_LEVEL", level)
        try:
            with contextlib.redirect_stdout(output):
                run(folder, f"{name}.py")
        except SystemExit as leaving:
            if leaving.code:
                raise AssertionError(f"exit status {leaving.code}: {output.getvalue()[-500:]}") from None
        except Exception:
            if level is None:
                raise
            return None
    return Run(parse(output.getvalue()), steps.made)


@dataclass
class Baseline:
    """The runs that a migrated script is compared with; None where the script refuses a level."""

    before: Run
    float32: Run | None
    o1: Run | None
    # The float32 run that skips the steps which a migrated script skipped.
    float32_with_skips: Run | None = None

    @property
    def is_float32(self) -> bool:
        """True where the script itself runs in float32."""
        return self.float32 is not None and self.float32.series == self.before.series


def baseline(folder, name, arguments) -> Baseline:
    """Run a script as it is, at O0 and at O1."""
    before = run_script(folder, name, arguments, apex=True)
    others = []
    for level in ("O0", "O1"):
        other = run_script(folder, name, arguments, apex=True, level=level)
        others.append(other if other is not None and lengths(other.series) == lengths(before.series) else None)
    return Baseline(before, *others)


def lengths(series: dict[str, list[float]]) -> dict[str, int]:
    """Return how many values each series has."""
    return {name: len(values) for name, values in series.items()}


def all_finite(values: list[float]) -> bool:
    """Return whether no value is inf or nan."""
    return all(math.isfinite(value) for value in values)


def tolerances(base: Baseline, name: str) -> tuple[list[float], list[float]]:
    """Return the values that a series should have, and how far it may be from each.

    Half precision moves a run away from the float32 run, and rounding in other places moves it elsewhere. The same
    script at O1 is a sample of that: its distance to the float32 run shows how much half precision moves this script up
    to this step. (O1, because a migrated script keeps float32 weights; where O1 is refused, the script as it is.) The
    migrated script is another sample, and may be ``NOISE_FACTOR`` times as far away.

    A script that has no finite float32 run (it counts on skipped steps) is compared with itself before migration.
    """
    before = base.before.series[name]
    sample = before if base.o1 is None else base.o1.series[name]
    exact = [run.series[name] for run in (base.float32, base.float32_with_skips) if run is not None]
    exact = [values for values in exact if all_finite(values)] or [before]
    # Without the skips, where that run is finite: the sample made these steps, most likely.
    noise_free, reference = exact[0], exact[-1]
    largest = max((abs(value) for value in reference if math.isfinite(value)), default=0.0)
    noise = HALF_EPS * largest
    allowed = []
    for half, value in zip(sample, noise_free, strict=True):
        distance = abs(half - value)
        if math.isfinite(distance):
            noise = max(noise, distance)
        allowed.append(NOISE_FACTOR * noise)
    return reference, allowed


def differences(base: Baseline, series: dict[str, list[float]]) -> Iterator[str]:
    """Yield, for each series that strays from the runs before migration, where it does first."""
    before = base.before.series
    if lengths(series) != lengths(before):
        yield f"printed {lengths(series)}, before {lengths(before)}"
        return
    for name, values in series.items():
        kind, _, quantity = name.partition(" ")
        if quantity == "scale":
            reference, allowed = before[name], [0.0] * len(values)
        else:
            reference, allowed = tolerances(base, name)
        for index, value in enumerate(values):
            both_not_finite = not math.isfinite(value) and not math.isfinite(reference[index])
            if both_not_finite or abs(value - reference[index]) <= allowed[index]:
                continue
            yield (
                f"{kind} {index}: {quantity} is {value:.6g}, should be {reference[index]:.6g}"
                f" within {allowed[index]:.2g}"
            )
            break


def precision_difference(base: Baseline, series: dict[str, list[float]]) -> str | None:
    """Return what is wrong where a script runs in another precision than before, e.g. amp was dropped."""
    if base.float32 is None:
        return None
    ran_in_float32 = series == base.float32.series
    if base.is_float32 and not ran_in_float32:
        return "ran in float32 before, and no longer does"
    if ran_in_float32 and not base.is_float32:
        return "runs in float32: amp was dropped"
    return None


def faults(name, folder):
    """What is wrong with a script after its migration, and what was left to the reader."""
    original, migrated = folder / "before", folder / "after"
    for place in (original, migrated):
        place.mkdir()
        shutil.copy(PATHS[name], place)
    left = migrate(migrated)
    found = []
    for arguments in command_lines(name):
        base = baseline(original, name, arguments)
        assert base.before.series
        after = run_script(migrated, name, arguments, apex=False)
        skips = [made.count(False) for made in after.steps]
        if max(skips, default=0) > MOST_SKIPS:
            found.append(f"skips {max(skips)} steps")
        if any(skips):
            exact = run_script(original, name, arguments, apex=True, level="O0", skips=after.steps)
            if exact is not None and lengths(exact.series) == lengths(base.before.series):
                base = replace(base, float32_with_skips=exact)
        found += differences(base, after.series)
        precision = precision_difference(base, after.series)
        if precision is not None:
            found.append(precision)
    return found, left
