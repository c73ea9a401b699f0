"""``ampcompat test``: whether amp works on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ampcompat.cli._emit import emit, painted

if TYPE_CHECKING:
    from ampcompat.tools.selftest.check import Row

EPILOG = "exit status: 0 every check passed, 1 one failed, 2 bad usage. Worth adding to a bug report as it is."


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add ``test`` to the command line."""
    parser = subparsers.add_parser(
        "test",
        help="check that amp works on this machine",
        description="Check amp on each device at each level: a small training against float32, an overflow, resume.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device", action="append", metavar="NAME", help="this device only, such as cuda:0; may be repeated"
    )
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
    from ampcompat.tools.selftest import check

    names = args.device or list(facts["devices"])
    emit(text(facts) + f"\n\n{'device':<8} {'level':<6} {'':<4} {'s':>5}  remark")
    rows = [_shown(row) for row in check.check_all(names)]
    emit("\n" + _summary(rows))
    return int(_failures(rows) > 0)


def _shown(row: Row) -> Row:
    """Print a row as soon as it is known."""
    result = painted("ok  ", "green") if row.passed else painted("FAIL", "red")
    emit(f"{row.device:<8} {row.level:<6} {result} {row.seconds:5.1f}  {row.remark}")
    return row


def _summary(rows: Sequence[Row]) -> str:
    failures = _failures(rows)
    what = painted(f"{failures} of {len(rows)} failed", "red") if failures else painted(f"{len(rows)} passed", "green")
    return f"{what}, in {sum(row.seconds for row in rows):.0f} s"


def _failures(rows: Sequence[Row]) -> int:
    return sum(not row.passed for row in rows)
