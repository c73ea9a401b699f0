"""Rewriting the imports of a repository that uses apex: to ampcompat, or to one file on plain ``torch.amp``.

``native_amp.py`` is that file. Sources are parsed, and changed where they name apex; nothing of them is executed.
"""

from ampcompat.tools.migrate.result import Result
from ampcompat.tools.migrate.source import migrate_source

__all__ = ["Result", "migrate_source"]
