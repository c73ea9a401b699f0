"""Traps in the arguments of ``amp.initialize``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampcompat.tools.check.findings import ERROR, Finding
from ampcompat.tools.check.source import Source, argument
from ampcompat.tools.check.traps.repository import Repository


def misspelt_level(source: Source, repository: Repository) -> Iterator[Finding]:
    """``opt_level="01"``: the prefix is the letter O. ``initialize`` refuses the digit zero."""
    for call in source.calls_to("apex.amp.initialize"):
        level = argument(call, 3, "opt_level")
        if isinstance(level, ast.Constant) and isinstance(level.value, str) and re.fullmatch(r"0[0-5]", level.value):
            right = f"O{level.value[1]}"
            note = f'opt_level="{level.value}" starts with a zero and is refused; write the letter: "{right}"'
            yield source.finding(level, "trap", "misspelt_level", ERROR, note)


def level_as_enabled(source: Source, repository: Repository) -> Iterator[Finding]:
    """``initialize(model, opt, "O2")``: the third parameter is ``enabled``; at apex the level stayed O1."""
    for call in source.calls_to("apex.amp.initialize"):
        third = call.args[2] if len(call.args) > 2 else argument(call, 2, "enabled")
        if not (isinstance(third, ast.Constant) and isinstance(third.value, str)):
            continue
        named = re.sub("^[oO0]", "O", third.value)
        if not re.fullmatch("O[0-5]", named):
            continue
        by_name = argument(call, 3, "opt_level") or ast.Constant("O1")
        if isinstance(by_name, ast.Constant) and named != by_name.value:
            note = f"the third parameter is enabled: apex ran at {by_name.value!s}, here it is refused;"
            note += f' write opt_level="{named}"'
            yield source.finding(third, "trap", "level_as_enabled", ERROR, note)
