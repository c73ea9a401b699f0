"""``ampcompat env``: versions, devices and settings, for a bug report."""

from __future__ import annotations

import argparse

from ampcompat.cli._emit import emit


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add ``env`` to the command line."""
    parser = subparsers.add_parser(
        "env",
        help="print versions, devices and settings, for a bug report",
        description="Print versions, devices with their fast half dtypes, which apex is installed, and AMPCOMPAT_*.",
        epilog="exit status: 0; 1 where torch cannot be imported",
        allow_abbrev=False,
    )
    parser.set_defaults(main=main, parser=parser)
    return parser


def main(_args: argparse.Namespace) -> int:
    """Print the facts."""
    from ampcompat.tools.selftest.environment import environment, text

    facts = environment()
    emit(text(facts))
    return int(not facts["devices"])
