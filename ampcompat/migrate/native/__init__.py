"""``--to native``: ``apex.amp`` calls become ``torch.autocast`` and ``torch.amp.GradScaler``.

Statements are given lines of their own, forward passes are wrapped in autocast while ``amp.scale_loss`` still shows
where losses end, and calls are replaced. What a file does that has no safe translation is marked and left as it was;
what was written is proved by :mod:`ampcompat.migrate.proof`, or marked.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

import libcst as cst

from ampcompat.check.source import Source
from ampcompat.migrate.marks import settled
from ampcompat.migrate.native.aside import Aside, Lost
from ampcompat.migrate.native.autocast import Plan, has_long_string, plan, rebuilt, wrapped
from ampcompat.migrate.native.calls import Calls, with_torch
from ampcompat.migrate.native.facts import Facts, Untranslatable
from ampcompat.migrate.native.leftovers import Leftovers, apex_uses, drop_imports, names_used
from ampcompat.migrate.native.normalize import has_shared_lines, split_lines
from ampcompat.migrate.native.places import places
from ampcompat.migrate.native.replacements import REPLACED, Replace
from ampcompat.migrate.proof.subject import Managed


def rewrite_native(source: Source) -> tuple[str, Managed | None]:
    """The text with its amp calls translated, and what is under amp now; None where it left them."""
    try:
        return _rewritten(source, everything=False)
    except Lost:
        return _rewritten(source, everything=True)


def _rewritten(source: Source, everything: bool) -> tuple[str, Managed | None]:
    reason = managed = translated = None
    if any((source.apex(call.func) or "").startswith("apex.amp.") for call in source.calls):
        try:
            translated, managed = _translated(Facts(source), everything)
        except Untranslatable as problem:
            reason = str(problem)
    module, aside = translated or _parsed(source, (), everything)
    if any((source.apex(node) or "").startswith(REPLACED) for node in source.nodes):
        replace = Replace(source.bindings)
        module = module.visit(replace)
        module = with_torch(module) if replace.changed else module
    used = names_used(module.code)
    if names := apex_uses(used, source.bindings):
        module = module.visit(Leftovers(source.bindings, names, reason))
    return aside.restored(settled(drop_imports(module, source.bindings, used)).code), managed


def _parsed(source: Source, needs: Collection[ast.AST], everything: bool) -> tuple[cst.Module, Aside]:
    aside = Aside(source, needs, everything)
    return cst.parse_module(aside.code), aside


def _translated(facts: Facts, everything: bool) -> tuple[tuple[cst.Module, Aside], Managed]:
    # Each pass sees the text of the one before: facts are positions in it.
    if has_shared_lines(facts.source):
        module, aside = _parsed(facts.source, facts.casts.needs, everything)
        code = aside.restored(split_lines(module, facts.source, facts.models).code)
        facts = facts if code == facts.source.code else Facts(Source("", code))
    made = plan(facts)
    if has_long_string(facts.source, made):
        facts, made = Facts(Source("", rebuilt(facts, made))), Plan()
    # Lines are those of the source from here on, without those of the regions.
    aside = Aside(facts.source, {*facts.casts.needs, *made.edges}, everything)
    module = cst.parse_module(wrapped(facts, made, aside.lines))
    facts.settle(made.regions)
    module = module.visit(Calls(facts, places(module, facts.source, aside.shown, made.regions), aside.shown))
    return (module, aside), facts.managed()
