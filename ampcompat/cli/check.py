"""``ampcompat check PATH``: which apex symbols a repository uses, how they fare, and the traps it walks into."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ampcompat.check import scan
from ampcompat.check.table import plain, table
from ampcompat.cli._emit import emit

EXIT = "exit status: 0 nothing unsupported and no error, 1 something unsupported or an error, 2 bad usage"


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Add ``check`` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "check", help="list the apex symbols that a repository uses and the traps it walks into", epilog=EXIT
    )
    parser.add_argument("path", help="a directory or a Python file; it is read, never run")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(main=main)
    return parser


def main(args: argparse.Namespace) -> int:
    """Print the report and return the exit status."""
    try:
        report = scan(args.path)
    except (OSError, ValueError) as problem:
        emit(f"ampcompat check: {plain(str(problem))}", error=True)
        return 2
    emit(json.dumps(report.as_dict(), indent=2) if args.json else table(report))
    return report.exit_status
