"""``ampcompat parity script.py``: the script at every level, and how far each strays from float32."""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ampcompat import __version__
from ampcompat.cli import run as run_command
from ampcompat.cli import torch_version
from ampcompat.cli._emit import emit, painted
from ampcompat.cli._options import Gone
from ampcompat.tools.parity.compare import Result, Tolerance, judge
from ampcompat.tools.parity.levels import Level, read_levels
from ampcompat.tools.parity.runs import Options, Run, run_level
from ampcompat.tools.parity.save import passed, save_csv, save_json
from ampcompat.tools.parity.table import table

TAKES_VALUE = (
    "--opt-levels",
    "--dtypes",
    "--dtype",
    "--steps",
    "--seed",
    "--rtol",
    "--atol",
    "--timeout",
    "--out",
)
LEVELS = "O0,O1,O2,O3"
LOG_LINES = 15

EPILOG = """everything after the script's (or the module's) name is the script's own.
where O0 gives nothing to compare with, no other level runs.
exit status: 0 every level that is judged is within the tolerance; 1 one is not, or did not run through;
2 bad usage; 130 interrupted (what was recorded by then is shown and written)"""


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``["parity", …]`` into our arguments and the script's."""
    return run_command.split(argv, TAKES_VALUE)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add ``parity`` to the command line."""
    parser = subparsers.add_parser(
        "parity",
        help="run a script at every opt_level and compare the losses",
        usage="ampcompat parity [options] (script.py | -m module | -c code) [args ...]",
        description="Run a script once per opt_level, unchanged and from the same seeds, and compare its losses with"
        " those at O0.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--opt-levels", help=f"comma-separated; all are judged (default: {LEVELS}, of which O3 is shown and not judged)"
    )
    parser.add_argument(
        "--dtypes", "--dtype", default="fp16", help="half dtypes, fp16,bf16 for both (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of Python, numpy and torch (default: %(default)s)")
    parser.add_argument("--rtol", type=float, default=0.1, help="tolerance of the loss (default: %(default)s)")
    parser.add_argument("--atol", type=float, default=1e-3, help="added to it, in units of the loss (%(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds without a step that end a run; 0: never (%(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write parity.json, .csv, .png and the logs there")
    parser.add_argument("--smooth", action=Gone, instead="allow noisy losses more with --rtol")
    parser.add_argument("--keep-fp32", action=Gone, instead="set AMPCOMPAT_KEEP_FP32=a,b, which every run inherits")
    parser.set_defaults(main=main, parser=parser)
    return parser


def main(args: argparse.Namespace) -> int:
    """Run all levels, print the table, and return the exit status."""
    levels = _checked(args)
    target: list[str] = args.target
    if not run_command.can_open(target[0]):
        return 2
    if args.out is not None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            args.parser.error(f"--out {args.out} - it is not a directory ({problem.strerror}) - name a directory")
    options = Options(target, args.steps, args.seed, args.timeout)
    tolerance = Tolerance(args.rtol, args.atol)
    with ExitStack() as stack:
        folder: Path = args.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ampcompat-parity-")))
        runs = _run_all(levels, options, folder, keep_logs=args.out is not None)
        results = judge(runs, tolerance, () if args.opt_levels else ("O3",))
        emit("\n" + table(results, tolerance, painted))
        for command in _next_commands(results, args):
            emit(f"next: {command}")
        if args.out:
            _save(args.out, results, args, tolerance)
    if any(run.ending == "interrupted" for run in runs):
        return 130
    return 0 if passed(results) else 1


def _checked(args: argparse.Namespace) -> list[Level]:
    """The levels; bad usage ends here, with status 2."""
    run_command.check_target(args)
    if args.target[0] == "-":
        args.parser.error("a script from standard input - it is run several times - put it into a file")
    if args.steps < 1 or not all(value >= 0 for value in (args.rtol, args.atol, args.timeout)):
        args.parser.error("--steps must be 1 or more; --rtol, --atol and --timeout 0 or more")
    try:
        return read_levels(LEVELS if args.opt_levels is None else args.opt_levels, args.dtypes)
    except ValueError as problem:
        args.parser.error(str(problem))
        raise  # not reached: error() exits


def _run_all(levels: Sequence[Level], options: Options, folder: Path, keep_logs: bool) -> list[Run]:
    """The runs, one after the other; none after an interrupted one, or after a reference that is of no use."""
    runs: list[Run] = []
    for level in levels:
        emit(f"{level.name}: running", error=True)
        run = run_level(level, options, folder)
        emit(_summary(run), error=True)
        runs.append(run)
        if run.ending in ("crashed", "stalled") and run.log:
            lines = Path(run.log).read_text(encoding="utf-8", errors="replace").splitlines()
            where = f" ({run.log})" if keep_logs else ""
            emit(
                "\n".join([f"last lines of its output{where}:", *("  | " + s for s in lines[-LOG_LINES:])]), error=True
            )
        if run.ending == "interrupted":
            break
        if not runs[0].is_comparable:
            emit("no other level runs: there is nothing to compare it with", error=True)
            break
    return runs


def _next_commands(results: Sequence[Result], args: argparse.Namespace) -> list[str]:
    """The command that explains where a loss is not finite, for each such level."""
    commands = []
    for result in results[1:]:
        level = result.run.level
        if result.run.first_not_finite and not results[0].run.first_not_finite:
            words = ["ampcompat", "run", "--explain", "--opt-level", level.opt_level]
            words += ["--dtype", "bf16"] if level.dtype == "bfloat16" else []
            commands.append(shlex.join([*words, *args.target]))
    return commands


def _summary(run: Run) -> str:
    """As in "O1 fp16: 20 steps, 12.5 steps/s, 1 skipped"."""
    seconds = run.seconds_per_step
    rate = f", {1 / seconds:.3g} steps/s" if seconds else ""
    reason = f"; {run.message}" if run.message else ""
    return f"{run.level.name}: {len(run.steps)} steps{rate}, {len(run.skipped_steps)} skipped{reason}"


def _save(folder: Path, results: Sequence[Result], args: argparse.Namespace, tolerance: Tolerance) -> None:
    settings = {
        "target": args.target,
        "steps": args.steps,
        "seed": args.seed,
        "rtol": args.rtol,
        "atol": args.atol,
        "ampcompat": __version__,
        "torch": torch_version(),
    }
    save_json(folder / "parity.json", results, settings)
    save_csv(folder / "parity.csv", results)
    written = ["parity.json", "parity.csv"]
    try:
        from ampcompat.tools.pictures import save_comparison
    except ImportError:
        emit("no picture: matplotlib is missing - pip install 'ampcompat[plot]'", error=True)
    else:
        save_comparison(folder / "parity.png", results, tolerance, _title(args.target))
        written.append("parity.png")
    emit(f"wrote {', '.join(written)} and the logs in {folder}")


def _title(target: Sequence[str]) -> str:
    return target[1] if target[0] == "-m" else os.path.basename(target[0])
