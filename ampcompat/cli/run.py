"""``ampcompat run script.py``: a script as ``python script.py`` runs it, where ``import apex`` finds ampcompat."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ampcompat.cli._emit import emit
from ampcompat.cli._options import opt_level
from ampcompat.tools import script
from ampcompat.tools.dtypes import SPELLINGS
from ampcompat.tools.level_table import LEVELS
from ampcompat.tools.paths import why_not_writable

if TYPE_CHECKING:
    from ampcompat.tools.report import PrecisionReport

# Options of ours whose value is the next argument. The first argument that is neither ends our part of the line.
TAKES_VALUE = ("--opt-level", "--dtype", "--keep-fp32")

EPILOG = """everything after the script's (or the module's) name is the script's own.
exit status: the script's; 2 when the script cannot be opened or the command line is wrong"""


def split(argv: Sequence[str], takes_value: Sequence[str] = TAKES_VALUE) -> tuple[list[str], list[str]]:
    """Split ``["run", …]`` into our arguments and the target with its own (see :func:`ampcompat.tools.script.run`).

    argparse cannot do it: it takes a ``--lr`` of the script's for one of ours, and eats its ``--``.
    """
    at = 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("--", *script.WORDS):
        at += 2 if argv[at] in takes_value else 1
    target = list(argv[at:])
    return list(argv[:at]), target[1:] if target[:1] == ["--"] else target


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add ``run`` to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="run a script that imports apex, unchanged",
        usage="ampcompat run [options] (script.py | -m module | -c code) [args ...]",
        description="Run a script as python would, with `import apex` resolved to ampcompat.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--opt-level", type=opt_level, choices=[*LEVELS], help="overrides the opt_level that the script asks for"
    )
    parser.add_argument("--dtype", choices=sorted(SPELLINGS), help="the half dtype")
    parser.add_argument(
        "--keep-fp32", metavar="PATTERNS", help="modules that stay float32: names or shell patterns, a,b"
    )
    parser.add_argument(
        "--explain",
        metavar="HOW",
        nargs="?",
        const="",
        help="tell on standard error where the values of lost steps became inf or NaN: the line, the op, what went in"
        " and came out, and counts at the end. --explain=N tells of N births in place of three; --explain=first ends"
        " the script after the first;"
        " --explain=json writes a line of JSON each",
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        nargs="?",
        const="",
        help="tell what ran in which dtype, or write it to FILE (.json, or text): --report=FILE",
    )
    parser.add_argument("--force", action="store_true", help="take the place of an installed apex that still has amp")
    parser.set_defaults(main=main, parser=parser)
    return parser


def main(args: argparse.Namespace) -> int:
    """Run ``args.target``; what it raises is let through, with a traceback that begins at the script."""
    check_target(args)
    _check_options(args)
    if args.opt_level:
        os.environ["AMPCOMPAT_OPT_LEVEL"] = args.opt_level
    if args.dtype:
        os.environ["AMPCOMPAT_DTYPE"] = SPELLINGS[args.dtype]
    if args.keep_fp32 is not None:
        os.environ["AMPCOMPAT_KEEP_FP32"] = args.keep_fp32
    if not can_open(args.target[0]):
        return 2
    if args.explain is not None or args.report is not None:
        importlib.import_module("ampcompat.amp")  # before the tools, which it starts where the environment asks too
    if args.explain is not None:
        _explain(args)
    with _unused_options_named(args), _reported(args.report):
        script.start(args.target, force=args.force)
    return 0


def check_target(args: argparse.Namespace) -> None:
    """Refuse a line without a script."""
    if not args.target or args.target in ([word] for word in script.WORDS):
        args.parser.error("no script given - name one (script.py, -m module or -c code) after the options")


def _check_options(args: argparse.Namespace) -> None:
    """Refuse ``--keep-fp32`` without a pattern, values behind a blank, and a file that cannot be written."""
    if args.keep_fp32 is not None and not args.keep_fp32.replace(",", "").strip():
        args.parser.error(f"--keep-fp32 {args.keep_fp32!r} - it names no module - name some, such as 'decoder.*,head'")
    word = args.target[0]
    if args.explain == "" and (word.isdecimal() or word in ("first", "json")):
        args.parser.error(f"--explain {word} - the word is a part of the option - write --explain={word}")
    if args.report == "" and word.endswith((".json", ".txt")):
        args.parser.error(f"--report {word} - the file is a part of the option - write --report={word}")
    problem = why_not_writable(args.report) if args.report else ""
    if problem:
        args.parser.error(f"--report={args.report!r} - {problem} - name a file that can be written")


def _explain(args: argparse.Namespace) -> None:
    """Explain overflows in this process."""
    from ampcompat.tools.explain import LIMIT, explain_as

    try:
        explain_as(args.explain or str(LIMIT))
    except ValueError as problem:
        args.parser.error(f"--{problem}")


@contextmanager
def _unused_options_named(args: argparse.Namespace) -> Iterator[None]:
    """Say which of our options had no effect, after a script that ended well and never used amp."""
    given = [name for name in ("--opt-level", "--dtype", "--keep-fp32", "--explain") if _is_given(args, name)]
    process = os.getpid()
    ended_well = False
    try:
        yield
        ended_well = True
    except SystemExit as end:
        ended_well = end.code in (None, 0)
        raise
    finally:
        why = script.why_amp_is_unused() if ended_well and given and os.getpid() == process else ""
        if why:
            told = f"ampcompat run: {why} in this process, where {', '.join(given)} had no effect"
            emit(told + _of_children(given), error=True)


def _of_children(given: Sequence[str]) -> str:
    """What holds in processes that the script has started by multiprocessing, if it has started any."""
    if not any(name.startswith("multiprocessing.popen_") for name in sys.modules):
        return ""
    inherited = [option for option in given if option != "--explain"]
    told = f" - processes that it started inherited {', '.join(inherited)}" if inherited else ""
    return told + (" - AMPCOMPAT_EXPLAIN=3 in the environment explains in each process" if "--explain" in given else "")


def _is_given(args: argparse.Namespace, option: str) -> bool:
    return getattr(args, option.removeprefix("--").replace("-", "_")) is not None


@contextmanager
def _reported(file: str | None) -> Iterator[None]:
    """Show the precision report afterwards, of a script that failed too; ``file`` is "" for standard output."""
    if file is None:
        yield
        return
    from ampcompat.tools.report import STEPS, VARIABLE, PrecisionReport

    process = os.getpid()
    report = PrecisionReport(STEPS)
    file = file and os.path.abspath(file)  # the script may change its folder
    os.environ[VARIABLE] = file  # for the processes that the script starts
    report.start()
    try:
        yield
    except BaseException as error:
        report.ended_by(error)
        raise
    finally:
        if os.getpid() == process:  # a forked copy of the script may end here too
            _show(report, file)


def _show(report: PrecisionReport, file: str) -> None:
    # The exit status and the last words are the script's, whatever it did to torch and to its folder.
    try:
        report.stop()
        told = report.save(file)
    except Exception as problem:
        emit(f"ampcompat run: no precision report: {problem}", error=True)
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # of what the script has printed: Python says so when it ends
        return
    if told:
        emit(told)


def can_open(target: str) -> bool:
    """Whether ``target`` can be opened, or is no file; if not, that is said in python's words."""
    if target in script.WORDS:
        return True
    path = os.path.abspath(target)
    try:
        open(path, "rb").close()
    except OSError as problem:
        emit(f"{sys.orig_argv[0]}: can't open file {path!r}: [Errno {problem.errno}] {problem.strerror}", error=True)
        return False
    return True
