"""``ampcompat run script.py``: a script as ``python script.py`` runs it, where ``import apex`` finds ampcompat."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ampcompat._log import rank
from ampcompat.cli import _gloo, _script
from ampcompat.cli._emit import emit
from ampcompat.tools.dtypes import SPELLINGS
from ampcompat.tools.parity.levels import OPT_LEVELS

if TYPE_CHECKING:
    from ampcompat.tools.report import Receipt


# Options of ours whose value is the next argument. The first argument that is neither ends our part of the line.
TAKES_VALUE = ("--opt-level", "--dtype", "--keep-fp32")

EPILOG = """everything after the script's (or the module's) name is the script's own.
exit status: the script's; 2 when the script cannot be opened or the command line is wrong"""


def split(argv: Sequence[str], takes_value: Sequence[str] = TAKES_VALUE) -> tuple[list[str], list[str]]:
    """Split ``["run", …]`` into our arguments and the target with its own (see :func:`_script.run`).

    argparse cannot do it: it takes a ``--lr`` of the script's for one of ours, and eats its ``--``.
    """
    at = 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("--", *_script.WORDS):
        at += 2 if argv[at] in takes_value else 1
    target = list(argv[at:])
    return list(argv[:at]), target[1:] if target[:1] == ["--"] else target


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add ``run`` to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="run a script that imports apex, unchanged",
        usage="ampcompat run [options] (script.py | -m module | -c code | -) [args ...]",
        description="Run a script as python would, with `import apex` resolved to ampcompat.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--opt-level", choices=OPT_LEVELS, help="overrides the opt_level that the script asks for")
    parser.add_argument("--dtype", choices=sorted(SPELLINGS), help="the half dtype")
    parser.add_argument(
        "--keep-fp32", metavar="PATTERNS", help="modules that stay float32: names or shell patterns, a,b"
    )
    parser.add_argument(
        "--explain",
        metavar="WORDS",
        nargs="?",
        const="on",
        help="explain overflows on standard error: which op, which line, what cures it. --explain=WORDS, separated by"
        " commas: json (a line of JSON each), ranges (of every layer), first or a number (of faults after which the"
        " script ends)",
    )
    parser.add_argument(
        "--receipt",
        metavar="FILE",
        nargs="?",
        const="",
        help="tell what ran in which dtype, or write it to FILE (.html, .json or text): --receipt=FILE",
    )
    parser.add_argument("--force", action="store_true", help="take the place of an installed apex that still has amp")
    parser.set_defaults(main=main, parser=parser)
    return parser


def main(args: argparse.Namespace) -> int:
    """Run ``args.target``; what it raises is let through, with a traceback that begins at the script."""
    check_target(args)
    _check_receipt(args)
    if args.explain == "on" and _are_words(args.target[0]):
        words = args.target[0]
        args.parser.error(f"--explain {words} - the words are a part of the option - write --explain={words}")
    if args.opt_level:
        os.environ["AMPCOMPAT_OPT_LEVEL"] = args.opt_level
    if args.dtype:
        os.environ["AMPCOMPAT_DTYPE"] = SPELLINGS[args.dtype]
    if args.keep_fp32 is not None:
        os.environ["AMPCOMPAT_KEEP_FP32"] = args.keep_fp32
    if not can_open(args.target[0]):
        return 2

    if args.explain:
        _explain(args)

    from ampcompat.alias import install_as_apex

    if install_as_apex(force=args.force):
        _script.hand_alias_to_children()
    argv = args.target[_script.WORDS.get(args.target[0], 1) - 1 :]
    with _gloo_let_go(), _watched(args.receipt, argv):
        _script.run(args.target)
    return 0


def check_target(args: argparse.Namespace) -> None:
    """Refuse a line without a script, and ``--keep-fp32`` without a pattern."""
    if len(args.target) < (_script.WORDS.get(args.target[0], 1) if args.target else 1):
        args.parser.error("no script given - name one (script.py, -m module or -c code) after the options")
    if args.keep_fp32 is not None and not args.keep_fp32.replace(",", "").strip():
        args.parser.error(f"--keep-fp32 {args.keep_fp32!r} - it names no module - name some, such as 'decoder.*,head'")


