"""``ampcompat test``: whether amp works on this machine."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ampcompat.cli._emit import emit, painted

if TYPE_CHECKING:
    from ampcompat.tools.selftest.run import Row

EPILOG = "exit status: 0 every check passed, 1 one failed, 2 bad usage. Worth adding to a bug report as it is."
COLOURS = {"ok": "green", "FAIL": "red", "skip": "yellow"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add ``test`` to the command line."""
    parser = subparsers.add_parser(
        "test",
        help="check that amp works on this machine",
        description="Check amp on each device: dtypes of ops, a small training at each level against float32, resume,"
        " an overflow, and DDP on two processes where possible.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device", action="append", metavar="NAME", help="this device only, such as cuda:0; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="as JSON, with what `ampcompat env --json` has")
    parser.set_defaults(main=main, parser=parser)
    return parser


def main(args: argparse.Namespace) -> int:
    """Print a row per check and return the exit status."""
    from ampcompat.tools.selftest.environment import environment, text

    facts = environment()
    if not facts["devices"]:
        emit(text(facts))
        return 1
    for name in args.device or ():
        if name not in facts["devices"]:
            args.parser.error(f"--device {name} - it is not there - devices: {', '.join(facts['devices'])}")
    from ampcompat.tools.selftest.run import run

    names = args.device or list(facts["devices"])
    if args.json:
        rows = list(run(names))
        checks = [asdict(row) for row in rows]
        emit(json.dumps({**facts, "passed": not _failures(rows), "checks": checks}, indent=2))
    else:
        emit(text(facts) + f"\n\n{'device':<8} {'check':<9} {'level':<6} {'':<4} {'s':>5}  remark")
        rows = [_shown(row) for row in run(names)]
        emit("\n" + _summary(rows))
    return int(_failures(rows) > 0)


def _shown(row: Row) -> Row:
    """Print a row as soon as it is known."""
    result = painted(f"{row.result:<4}", COLOURS[row.result])
    emit(f"{row.device:<8} {row.check:<9} {row.level:<6} {result} {row.seconds:5.1f}  {row.remark}")
    return row


def _summary(rows: Sequence[Row]) -> str:
    counts = Counter(row.result for row in rows)
    if counts["FAIL"]:
        what = painted(f"{counts['FAIL']} of {len(rows)} failed", "red")
    else:
        what = painted(f"{counts['ok']} passed", "green")
    skipped = f", {counts['skip']} skipped" if counts["skip"] else ""
    return f"{what}{skipped}, in {sum(row.seconds for row in rows):.0f} s"


def _failures(rows: Sequence[Row]) -> int:
    return sum(row.result == "FAIL" for row in rows)
