"""Options of several commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


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
