"""``ampcompat check [PATH ...]``: what a repository uses of apex, and mistakes in mixed precision."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

from ampcompat.cli._emit import emit, painted
from ampcompat.cli._options import Gone
from ampcompat.tools.check import Report, scan
from ampcompat.tools.check.config import read_config
from ampcompat.tools.check.formats import github, lines, plain

#: Seconds before progress is shown, and between two looks at it.
FIRST, BETWEEN = 0.5, 0.1
EXIT = "exit status: 0 all is supported and no finding is an error, 1 otherwise, 2 bad usage"
FORMATS: dict[str, Callable[[Report], str]] = {
    "text": lambda report: lines(report, painted),
    "json": lambda report: json.dumps(report.as_dict(), indent=2),
    "github": github,
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add ``check`` to the command line."""
    parser = subparsers.add_parser(
        "check",
        help="list what a repository uses of apex, and mistakes in mixed precision",
        description="List the symbols of apex that a repository uses, whether each works here, and mistakes that go"
        " wrong in mixed precision. Nothing that is read is run.",
        epilog=EXIT,
    )
    parser.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="directories or files (default: .)")
    parser.add_argument(
        "--format", type=_format, choices=FORMATS, default="text", help="how to print the report (default: text)"
    )
    parser.add_argument("--json", action=Gone, instead="use --format json")
    parser.add_argument("--select", type=_rules, default=[], metavar="RULES", help="report these rules only, a,b")
    parser.add_argument("--ignore", type=_rules, default=[], metavar="RULES", help="do not report these rules, a,b")
    parser.set_defaults(main=main, parser=parser)
    return parser


def _format(text: str) -> str:
    if text == "sarif":
        raise argparse.ArgumentTypeError("sarif is no longer written - use github for annotations, or json")
    return text


def _rules(text: str) -> list[str]:
    rules = [rule.strip() for rule in text.split(",") if rule.strip()]
    if not rules:
        raise argparse.ArgumentTypeError("no rule is given - name some, separated by commas: trap,apex.contrib")
    return rules


class Progress:
    """One line on standard error, written over and over while it is a terminal; nothing anywhere else."""

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty()
        self.next = time.monotonic() + FIRST
        self.shown = False

    def show(self, what: str, done: int, total: int) -> None:
        """Show how far the check is, unless that was just done."""
        now = time.monotonic()
        if self.is_terminal and now >= self.next:
            emit(f"\r\x1b[K{what}: {done} of {total} files", error=True, end="")
            self.next = now + BETWEEN
            self.shown = True

    def clear(self) -> None:
        """Take the line away."""
        if self.shown:
            emit("\r\x1b[K", error=True, end="")
            self.shown = False


def main(args: argparse.Namespace) -> int:
    """Print the report and return the exit status."""
    progress = Progress()
    try:
        config = read_config(args.paths).with_options(args.select, args.ignore)
        report = scan(args.paths[0] if len(args.paths) == 1 else args.paths, config, progress.show)
    except (OSError, ValueError) as problem:
        progress.clear()
        emit(f"ampcompat check: {plain(str(problem))}", error=True)
        return 2
    finally:
        progress.clear()
    text = FORMATS[args.format](report)
    if text:
        emit(text)
    return report.exit_status
