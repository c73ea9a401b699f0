"""Judge ``ampcompat migrate --to native`` by scripts in the shapes of real repositories.

``python corpus.py [NAME...]`` runs each script of ``scripts/`` under ``ampcompat run``, migrates a copy, runs the copy
where neither apex nor ampcompat can be imported, and prints a table: right, right but marked, marked, silently wrong.

The scripts print lines such as ``step 3 loss 0.25 grad_norm 1.5`` or ``eval 0 loss 0.3``; each name is a series.
``scripts/README.md`` says which shape a script has and which marks belong there.

How two runs are compared: see ``tolerances``. ``python corpus.py --check [NAME...]`` judges the scripts themselves: two
runs are equal, and the comparison notices optimizers that do nothing, clipping that does nothing or sees scaled
gradients, and gradients that are never cleared. ``--baselines-only`` fills the cache of the runs before migration.
"""

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "scripts"
REPOSITORY = HERE.parents[2]

# Command lines of the scripts that are run in more than one way, or need arguments; the others run once, with none.
ARGUMENTS: dict[str, list[list[str]]] = {
    "enabled_expression": [[], ["--fp32"]],
    "hf_run_glue": [["--fp16"], [], ["--fp16", "--fp16_opt_level", "O2"]],
    "imagenet_main_amp": [[], ["--opt-level", "O0"], ["--opt-level", "O2", "--loss-scale", "128.0"]],
    "module_globals": [[], ["--amp", "0"]],
    "resume_checkpoint": [[], ["--opt-level", "O1"]],
    "static_scale_o3": [[], ["O0", "1.0"], ["O1", "1024.0"]],
    "stylegan2_train": [[], ["--no_fp16"]],
    "swin_main": [[], ["--amp-opt-level", "O0"], ["--accumulation-steps", "1"]],
    "timm_train": [["--apex-amp"], []],
    "uniter_train_vqa": [[], ["--no_fp16"]],
}
# Scripts whose model is never called: its other methods run in float32 when its forward is what autocast applies to.
CALLS_METHODS_ONLY = {"ppo_act_method"}

RIGHT = "right"
RIGHT_MARKED = "right, marked"
MARKED = "marked"
SILENTLY_WRONG = "silently wrong"
MIGRATE_FAILED = "migrate failed"
NOT_RUN_BEFORE = "fails before"
KINDS = (RIGHT, RIGHT_MARKED, MARKED, SILENTLY_WRONG, MIGRATE_FAILED, NOT_RUN_BEFORE)

# What ``migrate`` writes above a line that it leaves to a person.
MARK = re.compile(r"TODO\(ampcompat\)")
LINE = re.compile(r"^(step|eval) (\d+)((?: [A-Za-z_]\w* [-+\w.]+)+)\s*$")

# The tolerance is this many times the distance between the runs before migration, at least ...
NOISE_FACTOR = 8.0
# ... this part of the largest value of the series: half the spacing of float16 numbers.
HALF_EPS = 2.0**-11

NO_APEX = '''\
"""Make importing apex or ampcompat fail, as where neither is installed."""

import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("apex", "amp_C", "apex_C", "ampcompat"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, Missing())
'''

# Writes which optimizer steps native_amp skipped: for each optimizer, in the order of their first steps, whether each
# step was made.
RECORD_SKIPS = """
import atexit
import importlib.machinery
import json
import os

from torch.optim.optimizer import register_optimizer_step_pre_hook

optimizers = []
steps = []


def steps_of(optimizer):
    for known, made in zip(optimizers, steps):
        if known is optimizer:
            return made
    optimizers.append(optimizer)
    steps.append([])
    return steps[-1]


loader = importlib.machinery.SourceFileLoader
exec_module = loader.exec_module


def exec_and_watch(self, module):
    exec_module(self, module)
    if module.__name__.rpartition(".")[2] != "native_amp":
        return
    skip = module._skip

    def noted(optimizer):
        steps_of(optimizer).append(False)
        skip(optimizer)

    module._skip = noted


def write():
    with open(os.environ["CORPUS_STEPS"], "w") as file:
        json.dump(steps, file)


loader.exec_module = exec_and_watch
register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: steps_of(optimizer).append(True))
atexit.register(write)
"""

# Skips the same steps in a run before migration: an optimizer leaves parameters without a gradient as they are.
REPLAY_SKIPS = """
import json

from torch.optim.optimizer import register_optimizer_step_pre_hook

made = json.loads({steps!r})
optimizers = []
counts = []


def skip(optimizer, args, kwargs):
    if not any(known is optimizer for known in optimizers):
        optimizers.append(optimizer)
        counts.append(0)
    serial = [known is optimizer for known in optimizers].index(True)
    number = counts[serial]
    counts[serial] += 1
    if made[serial][number]:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


register_optimizer_step_pre_hook(skip)
"""

