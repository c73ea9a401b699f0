"""``ampcompat parity script.py``: the script at every level, and how far each strays from float32."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ampcompat import __version__
from ampcompat.cli import run as run_command
from ampcompat.cli import torch_version
from ampcompat.cli._emit import emit, painted
from ampcompat.tools import script
from ampcompat.tools.parity.compare import Result, Tolerance, judge, judge_again, must_repeat, passed
from ampcompat.tools.parity.levels import Level, read_levels
from ampcompat.tools.parity.runs import Run, run_all
from ampcompat.tools.parity.save import save_json
from ampcompat.tools.parity.scripts import Options, run_level, warnings_of
from ampcompat.tools.parity.table import table
from ampcompat.tools.words import counted

TAKES_VALUE = (
    "--opt-level",
    "--dtype",
    "--steps",
    "--rtol",
    "--atol",
    "--timeout",
    "--out",
)
LEVELS = "O1,O2"
LOG_LINES = 15

EPILOG = """everything after the script's (or the module's) name is the script's own.
where O0 gives nothing to compare with, no other level runs.
exit status: 0 every level is within the tolerance; 1 one is not, or did not run through;
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
    parser.add_argument("--opt-level", metavar="LEVELS", default=LEVELS, help="comma-separated (default: %(default)s)")
    parser.add_argument(
        "--dtype", metavar="DTYPES", default="fp16", help="half dtypes, fp16,bf16 for both (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run (default: %(default)s)")
    parser.add_argument("--rtol", type=float, default=0.1, help="tolerance of the loss (default: %(default)s)")
    parser.add_argument("--atol", type=float, default=1e-3, help="added to it, in units of the loss (%(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds without a step that end a run; 0: never (%(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write parity.json and the logs there")
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
    options = Options(target, args.steps, args.timeout)
    with tempfile.TemporaryDirectory(prefix="ampcompat-parity-") as temporary:
        runner = _Runner(options, args.out or Path(temporary), keep_logs=args.out is not None)
        runs = run_all(levels, runner.run)
        if runs[0].ending != "interrupted" and not runs[0].is_comparable:
            emit("no other level runs: there is nothing to compare it with", error=True)
        results = judge(runs, Tolerance(args.rtol, args.atol))
        if must_repeat(results):
            results = _judge_again(results, options, Path(temporary, "again"))
        return _report(results, args)


def _judge_again(results: Sequence[Result], options: Options, folder: Path) -> list[Result]:
    """Judge once more, after another run of the reference: the script may not be repeatable."""
    level = results[0].run.level
    emit(f"{level.name} again, for one step: is the script repeatable?", error=True)
    folder.mkdir()
    repeated = _Runner(replace(options, steps=1), folder, keep_logs=False).run(level)
    if repeated.ending == "interrupted":
        results[-1].run.ending = "interrupted"
    return judge_again(results, repeated)


def _report(results: Sequence[Result], args: argparse.Namespace) -> int:
    """Print what the runs have shown, write it, and return the exit status."""
    tolerance = Tolerance(args.rtol, args.atol)
    runs = [result.run for result in results]
    emit("\n" + table(results, tolerance, painted))
    for warning in warnings_of(runs):
        emit(warning)
    for line in _next_lines(results, args):
        emit(line)
    if args.out:
        settings = {name: getattr(args, name) for name in ("target", "steps", "rtol", "atol")}
        save_json(args.out / "parity.json", results, {**settings, "ampcompat": __version__, "torch": torch_version()})
        emit(f"wrote parity.json and the logs in {args.out}")
    if any(run.ending == "interrupted" for run in runs):
        return 130
    return 0 if passed(results) else 1


def _checked(args: argparse.Namespace) -> list[Level]:
    """The levels; bad usage ends here, with status 2."""
    run_command.check_target(args)
    for name, least in (("steps", 1), ("rtol", 0), ("atol", 0), ("timeout", 0)):
        value = getattr(args, name)
        if not value >= least:  # so it is with a NaN
            args.parser.error(f"--{name} {value:g} - it must be {least} or more - leave it out for the usual one")
    importlib.import_module("ampcompat.amp")  # before the tools, which it starts where the environment asks
    try:
        return read_levels(args.opt_level, args.dtype)
    except ValueError as problem:
        args.parser.error(str(problem))
        raise  # not reached: error() exits


class _Runner:
    """Runs a script at one level after the other, and says on standard error what happens.

    Args:
        options: The settings of all runs.
        folder: For logs and journals.
        keep_logs: Whether they stay there.
    """

    def __init__(self, options: Options, folder: Path, keep_logs: bool) -> None:
        self.options = options
        self.folder = folder
        self.keep_logs = keep_logs

    def run(self, level: Level, skips: Sequence[int] = ()) -> Run:
        """Run ``level``, with the steps numbered ``skips`` skipped as after an overflow."""
        name = level.name
        if skips:
            name += f" without {counted(len(skips), 'step')}"
        is_terminal = sys.stderr.isatty()
        emit(f"{name}: running", error=True, end="" if is_terminal else "\n")

        def show(number: int) -> None:
            if is_terminal:
                emit(f"\r\x1b[K{name}: step {number} of {self.options.steps}", error=True, end="")

        run = run_level(level, self.options, self.folder, skips=skips, on_step=show)
        emit(("\r\x1b[K" if is_terminal else "") + f"{name}: {_summary(run)}", error=True)
        if run.ending in ("crashed", "stalled") and run.log:
            self._show_log(Path(run.log))
        return run

    def _show_log(self, log: Path) -> None:
        """Show the last lines of the script's output."""
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        where = f" ({log})" if self.keep_logs else ""
        emit("\n".join([f"last lines of its output{where}:", *("  | " + line for line in lines)]), error=True)


def _next_lines(results: Sequence[Result], args: argparse.Namespace) -> list[str]:
    """What to run next for the levels that failed.

    Explain where a loss is not finite or steps are skipped, check where a loss is finite and too far from O0's.
    """
    reference, *others = results
    if reference.run.first_not_finite:
        return [_explain_line(reference.run.level, args.target)]  # the levels only add to what is wrong in float32
    failed = [result for result in others if not result.passed]
    lines = [
        _explain_line(result.run.level, args.target)
        for result in failed
        if result.run.first_not_finite or result.run.is_mostly_skipped
    ]
    is_off = any(result.is_off and not result.not_repeatable for result in failed)
    if is_off and not lines and args.target[0] not in script.WORDS:
        lines = [f"next: {shlex.join(['ampcompat', 'check', args.target[0]])}"]
    return lines


def _explain_line(level: Level, target: Sequence[str]) -> str:
    """The command that explains what ``level`` loses."""
    words = ["ampcompat", "run", "--explain", "--opt-level", level.opt_level]
    words += ["--dtype", "bf16"] if level.dtype == "bfloat16" else []
    return f"next: {shlex.join([*words, *target])}"


def _summary(run: Run) -> str:
    """As in "20 steps, 1 skipped"."""
    steps = f"{len(run.steps)} step{'' if len(run.steps) == 1 else 's'}"
    reason = f"; {run.message}" if run.message else ""
    return f"{steps}, {len(run.skipped_steps)} skipped{reason}"
