"""Options of several commands."""

from __future__ import annotations

import argparse

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
