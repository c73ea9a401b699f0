"""The command ``ampcompat``.

Every module here whose name has no underscore in front is a subcommand: ``add_parser(subparsers)`` declares its
arguments and sets ``main`` as a default, ``main(args)`` does the work and returns the exit status.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import pkgutil
import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

from ampcompat import __version__
from ampcompat.cli._emit import emit

__all__ = ["main"]

#: Commands whose line ends with a script and its own arguments; their modules have a ``split(argv)``.
RUN_SCRIPTS = ("run", "parity")
#: First words of a line that lacks only ``run``.
FIRST_AFTER_RUN = ("-m", "-c", "--opt-level", "--dtype", "--keep-fp32", "--explain", "--report")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process) and return the exit status.

    Bad usage raises SystemExit with status 2, as argparse does; what a script raises under ``run`` is let through.
    Ctrl-C ends any other command with one line and status 130.
    """
    ours = list(sys.argv[1:] if argv is None else argv)
    command = ours[0] if ours else ""
    try:
        return _main(ours)
    except KeyboardInterrupt:
        if command == "run":
            raise  # the script's, which ends as under python
        emit(f"ampcompat {command}: interrupted", error=True)
        return 130


def _main(ours: list[str]) -> int:
    target: list[str] = []
    if ours and ours[0] in RUN_SCRIPTS:
        ours, target = importlib.import_module(f"{__name__}.{ours[0]}").split(ours)
    commands = [name for _, name, _ in pkgutil.iter_modules(__path__) if not name.startswith("_")]
    parser = _parser(commands, ours[0] if ours else "")
    if ours and ours[0] not in commands:
        _refuse_first_word(parser, ours, commands)
    args, unknown = parser.parse_known_args(ours)
    if unknown:
        words = [*dict.fromkeys(_suggestion(word, args.parser._option_string_actions) for word in unknown)]
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(words)}")
    args.target = target
    status: int = args.main(args)
    return status


def _refuse_first_word(parser: argparse.ArgumentParser, line: Sequence[str], commands: Sequence[str]) -> None:
    """End with an error for a line that begins with no command; options of ``parser`` itself are let through."""
    word = line[0]
    if word.endswith(".py") or word.partition("=")[0] in FIRST_AFTER_RUN:
        parser.error(f"no command is given - write: ampcompat run {shlex.join(line)}")
    if not word.startswith("-"):
        parser.error(f"no command {word!r}{_suggestion(word, commands)} - commands: {', '.join(commands)}")


def _suggestion(word: str, known: Iterable[str]) -> str:
    """Ask whether ``word`` meant one of ``known``; "" for nothing like it."""
    option = word.partition("=")[0].replace("_", "-")
    close = difflib.get_close_matches(option, list(known), n=1)
    return f" - did you mean {close[0]}?" if close else ""


def _parser(commands: Sequence[str], command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ampcompat", description="apex.amp on native torch AMP.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"ampcompat {__version__} (torch {torch_version()})")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # One command needs no other's imports; the script under "run" should find the process as empty as can be.
    for name in [command] if command in commands else commands:
        importlib.import_module(f"{__name__}.{name}").add_parser(subparsers)
    return parser


def torch_version() -> str:
    """The version of torch, which is not imported for that."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "not installed"
