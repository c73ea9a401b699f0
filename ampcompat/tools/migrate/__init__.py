"""Rewriting a script that uses apex: its imports to ampcompat, or its calls to plain ``torch.amp``.

Sources are parsed and printed again with libcst, which keeps comments and layout; nothing of them is executed.
"""

from ampcompat.tools.migrate.result import MissingLibcst, Result
from ampcompat.tools.migrate.source import migrate_source

__all__ = ["MissingLibcst", "Result", "migrate_source"]
