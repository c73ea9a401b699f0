"""``ampcompat migrate [PATH ...]``: imports to ampcompat, or calls to plain torch.amp; a diff unless ``--write``."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ampcompat.cli._emit import emit, painted, painted_diff
from ampcompat.tools.check.formats import plain
from ampcompat.tools.migrate import MissingLibcst
from ampcompat.tools.migrate.change import Change
from ampcompat.tools.migrate.source import TARGETS
from ampcompat.tools.migrate.tree import migrate_paths

EPILOG = """with --verify the script comes after two dashes: ampcompat migrate --verify --to native -- train.py
exit status: 0 everything translated, 1 something is left to do (listed, and marked in the code) or the migrated
script does something else (--verify), 2 bad usage, 130 interrupted"""


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``["migrate", …, "--", script, …]`` into our arguments and the script's."""
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add ``migrate`` to the command line."""
    parser = subparsers.add_parser(
        "migrate",
        help="rewrite a repository's apex imports, or its apex calls to torch.amp",
        usage="ampcompat migrate [options] [PATH ...] [-- (script.py | -m module) [args ...]]",
        description="Rewrite what a repository uses of apex for ampcompat or for plain torch.amp.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="directories or files (default: .)")
    parser.add_argument("--to", choices=TARGETS, default="ampcompat", help="what to rewrite to (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="change the files instead of printing a diff")
    parser.add_argument(
        "--verify", action="store_true", help="run the script before and after, on copies, and compare the steps"
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of --verify (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of --verify (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each run of --verify (%(default)s)")
    parser.set_defaults(main=main, parser=parser)
    return parser


def main(args: argparse.Namespace) -> int:
    """Print the diff or write the files, list what is left, and return the exit status."""
    target = list(getattr(args, "target", []))
    if bool(target) != args.verify:
        why = (
            "--verify needs the script to run after two dashes" if args.verify else "a script is run with --verify only"
        )
        emit(f"ampcompat migrate: {why}: ampcompat migrate --verify -- train.py", error=True)
        return 2
    if args.verify and (args.steps < 1 or args.timeout <= 0 or args.write or target == ["-m"]):
        emit("ampcompat migrate: --verify takes --steps of 1 or more, a --timeout above 0, and no --write", error=True)
        return 2
    try:
        # Everything is translated before anything is written: a refusal leaves the tree as it was.
        changes = list(_with_progress(args))
        if args.verify:
            return _verify(args, changes, target)
        if args.write and not _write(changes):
            return 130
        for change in changes:
            if change.changed and not args.write:
                emit(painted_diff(change.diff().rstrip("\n")))
    except (OSError, ValueError, MissingLibcst) as problem:
        emit(f"ampcompat migrate: {plain(str(problem))}", error=True)
        return 2
    left = _list_left(changes)
    _summary(args, changes, left)
    return int(left > 0)


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
            emit(f"rewrote {plain(change.name)}")
    if written < len(waiting):
        emit(f"interrupted: {written} of {len(waiting)} files are written, the others are as they were", error=True)
        return False
    return True


@contextlib.contextmanager
def _interrupts_noted() -> Iterator[list[int]]:
    """Collect Ctrl-C instead of raising it, so that no file is left half way."""
    interrupts: list[int] = []
    try:
        previous = signal.signal(signal.SIGINT, lambda number, _frame: interrupts.append(number))
    except ValueError:  # only the main thread gets signals
        yield interrupts
        return
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)


def _with_progress(args: argparse.Namespace) -> Sequence[Change]:
    """The changes; on a terminal a line tells how far it is."""
    shown = sys.stderr.isatty()
    changes: list[Change] = []
    for done, total, change in migrate_paths(args.paths, args.to):
        if change is not None:
            changes.append(change)
        elif shown:
            emit(f"\r{done} of {total} files", error=True, end="" if done < total else "\n")
    return changes


def _list_left(changes: Sequence[Change]) -> int:
    left = 0
    for change in changes:
        for line, message in change.todos:
            emit(f"{plain(change.name)}:{line}: {plain(message)}", error=True)
        for note in change.notes:
            emit(f"{plain(change.name)}: note: {plain(note)}", error=True)
        if change.problem:
            emit(f"{plain(change.name)}: {plain(change.problem)}", error=True)
        left += len(change.todos) + bool(change.problem)
    return left


def _summary(args: argparse.Namespace, changes: Sequence[Change], left: int) -> None:
    changed = [change for change in changes if change.changed]
    what = "changed" if args.write else "would change"
    emit(f"{len(changed)} of {len(changes)} files {what}, {left} places need you", error=True)
    paths = " ".join(args.paths)
    if changed and not args.write:
        follow = f"ampcompat migrate --to {args.to} --write {paths}"
    elif left:
        follow = f"grep -rn 'TODO(ampcompat)' {paths}"
    elif changed:
        follow = "git diff" if args.to == "native" else f"ampcompat check {paths}"
    else:
        return
    emit(f"next: {plain(follow)}", error=True)


def _verify(args: argparse.Namespace, changes: Sequence[Change], target: Sequence[str]) -> int:
    """Run the script in two copies of the tree and print the verdict on each step."""
    from ampcompat.tools.migrate.verify import Options, copies, rewritten_near, run, verdict
    from ampcompat.tools.migrate.verify.launch import Imports

    root = Path(args.paths[0]).resolve()
    if len(args.paths) > 1 or not root.is_dir():
        emit("ampcompat migrate: --verify copies one directory, from where the script is run; name one", error=True)
        return 2
    with tempfile.TemporaryDirectory(prefix="ampcompat-verify-") as folder:
        before, after = copies(root, changes, Path(folder))
        options = Options(target, args.steps, args.seed, args.timeout)
        traces = []
        allowed: Imports = "neither" if args.to == "native" else "ampcompat"
        runs: list[tuple[str, Path, Imports]] = [("before", before, "apex"), ("after", after, allowed)]
        for name, copy, imports in runs:
            emit(f"running {name}", error=True)
            trace = run(copy, options, Path(folder, f"{name}.jsonl"), imports)
            traces.append(trace)
            if trace.error is not None:
                emit(
                    f"{name}: {plain(trace.error)}\n" + "\n".join(f"  | {plain(s)}" for s in trace.output.splitlines()),
                    error=True,
                )
        result = verdict(traces[0], traces[1])
    emit("\n".join(map(plain, result.lines)))
    if result.strays is not None:
        places = traces[1].places or [""]
        place = places[min(result.strays, len(places) - 1)]
        emit(f"step {result.strays + 1} strays first" + (f"; it is made at {plain(place)}" if place else ""))
        near = rewritten_near(changes, place)
        if near:
            emit("rewritten there:\n" + "\n".join(f"  | {plain(line)}" for line in near))
    left = _list_left(changes)
    same = painted("the same training", "green") if result.passed else painted("NOT the same training", "red")
    emit(f"{same}, {left} places need you")
    return int(not result.passed or left > 0)