# A dynamic loss scale that starts at 65536 settles within a few steps; an optimizer that skips more is at fault.
MOST_SKIPS = 3

# Faults put into a run before migration; the comparison has to notice each of them.
CONTROLS = {
    "steps do nothing": """\
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

kept = {}

def tensors(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]

def keep(optimizer, args, kwargs):
    kept[id(optimizer)] = [p.detach().clone() for p in tensors(optimizer)]

def restore(optimizer, args, kwargs):
    with torch.no_grad():
        for p, old in zip(tensors(optimizer), kept.pop(id(optimizer))):
            p.copy_(old)

register_optimizer_step_pre_hook(keep)
register_optimizer_step_post_hook(restore)
""",
    "clipping does nothing": """\
import torch

def norm_only(parameters, max_norm, norm_type=2.0, **ignored):
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [p.grad.norm() for p in parameters if p.grad is not None]
    return torch.stack(grads).norm() if grads else torch.tensor(0.0)

torch.nn.utils.clip_grad_norm_ = norm_only
torch.nn.utils.clip_grad.clip_grad_norm_ = norm_only
torch.nn.utils.clip_grad_value_ = lambda parameters, clip_value, **ignored: None
""",
    "clipping sees scaled gradients": """\
import torch

def clip_scaled(parameters, max_norm, norm_type=2.0, **ignored):
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    norm = torch.stack([g.norm() for g in grads]).norm() * 65536
    for grad in grads:
        grad.mul_(min(1.0, float(max_norm) / (float(norm) + 1e-6)))
    return norm

torch.nn.utils.clip_grad_norm_ = clip_scaled
torch.nn.utils.clip_grad.clip_grad_norm_ = clip_scaled
""",
    "gradients are never cleared": """\
import torch

torch.optim.Optimizer.zero_grad = lambda self, *args, **kwargs: None
torch.nn.Module.zero_grad = lambda self, *args, **kwargs: None
""",
}


@dataclass
class Run:
    """What one run of a script did."""

    exit_status: int
    # "step loss" -> its values, in the order of printing
    series: dict[str, list[float]]
    output: str
    # For each optimizer of a migrated script, whether each step was made.
    steps: list[list[bool]] = field(default_factory=list)

    @property
    def last_line(self) -> str:
        """The line that says most about a failure."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""


@dataclass
class Result:
    """The verdict on one script."""

    name: str
    kind: str
    marks: int = 0
    # Why it is not right, or what else is worth saying.
    details: list[str] = field(default_factory=list)
    migrated: str = ""
    messages: str = ""


def script_names() -> list[str]:
    """Return the names of all scripts, sorted."""
    return sorted(path.stem for path in SCRIPTS.glob("*.py"))


def command_lines(name: str) -> list[list[str]]:
    """Return the argument lists that the script is run with."""
    return ARGUMENTS.get(name, [[]])


def parse(output: str) -> dict[str, list[float]]:
    """Return the series that a script printed."""
    series: dict[str, list[float]] = {}
    for line in output.splitlines():
        match = LINE.match(line.strip())
        if match is None:
            continue
        kind, _, pairs = match.groups()
        words = pairs.split()
        for name, value in zip(words[::2], words[1::2], strict=True):
            series.setdefault(f"{kind} {name}", []).append(float(value))
    return series


def _environment(directory: Path, site: str | None, package: bool) -> dict[str, str]:
    """Return the environment of a run; ``site`` is code that Python runs at its start."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONHASHSEED="0", PYTHONDONTWRITEBYTECODE="1")
    # Anything the environment asks of ampcompat would hold for one of the runs only.
    environment = {name: value for name, value in environment.items() if not name.startswith(("AMPCOMPAT", "APEX"))}
    paths = []
    if site is not None:
        folder = directory / "site"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(site, encoding="utf-8")
        paths.append(str(folder))
    if package:
        paths.append(str(REPOSITORY))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _python(words: list[str], directory: Path, site: str | None, package: bool, timeout: float = 300) -> Run:
    """Run Python in ``directory``."""
    recorded = directory / "steps.json"
    recorded.unlink(missing_ok=True)
    environment = _environment(directory, site, package)
    environment["CORPUS_STEPS"] = str(recorded)
    try:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Run(124, {}, f"no end after {timeout} seconds")
    steps = json.loads(recorded.read_text(encoding="utf-8")) if recorded.exists() else []
    return Run(done.returncode, parse(done.stdout), done.stdout, steps)


