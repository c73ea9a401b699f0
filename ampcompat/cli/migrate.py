"""``ampcompat migrate [PATH ...]``: imports to ampcompat or to a file on plain torch.amp; a diff unless ``--write``."""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Iterator, Sequence

from ampcompat.cli._emit import emit, painted_diff
from ampcompat.tools.check.formats import plain
from ampcompat.tools.migrate.change import Change
from ampcompat.tools.migrate.source import TARGETS
from ampcompat.tools.migrate.tree import migrate_paths

EPILOG = """--to native puts native_amp.py, a file on plain torch.amp, beside the code, and has the code import it
exit status: 0 everything is rewritten, 1 something is left to do (listed, and marked in the code) or, with --check,
to change, 2 bad usage, 130 interrupted"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add ``migrate`` to the command line."""
    parser = subparsers.add_parser(
        "migrate",
        help="rewrite a repository's apex imports, to ampcompat or to a file on plain torch.amp",
        description="Rewrite imports of apex: to ampcompat, or to a copied file that needs plain torch alone.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="directories or files (default: .)")
    parser.add_argument("--to", choices=TARGETS, default="ampcompat", help="what to import (default: %(default)s)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="change the files instead of printing a diff")
    what.add_argument(
        "--check", action="store_true", help="list the files that would change, with status 1 if any would"
    )
    parser.set_defaults(main=main, parser=parser)
    return parser


def main(args: argparse.Namespace) -> int:
    """Print the diff or write the files, list what is left, and return the exit status."""
    try:
        # Everything is translated before anything is written: a refusal leaves the tree as it was.
        changes = migrate_paths(args.paths, args.to)
        if args.write and not _write(changes):
            return 130
        for change in changes:
            if change.changed and not args.write:
                emit(_shown(change, args.check))
    except (OSError, ValueError) as problem:
        emit(f"ampcompat migrate: {plain(str(problem))}", error=True)
        return 2
    left = _list_left(changes)
    _summary(args, changes, left)
    would_change = args.check and any(change.changed for change in changes)
    return int(left > 0 or would_change)


def _shown(change: Change, only_names: bool) -> str:
    """The diff of a file, or its name; of the file that is copied one line."""
    if change.is_new:
        return f"+ {plain(change.name)}, {len(change.new.splitlines())} lines"
    if only_names:
        return plain(change.name)
    return painted_diff(change.diff().rstrip("\n"))


def _write(changes: Sequence[Change]) -> bool:
    """Write the files, each in one move; False where Ctrl-C ended that, after saying what is written."""
    waiting = [change for change in changes if change.changed]
    written = 0
    with _interrupts_noted() as interrupts:
        for change in waiting:
            if interrupts:
                break
            change.write()
            written += 1
            emit(f"{'wrote' if change.is_new else 'rewrote'} {plain(change.name)}")
    if written < len(waiting):
        emit(f"interrupted: {written} of {len(waiting)} files are written, the others are as they were", error=True)
        return False
    return True


@contextlib.contextmanager
def _interrupts_noted() -> Iterator[list[int]]:
    """Collect Ctrl-C instead of raising it, so that no file is left half way."""
    interrupts: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _frame: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)


def _list_left(changes: Sequence[Change]) -> int:
    left = 0
    for change in changes:
        for line, message in change.todos:
            emit(f"{plain(change.name)}:{line}: {plain(message)}", error=True)
        for line, note in change.notes:
            emit(f"{plain(change.name)}:{line}: note: {plain(note)}", error=True)
        if change.problem:
            emit(f"{plain(change.name)}: {plain(change.problem)}", error=True)
        left += len(change.todos) + bool(change.problem)
    return left


def _summary(args: argparse.Namespace, changes: Sequence[Change], left: int) -> None:
    changed = [change for change in changes if change.changed]
    what = "changed" if args.write else "would change"
    files = "1 file" if len(changes) == 1 else f"{len(changes)} files"
    places = "1 place needs" if left == 1 else f"{left} places need"
    emit(f"{len(changed)} of {files} {what}, {places} you", error=True)
    paths = " ".join(args.paths)
    if changed and not args.write:
        follow = f"ampcompat migrate --to {args.to} --write {paths}"
    elif any(change.todos for change in changes):
        follow = f"grep -rn 'TODO(ampcompat)' {paths}"
    elif changed:
        follow = "git diff" if args.to == "native" else f"ampcompat check {paths}"
    else:
        return
    emit(f"next: {plain(follow)}", error=True)
