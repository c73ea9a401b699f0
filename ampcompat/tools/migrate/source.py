"""The two migrations of one source text."""

from __future__ import annotations

import re

from ampcompat._extensions import EXTENSIONS
from ampcompat.tools.check.libraries import CLASSES
from ampcompat.tools.check.source import Source
from ampcompat.tools.check.symbols import ON_OPTIMIZERS
from ampcompat.tools.migrate.native import rewrite_native
from ampcompat.tools.migrate.rename import rewrite_imports
from ampcompat.tools.migrate.result import Result

TARGETS = ("ampcompat", "native")
MENTION = re.compile(rf"\b({'|'.join(('apex', *EXTENSIONS, *CLASSES))})\b")
#: Names of methods and attributes that apex gives optimizers; files that never name apex use them, too.
LEFT_BEHIND = re.compile(rf"\b({'|'.join(ON_OPTIMIZERS)})\b")


def migrate_source(code: str, to: str = "ampcompat", package: str = "") -> Result:
    """Migrate one source text.

    Args:
        code: The source.
        to: ``"ampcompat"`` renames imports; ``"native"`` imports ``native_amp`` in the place of ``apex.amp``.
        package: For ``native``: the package that ``native_amp`` is in; ``""`` if it stands beside the script.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: the source cannot be parsed.
        ValueError: ``to`` is not a target.
    """
    if to not in TARGETS:
        raise ValueError(f"to={to!r} is not a target; use one of {', '.join(TARGETS)}")
    is_left_behind = to == "native" and LEFT_BEHIND.search(code) is not None
    if not MENTION.search(code) and not is_left_behind:
        return Result(code)
    source = Source("", code)
    return rewrite_imports(source) if to == "ampcompat" else rewrite_native(source, package)