def run_before(name: str, arguments: list[str], *options: str, site: str | None = None) -> Run:
    """Run a script under ``ampcompat run``, in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
        directory = Path(folder)
        script = directory / f"{name}.py"
        script.write_bytes((SCRIPTS / f"{name}.py").read_bytes())
        return _python(["-m", "ampcompat", "run", *options, script.name, *arguments], directory, site, package=True)


def _cache_key(name: str, arguments: list[str], options: tuple[str, ...]) -> str:
    """Return what a run before migration depends on: the script, the core, torch."""
    import torch

    digest = hashlib.sha256()
    digest.update(repr((torch.__version__, sys.version, arguments, options)).encode())
    digest.update((SCRIPTS / f"{name}.py").read_bytes())
    for path in sorted((REPOSITORY / "ampcompat" / "amp").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cached_run_before(name: str, arguments: list[str], *options: str) -> Run:
    """Run a script before migration, or return the run that was kept."""
    folder = Path(tempfile.gettempdir()) / f"ampcompat-corpus-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    kept = folder / f"{name}-{_cache_key(name, arguments, options)[:24]}.json"
    if kept.exists():
        return Run(**json.loads(kept.read_text(encoding="utf-8")))
    run = run_before(name, arguments, *options)
    if run.exit_status == 0:
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(run)), encoding="utf-8")
        partial.replace(kept)
    return run


@dataclass
class Baseline:
    """The runs that a migrated script is compared with."""

    before: Run
    # The same at other levels; None where the script refuses the level.
    float32: Run | None
    o1: Run | None
    # The float32 run that skips the steps which a migrated script skipped.
    float32_with_skips: Run | None = None

    @property
    def is_float32(self) -> bool:
        """True where the script itself runs in float32."""
        return self.float32 is not None and self.float32.series == self.before.series


def baseline(name: str, arguments: list[str]) -> Baseline:
    """Run a script as it is, at O0 and at O1."""
    before = cached_run_before(name, arguments)
    others = []
    for level in ("O0", "O1"):
        run = cached_run_before(name, arguments, "--opt-level", level)
        comparable = run.exit_status == 0 and lengths(run.series) == lengths(before.series)
        others.append(run if comparable else None)
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


def migrate(name: str, directory: Path) -> tuple[Run, Path]:
    """Migrate a copy of the script in ``directory``."""
    copy = directory / f"{name}.py"
    copy.write_bytes((SCRIPTS / f"{name}.py").read_bytes())
    run = _python(
        ["-m", "ampcompat", "migrate", "--to", "native", "--write", copy.name], directory, site=None, package=True
    )
    return run, copy


def judge(name: str) -> Result:
    """Migrate one script, run it before and after, and say which kind it is."""
    bases = []
    for arguments in command_lines(name):
        base = baseline(name, arguments)
        if base.before.exit_status != 0 or not base.before.series:
            return Result(name, NOT_RUN_BEFORE, details=[base.before.last_line])
        bases.append(base)
    with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
        directory = Path(folder)
        migration, copy = migrate(name, directory)
        text = copy.read_text(encoding="utf-8")
        marks = len(MARK.findall(text))
        result = Result(name, RIGHT, marks, migrated=text, messages=migration.output)
        if migration.exit_status not in (0, 1):
            result.kind = MIGRATE_FAILED
            result.details.append(f"exit status {migration.exit_status}: {migration.last_line}")
            return result
        if migration.exit_status == 1 and marks == 0:
            result.details.append("exit status 1, and no mark in the file")
            marks = 1
        if migration.exit_status == 0 and marks > 0:
            result.details.append("exit status 0 in spite of marks")
        faults = []
        for arguments, base in zip(command_lines(name), bases, strict=True):
            after = _python([copy.name, *arguments], directory, NO_APEX + RECORD_SKIPS, package=False)
            shown = f" [{' '.join(arguments)}]" if arguments else ""
            faults += [fault + shown for fault in faults_of(name, arguments, base, after)]
    result.details += faults
    if faults:
        result.kind = MARKED if marks else SILENTLY_WRONG
    else:
        result.kind = RIGHT_MARKED if marks else RIGHT
    return result


def with_skips(name: str, arguments: list[str], base: Baseline, steps: list[list[bool]]) -> Baseline:
    """Return ``base`` with a float32 run that skips the steps that a migrated script skipped.

    The migrated script may skip the first steps where the original did not, or the other way round: the loss is
    computed in another precision. That is no fault, but all later losses differ.
    """
    site = REPLAY_SKIPS.format(steps=json.dumps(steps))
    run = run_before(name, arguments, "--opt-level", "O0", site=site)
    if run.exit_status != 0 or lengths(run.series) != lengths(base.before.series):
        return base
    return replace(base, float32_with_skips=run)


def faults_of(name: str, arguments: list[str], base: Baseline, after: Run) -> list[str]:
    """Return what is wrong with a run of the migrated script."""
    if after.exit_status != 0:
        return [f"exit status {after.exit_status}: {after.last_line}"]
    skips = [made.count(False) for made in after.steps]
    if max(skips, default=0) > MOST_SKIPS:
        return [f"skips {max(skips)} of {max(map(len, after.steps))} steps"]
    expected = with_skips(name, arguments, base, after.steps) if any(skips) else base
    found = list(differences(expected, after.series))
    precision = precision_difference(base, after.series)
    if precision is not None and name not in CALLS_METHODS_ONLY:
        found.append(precision)
    return found


def applicable_controls(name: str) -> list[str]:
    """Return the controls that a script has something for."""
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    controls = ["steps do nothing"]
    if "clip_grad" in text:
        controls.append("clipping does nothing")
    if "clip_grad_norm" in text:
        controls.append("clipping sees scaled gradients")
    if ".zero_grad(" in text:
        controls.append("gradients are never cleared")
    return controls


def check(name: str) -> list[str]:
    """Return what is wrong with a script as a member of this corpus."""
    problems = []
    for number, arguments in enumerate(command_lines(name)):
        base = baseline(name, arguments)
        shown = f" [{' '.join(arguments)}]" if arguments else ""
        if base.before.exit_status != 0 or not base.before.series:
            problems.append(f"fails under ampcompat run{shown}: {base.before.last_line}")
            continue
        again = run_before(name, arguments)
        if again.series != base.before.series:
            problems.append(f"two runs differ{shown}")
        if base.o1 is not None and "Gradient overflow" in base.o1.output:
            problems.append(f"note: overflows at O1, which makes the comparison coarse{shown}")
        for level, run in (("O0", base.float32), ("O1", base.o1)):
            if run is None:
                problems.append(f"note: no run at {level}{shown}")
        if number > 0:
            continue
        for control in applicable_controls(name):
            run = run_before(name, arguments, "--opt-level", "O0", site=CONTROLS[control])
            if run.exit_status == 0 and not list(differences(base, run.series)):
                problems.append(f"the comparison does not notice that {control}{shown}")
    return problems


def table(results: list[Result]) -> str:
    """Return the verdicts as text, and how many there are of each kind."""
    width = max((len(result.name) for result in results), default=0)
    lines = []
    for result in results:
        details = "; ".join(result.details)
        lines.append(f"{result.name:{width}}  {result.kind:14}  {result.marks:3} marks  {details}".rstrip())
    lines.append("")
    for kind in KINDS:
        count = sum(result.kind == kind for result in results)
        if count:
            lines.append(f"{count:4}  {kind}")
    return "\n".join(lines)


def main() -> int:
    """Judge the scripts named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="scripts, without .py (default: all)")
    parser.add_argument("--check", action="store_true", help="judge the scripts themselves instead")
    parser.add_argument("--baselines-only", action="store_true", help="only run the scripts before migration")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the migrated scripts to DIR")
    options = parser.parse_args()
    names = [Path(name).stem for name in options.names] or script_names()
    missing = sorted(set(names) - set(script_names()))
    if missing:
        parser.error(f"no such script: {', '.join(missing)}")

    if options.check or options.baselines_only:
        wrong = 0
        for name in names:
            if options.check:
                problems = check(name)
            else:
                runs = [baseline(name, arguments).before for arguments in command_lines(name)]
                problems = [run.last_line for run in runs if run.exit_status != 0]
            wrong += any(not problem.startswith("note:") for problem in problems)
            print(f"{name}: {'; '.join(problems) or 'ok'}", flush=True)
        return 1 if wrong else 0

    results = []
    for name in names:
        result = judge(name)
        print(f"{name}: {result.kind}", file=sys.stderr, flush=True)
        results.append(result)
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            (options.keep / f"{name}.py").write_text(result.migrated, encoding="utf-8")
    print(table(results))
    good = {RIGHT, RIGHT_MARKED, MARKED}
    return 0 if all(result.kind in good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
