"""``ampcompat check [PATH ...]``: the report that :func:`ampcompat.tools.check.scan` makes, in one of three formats.

It reads each file of a repository without running any, and says of each name of apex whether it works here. Code that
is right in float32 and wrong in half is an error, a warning or nothing, by the ``amp.initialize`` calls that govern it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from ampcompat.cli._emit import emit, painted
from ampcompat.tools.check import Report, scan
from ampcompat.tools.check.formats import github, lines, plain

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
    parser.add_argument("--format", choices=FORMATS, default="text", help="how to print the report (default: text)")
    parser.set_defaults(main=main, parser=parser)
    return parser


def main(args: argparse.Namespace) -> int:
    """Print the report and return the exit status."""
    try:
        report = scan(args.paths[0] if len(args.paths) == 1 else args.paths)
    except (OSError, ValueError) as problem:
        emit(f"ampcompat check: {plain(str(problem))}", error=True)
        return 2
    text = FORMATS[args.format](report)
    if text:
        emit(text)
    return report.exit_status
