"""``--to native``: ``apex.amp`` calls become ``torch.autocast`` and ``torch.amp.GradScaler``.

Statements are given lines of their own, forward passes are wrapped in autocast while ``amp.scale_loss`` still shows
where losses end, and calls are replaced. What a file does that has no safe translation is marked and left as it was;
what was written is proved by :mod:`ampcompat.migrate.proof`, or marked.
"""

from __future__ import annotations

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from ampcompat.check.source import Source
from ampcompat.migrate.native.autocast import wrap
from ampcompat.migrate.native.calls import Calls, with_torch
from ampcompat.migrate.native.facts import Facts, Untranslatable
from ampcompat.migrate.native.leftovers import Leftovers, apex_uses, drop_imports
from ampcompat.migrate.native.normalize import split_lines
from ampcompat.migrate.native.replacements import REPLACED, Replace
from ampcompat.migrate.proof.subject import Managed


def rewrite_native(module: cst.Module, source: Source) -> tuple[cst.Module, Managed | None]:
    """The module with its amp calls translated, and what is under amp now; None where it left them."""
    reason = managed = None
    if any((source.apex(call.func) or "").startswith("apex.amp.") for call in source.calls):
        try:
            module, facts = _translated(module, Facts(source))
            managed = facts.managed()
        except Untranslatable as problem:
            reason = str(problem)
    if any((source.apex(node) or "").startswith(REPLACED) for node in source.nodes):
        replace = Replace(source.bindings)
        module = module.visit(replace)
        module = with_torch(module) if replace.changed else module
    if names := apex_uses(Source("", module.code), source.bindings):
        module = module.visit(Leftovers(source.bindings, names, reason))
    return drop_imports(module, source.bindings), managed


def _translated(module: cst.Module, facts: Facts) -> tuple[cst.Module, Facts]:
    # Each pass sees the text of the one before: facts are positions in it.
    split = split_lines(module, facts.source, facts.models)
    facts = facts if split is module else Facts(Source("", split.code))
    code = wrap(split, facts)
    if code != facts.source.code:
        split, facts = cst.parse_module(code), Facts(Source("", code))
    wrapper = MetadataWrapper(split, unsafe_skip_copy=True)
    return wrapper.module.visit(Calls(facts, wrapper.resolve(PositionProvider))), facts
