"""Options of several commands."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from importlib.resources import files

from ampcompat.tools.parity.levels import letter_hint


def level_names() -> list[str]:
    """The levels of amp's table, read from its source: importing it would import torch before the script does."""
    source = files("ampcompat").joinpath("amp/levels.py").read_text(encoding="utf-8")
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == "LEVELS":
            table = statement.value
            keys = table.keys if isinstance(table, ast.Dict) else []
            return [str(key.value) for key in keys if isinstance(key, ast.Constant)]
    raise LookupError("ampcompat/amp/levels.py has no table LEVELS - this is a fault of ampcompat.")


def opt_level(word: str) -> str:
    """``word``, if it is a level; as a type of argparse.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    levels = level_names()
    if word not in levels:
        rule = f"{word!r} - it must be one of {', '.join(levels)} - name one of these."
        raise argparse.ArgumentTypeError(rule + letter_hint(word, levels))
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