def _check_receipt(args: argparse.Namespace) -> None:
    """Refuse a ``--receipt`` whose file is the next word, has no folder, or needs what is not installed."""
    if args.receipt is None:
        return
    if args.receipt == "" and _is_receipt(args.target):
        file = args.target[0]
        args.parser.error(f"--receipt {file} - the file is a part of the option - write --receipt={file}")
    if not os.path.isdir(os.path.dirname(os.path.abspath(args.receipt))):
        args.parser.error(f"--receipt={args.receipt!r} - its folder does not exist - name a file in one that does")
    if args.receipt.endswith((".html", ".htm")) and importlib.util.find_spec("jinja2") is None:
        from ampcompat.tools.report.receipt import NEEDS_JINJA

        args.parser.error(f"--receipt={args.receipt} - {NEEDS_JINJA}")


def _explain(args: argparse.Namespace) -> None:
    """Explain overflows here, and in the processes that the script starts."""
    from ampcompat.tools.explain import explain_in_words

    words = "first" if args.explain == "1" else args.explain  # in the environment, 1 means yes
    try:
        explain_in_words(words)
    except ValueError as problem:
        args.parser.error(f"--{problem}")
    os.environ["AMPCOMPAT_EXPLAIN"] = words


def _is_receipt(target: Sequence[str]) -> bool:
    """Whether the target is the file of a receipt rather than a script."""
    kind = os.path.splitext(target[0])[1]
    return kind in (".html", ".json") or (kind == ".txt" and not os.path.exists(target[0]))


def _are_words(script: str) -> bool:
    """Whether ``script``, which is no file, is what ``--explain=`` takes."""
    if script in _script.WORDS or os.path.exists(script):
        return False
    from ampcompat.tools.explain.options import parse

    try:
        parse(script)
    except ValueError:
        return False
    return True


@contextmanager
def _gloo_let_go() -> Iterator[None]:
    """Let gloo's threads finish before a process group, or the interpreter, ends; see :mod:`ampcompat.cli._gloo`."""
    _gloo.wait_in_destroy()
    try:
        yield
    finally:
        _gloo.wait_at_end()


@contextmanager
def _watched(receipt: str | None, argv: Sequence[str]) -> Iterator[None]:
    """Show the receipt afterwards, of a script that failed too."""
    if receipt is None:
        yield
        return
    from ampcompat.tools.report import STEPS, Receipt, processes

    beside, process = processes.folder_of_ranks(), os.getpid()
    folder = beside or tempfile.mkdtemp(prefix="ampcompat-receipt-")
    os.environ[processes.VARIABLE] = folder  # for the processes that the script starts
    seen = Receipt(STEPS, folder, list(argv))
    if beside and rank() != 0:
        seen.start_as_child()  # as if rank 0 had started it
        yield
        return
    seen.start()
    ended = False
    try:
        yield
        ended = True
    except BaseException as error:
        seen.crashed(error)
        raise
    finally:
        # The exit status and the last words are the script's, whatever it did to torch and to its folder.
        try:
            seen.stop()
            if rank() == 0 and os.getpid() == process:  # a forked copy of the script may end here too
                if beside and ended:
                    processes.wait_for_ranks(folder)
                _show(seen, receipt)
        except Exception as problem:
            emit(f"ampcompat run: no receipt: {problem}", error=True)
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)


def _show(seen: Receipt, file: str) -> None:
    if file:
        seen.write(file)
        emit(f"wrote the precision receipt to {file}")
    else:
        emit(str(seen))


def can_open(script: str) -> bool:
    """Whether ``script`` is no file or can be opened; if not, that is said in python's words."""
    if script in _script.WORDS:
        return True
    path = os.path.abspath(script)
    try:
        if not os.path.isdir(path):
            open(path, "rb").close()
    except OSError as problem:
        emit(f"{sys.orig_argv[0]}: can't open file {path!r}: [Errno {problem.errno}] {problem.strerror}", error=True)
        return False
    return True
