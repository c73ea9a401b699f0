"""Options of several commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ampcompat.tools.level_table import LEVELS
from ampcompat.tools.parity.levels import letter_hint


def opt_level(word: str) -> str:
    """``word``, if it is a level; as a type of argparse.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if word not in LEVELS:
        rule = f"{word!r} - it must be one of {', '.join(LEVELS)} - name one of these."
        raise argparse.ArgumentTypeError(rule + letter_hint(word, LEVELS))
    return word


class Gone(argparse.Action):
    """An option that there was: naming it is an error that says what to use.

    Args:
        instead: What to use.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, instead: str, **kwargs: object) -> None:
        super().__init__(option_strings, dest, nargs="?", help=argparse.SUPPRESS)
        self.instead = instead

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """End with the error."""
        parser.error(f"{option_string} - there is no such option any more - {self.instead}")
