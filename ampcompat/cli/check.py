"""``ampcompat check [PATH ...]``: the report that :func:`ampcompat.tools.check.scan` makes, as text or as JSON.

It reads each file of a repository without running any, and says which names of apex do not work here, and which code
is right in float32 and wrong in mixed precision at the levels of the ``amp.initialize`` calls that govern it.
"""

from __future__ import annotations

import argparse
import json

from ampcompat.cli._emit import emit, painted
from ampcompat.tools.check import scan
from ampcompat.tools.check.formats import lines, plain

EXIT = "exit status: 0 all is supported and no finding is an error, 1 otherwise, 2 bad usage"
FORMATS = ("text", "json")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add ``check`` to the command line."""
    parser = subparsers.add_parser(
        "check",
        help="list what of apex does not work in a repository, and mistakes in mixed precision",
        description="List what a repository uses of apex and does not work here, and mistakes that go wrong in mixed"
        " precision. Nothing that is read is run.",
        epilog=EXIT,
    )
    parser.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="directories or files (default: .)")
    parser.add_argument("--format", choices=FORMATS, default="text", help="how to print the report (default: text)")
    parser.add_argument("--all", action="store_true", help="list what works, too, in place of its count")
    parser.set_defaults(main=main, parser=parser)
    return parser


def main(args: argparse.Namespace) -> int:
    """Print the report and return the exit status."""
    try:
        report = scan(args.paths[0] if len(args.paths) == 1 else args.paths)
    except (OSError, ValueError) as problem:
        emit(f"ampcompat check: {plain(str(problem))}", error=True)
        return 2
    emit(json.dumps(report.as_dict(), indent=2) if args.format == "json" else lines(report, args.all, painted))
    return report.exit_status
