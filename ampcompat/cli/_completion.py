"""``ampcompat --print-completion SHELL``: what completes our command lines in a shell, made by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ampcompat.cli._emit import emit

SHELLS = ("bash", "zsh", "tcsh")


class PrintCompletion(argparse.Action):
    """Prints the completion script and ends; needs the extra ``completion``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """Print the script for the shell ``values``."""
        try:
            import shtab
        except ImportError:
            parser.error("--print-completion - it needs shtab - pip install 'ampcompat[completion]'")
        (commands,) = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
        for name, command in commands.choices.items():
            if name in ("run", "parity"):  # their scripts are taken off the line before it is parsed
                command.add_argument("script", nargs="*")
            for action in command._actions:
                if not action.option_strings:
                    action.complete = shtab.FILE
        emit(shtab.complete(parser, shell=str(values)))
        parser.exit(0)
