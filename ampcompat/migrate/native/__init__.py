"""``--to native``: ``apex.amp`` calls become ``torch.autocast`` and ``torch.amp.GradScaler``.

Two passes. The first wraps the computation of each scaled loss in autocast, while ``amp.scale_loss`` still shows where
it ends; the second replaces the calls. What a file does that has no safe translation is marked and left as it was.
"""

from __future__ import annotations

import libcst as cst

from ampcompat.check.source import Source
from ampcompat.migrate.native.autocast import Autocast
from ampcompat.migrate.native.calls import Calls
from ampcompat.migrate.native.facts import Facts, Untranslatable
from ampcompat.migrate.native.leftovers import Leftovers, drop_imports


def rewrite_native(module: cst.Module, source: Source) -> cst.Module:
    """The module with its amp calls translated."""
    reason = None
    if any((source.apex(call.func) or "").startswith("apex.amp.") for call in source.calls):
        try:
            facts = Facts(source)
            module = module.visit(Autocast(facts))
            module = module.visit(Calls(facts))
        except Untranslatable as problem:
            reason = str(problem)
    module = module.visit(Leftovers(source.bindings, reason))
    return drop_imports(module, source.bindings)
