"""Parameters that only ever got ``amp``: they go, with their arguments."""

from __future__ import annotations

import libcst as cst

from ampcompat.tools.migrate.native.edits import Edits
from ampcompat.tools.migrate.native.facts import Facts
from ampcompat.tools.migrate.native.file import File


def drop_amp_arguments(module: cst.Module) -> cst.Module:
    """Remove parameters that only ever got ``amp`` and that nothing reads any more, with their arguments."""
    facts = Facts(File(module))
    file = facts.file
    edits = Edits()
    unread: dict[cst.Param, cst.FunctionDef] = {}
    for function in file.of_type(cst.FunctionDef):
        for param in function.params.params:
            variable = file.variable(param.name)
            uses = [n for n in file.of_type(cst.Name) if n is not param.name and file.variable(n) == variable]
            if not uses and param.default is None and facts.symbol(param.name) == "apex.amp":
                unread[param] = function
    gone: set[cst.CSTNode] = set(unread)
    for call in file.of_type(cst.Call):
        callee = facts.flows.callee(call)
        if callee is None:
            continue
        values = [value for param, value in facts.flows.bound(call, *callee) if param in unread]
        gone |= {arg for arg in call.args if arg.value in values}
    for node in {file.parents[one] for one in gone}:
        old = node.params if isinstance(node, cst.Parameters) else node.args if isinstance(node, cst.Call) else ()
        keep = [index for index, one in enumerate(old) if one not in gone]
        edits.expressions[node] = lambda new, keep=keep: _kept(new, keep)  # type: ignore[misc]
    return edits.apply(file) if gone else module


def _kept(node: cst.CSTNode, keep: list[int]) -> cst.CSTNode:
    """A call or a list of parameters with those at some places only."""
    name = "params" if isinstance(node, cst.Parameters) else "args"
    kept = [getattr(node, name)[index] for index in keep]
    if kept:
        kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return node.with_changes(**{name: kept})
