"""Functions that apex ran in float32 and autocast does not: they get float32 inputs by hand."""

from __future__ import annotations

import libcst as cst

from ampcompat.tools.migrate.native.edits import Edits
from ampcompat.tools.migrate.native.facts import Facts
from ampcompat.tools.migrate.native.initialize import HALF_WEIGHTS
from ampcompat.tools.migrate.native.nodes import argument, last_name
from ampcompat.tools.migrate.text import code_of

FUNCTIONS = ("std", "var", "std_mean", "var_mean")
ARRAYS = ("np", "numpy", "math", "statistics", "jnp", "tf")


def keep_float32(facts: Facts, edits: Edits) -> None:
    """``x.std(2)`` in a module becomes ``x.float().std(2)``: in half the squares of scaled gradients overflow."""
    levels = [argument(made.call, 3, "opt_level") for made in facts.initialized]
    if all(level is not None and code_of(level).strip("\"'") in HALF_WEIGHTS for level in levels):
        return
    for call in facts.file.of_type(cst.Call):
        if last_name(call.func) not in FUNCTIONS or not isinstance(call.func, cst.Attribute):
            continue
        if not _is_in_module(call, facts):
            continue
        base = code_of(call.func.value)
        if base in ARRAYS or base.endswith(".float()") or base.split(".")[0] in ARRAYS:
            continue
        if base == "torch":
            if call.args and not code_of(call.args[0].value).endswith(".float()"):
                edits.expressions[call.args[0]] = _float_argument
        elif not base.startswith("torch."):
            edits.expressions[call.func] = _float_base


def _is_in_module(call: cst.Call, facts: Facts) -> bool:
    """Whether a call stands in a class with a ``forward``."""
    owner = facts.file.class_of(facts.file.function(call))
    return owner is not None and facts.flows.method(owner, "forward") is not None


def _float_argument(arg: cst.CSTNode) -> cst.CSTNode:
    return arg.with_changes(value=_as_float(arg.value)) if isinstance(arg, cst.Arg) else arg


def _float_base(func: cst.CSTNode) -> cst.CSTNode:
    return func.with_changes(value=_as_float(func.value)) if isinstance(func, cst.Attribute) else func


def _as_float(value: cst.BaseExpression) -> cst.BaseExpression:
    simple = isinstance(value, cst.Name | cst.Attribute | cst.Call | cst.Subscript) or bool(value.lpar)
    text = code_of(value) if simple else f"({code_of(value)})"
    return cst.parse_expression(f"{text}.float()")
