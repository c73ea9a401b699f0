"""The two migrations of one source text."""

from __future__ import annotations

import ast
import re

from ampcompat._extensions import EXTENSIONS
from ampcompat.tools.check.source import Source, children
from ampcompat.tools.migrate.elsewhere import BORROWS, mark_borrowed_amp
from ampcompat.tools.migrate.result import ALONE, MissingLibcst, Result, Tree

TARGETS = ("ampcompat", "native")
#: As deep as Python 3.11 parses. libcst recurses without a bound, and its time grows with the square of the depth.
MAX_NESTING = 1000
MENTION = re.compile(rf"\b({'|'.join(('apex', *EXTENSIONS))})\b")


def migrate_source(code: str, to: str = "ampcompat", tree: Tree = ALONE) -> Result:
    """Migrate one source text.

    Args:
        code: The source.
        to: ``"ampcompat"`` rewrites imports only; ``"native"`` rewrites the calls to ``torch.amp``.
        tree: For ``native``: what the other files of a tree say.

    Raises:
        MissingLibcst: libcst is not installed.
        SyntaxError, ValueError, RecursionError, MemoryError: the source cannot be parsed.
        ValueError: ``to`` is no target.
    """
    if to not in TARGETS:
        raise ValueError(f"to={to!r} is no target; use one of {', '.join(TARGETS)}")
    try:
        import libcst as cst
    except ImportError:
        raise MissingLibcst from None
    if not MENTION.search(code):
        return mark_borrowed_amp(code) if to == "native" and BORROWS.search(code) else Result(code)
    source = Source("", code)
    refuse_deep_nesting(source.tree)
    try:
        if to == "ampcompat":
            from ampcompat.tools.migrate.rename import rewrite_imports

            return rewrite_imports(code)
        from ampcompat.tools.migrate.native import rewrite_native

        return rewrite_native(code, tree)
    except cst.ParserSyntaxError as problem:
        raise SyntaxError(problem.message) from None


def refuse_deep_nesting(tree: ast.AST) -> None:
    """Raise RecursionError for a tree that libcst could not read."""
    level: list[ast.AST] = [tree]
    for _ in range(MAX_NESTING):
        level = [child for node in level for child in children(node)]
        if not level:
            return
    raise RecursionError(f"nested more than {MAX_NESTING} levels deep")
