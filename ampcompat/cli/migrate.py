"""``ampcompat migrate PATH``: rewrite imports to ampcompat, or calls to plain torch.amp; a diff unless ``--write``."""

from __future__ import annotations

import argparse
from typing import Any

from ampcompat.check.table import plain
from ampcompat.cli._emit import emit
from ampcompat.migrate import MissingLibcst
from ampcompat.migrate.source import TARGETS
from ampcompat.migrate.tree import migrate_tree

EXIT = "exit status: 0 everything translated, 1 something is left to do (listed, and marked in the code), 2 bad usage"


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Add ``migrate`` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "migrate", help="rewrite a repository's apex imports, or its apex calls to torch.amp", epilog=EXIT
    )
    parser.add_argument("path", help="a directory or a Python file; it is read, never run")
    parser.add_argument("--to", choices=TARGETS, default="ampcompat", help="what to rewrite to (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="change the files instead of printing a diff")
    parser.set_defaults(main=main)
    return parser


def main(args: argparse.Namespace) -> int:
    """Print the diff or write the files, list what is left, and return the exit status."""
    left = 0
    try:
        # Everything is translated before anything is written: a refusal leaves the tree as it was.
        changes = list(migrate_tree(args.path, args.to))
        for change in changes:
            if change.changed and args.write:
                change.write()
                emit(f"rewrote {plain(change.name)}")
            elif change.changed:
                emit(change.diff().rstrip("\n"))
    except (OSError, ValueError, MissingLibcst) as problem:
        emit(f"ampcompat migrate: {plain(str(problem))}", error=True)
        return 2
    for change in changes:
        for line, message in change.todos:
            emit(f"{plain(change.name)}:{line}: {plain(message)}", error=True)
        if change.problem:
            emit(f"{plain(change.name)}: {plain(change.problem)}", error=True)
        left += len(change.todos) + bool(change.problem)
    return int(left > 0)
