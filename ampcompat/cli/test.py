"""``ampcompat test``: whether amp works on this machine."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict

from ampcompat.cli._emit import emit, painted

EPILOG = "exit status: 0 every check passed, 1 one failed, 2 bad usage. Worth adding to a bug report as it is."
COLOURS = {"ok": "green", "FAIL": "red", "skip": "yellow"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add ``test`` to the command line."""
    parser = subparsers.add_parser(
        "test",
        help="check in some seconds that amp works on this machine",
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

    rows = []
    if not args.json:
        emit(text(facts) + f"\n\n{'device':<8} {'check':<9} {'level':<6} {'':<4} {'s':>5}  remark")
    for row in run(args.device or list(facts["devices"])):
        rows.append(row)
        if not args.json:
            result = painted(f"{row.result:<4}", COLOURS[row.result])
            emit(f"{row.device:<8} {row.check:<9} {row.level:<6} {result} {row.seconds:5.1f}  {row.remark}")
    counts = Counter(row.result for row in rows)
    if args.json:
        emit(json.dumps({**facts, "passed": not counts["FAIL"], "checks": [asdict(row) for row in rows]}, indent=2))
    else:
        seconds = sum(row.seconds for row in rows)
        what = f"{counts['FAIL']} of {len(rows)} checks FAILED" if counts["FAIL"] else f"{counts['ok']} checks passed"
        skipped = f", {counts['skip']} skipped" if counts["skip"] else ""
        emit("\n" + painted(what, "red" if counts["FAIL"] else "green") + f"{skipped}, in {seconds:.0f} s")
    return int(counts["FAIL"] > 0)
