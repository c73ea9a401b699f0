"""Before the translation: branches that differ by amp alone become one."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import libcst as cst

from ampcompat.tools.migrate.native.facts import MASTER_PARAMS, SCALE_LOSS, Facts
from ampcompat.tools.migrate.native.file import Pruned
from ampcompat.tools.migrate.native.nodes import last_name
from ampcompat.tools.migrate.text import code_of

PLACEHOLDER = "__parameters__"
Statements = Sequence[cst.BaseStatement | cst.BaseSmallStatement]


def merge_branches(facts: Facts) -> cst.Module | None:
    """The module with ``if fp16: <amp> else: <the same without>`` as the first branch alone; None without such.

    A scaler that is switched off scales nothing, so one branch serves both.
    """
    masters = [call for call in facts.file.of_type(cst.Call) if facts.symbol(call.func) in MASTER_PARAMS]
    visitor = _Merge(facts, [*facts.scaled, *masters])
    merged = facts.file.module.visit(visitor)
    return cst.parse_module(merged.code) if visitor.changed else None


class _Merge(Pruned):
    def __init__(self, facts: Facts, calls: list[cst.Call]) -> None:
        super().__init__(facts.file, calls)
        self.facts = facts
        self.changed = False

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.If | cst.FlattenSentinel[cst.BaseStatement]:
        other = original_node.orelse
        if not isinstance(other, cst.Else) or self._is_elif(original_node):
            return updated_node
        amp = _Plain(self.facts)
        plain = _Plain(self.facts)
        one = _dump(original_node.body, amp)
        if not amp.found_amp or one != _dump(other.body, plain):
            return updated_node
        self.changed = True
        body = updated_node.body.visit(_Parameters(plain.parameters))
        if isinstance(body, cst.IndentedBlock):
            statements = list(body.body)
        elif isinstance(body, cst.BaseSuite):
            statements = [one_line(body)]
        else:
            return updated_node
        first = statements[0]
        lines = [*updated_node.leading_lines, *getattr(first, "leading_lines", ())]
        statements[0] = first.with_changes(leading_lines=lines)
        return cst.FlattenSentinel(statements)

    def leave_IfExp(self, original_node: cst.IfExp, updated_node: cst.IfExp) -> cst.BaseExpression:
        """``amp.master_params(optimizer) if fp16 else model.parameters()``, and ``nullcontext(loss)`` for a block."""
        body = original_node.body
        other = original_node.orelse
        scaled = _scaled_by(body, self.facts)
        if scaled is not None and code_of(other) in _without_amp(scaled):
            self.changed = True
            return updated_node.body.with_changes(lpar=[], rpar=[])
        is_master = isinstance(body, cst.Call) and self.facts.symbol(body.func) in MASTER_PARAMS
        is_plain = isinstance(other, cst.Call) and last_name(other.func) == "parameters"
        if is_master and is_plain:
            self.changed = True
            return updated_node.orelse
        return updated_node

    def _is_elif(self, node: cst.If) -> bool:
        return isinstance(self.facts.file.parents.get(node), cst.If)


def _scaled_by(node: cst.BaseExpression, facts: Facts) -> cst.BaseExpression | None:
    """The loss that a call of ``scale_loss`` gets; None for other expressions."""
    if isinstance(node, cst.Call) and facts.symbol(node.func) in SCALE_LOSS and node.args:
        return node.args[0].value
    return None


def _without_amp(loss: cst.BaseExpression) -> tuple[str, ...]:
    """What stands for ``amp.scale_loss(loss, ...)`` in a ``with`` where amp is off."""
    return f"nullcontext({code_of(loss)})", f"contextlib.nullcontext({code_of(loss)})"


class _Plain(cst.CSTTransformer):
    """Writes code as it is without amp, with a placeholder for the parameters that it clips."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.parameters: list[str] = []
        self.found_amp = False

    def leave_With(
        self, original_node: cst.With, updated_node: cst.With
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        if len(original_node.items) != 1:
            return updated_node
        call = original_node.items[0].item
        name = original_node.items[0].asname
        if not isinstance(call, cst.Call) or self.facts.symbol(call.func) not in SCALE_LOSS or not call.args:
            return updated_node
        self.found_amp = True
        body = updated_node.body
        if name is not None and isinstance(name.name, cst.Name):
            body = cst.ensure_type(body.visit(_Named(name.name.value, call.args[0].value)), type(body))
        if isinstance(body, cst.IndentedBlock):
            return cst.FlattenSentinel(body.body)
        return one_line(body)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        master = self.facts.symbol(original_node.func) in MASTER_PARAMS
        self.found_amp = self.found_amp or master
        if master or (last_name(original_node.func) == "parameters" and not original_node.args):
            self.parameters.append(code_of(original_node))
            return cst.Name(PLACEHOLDER)
        return updated_node


class _Named(cst.CSTTransformer):
    """Puts the loss in the places of its scaled form."""

    def __init__(self, name: str, loss: cst.BaseExpression) -> None:
        self.name = name
        self.loss = cst.parse_expression(in_brackets(loss))

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        return self.loss if original_node.value == self.name else updated_node


class _Parameters(cst.CSTTransformer):
    """Puts the parameters of the branch without amp in the places of those that amp gave, in order."""

    def __init__(self, parameters: list[str]) -> None:
        self.parameters = list(parameters)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        if last_name(original_node.func) in ("master_params", "parameters") and self.parameters:
            return cst.parse_expression(self.parameters.pop(0))
        return updated_node


def one_line(suite: cst.BaseSuite) -> cst.SimpleStatementLine:
    """The statements of ``with x: a; b`` as a line."""
    return cst.SimpleStatementLine([part for part in suite.body if isinstance(part, cst.BaseSmallStatement)])


def scaled_loss(node: cst.With, facts: Facts) -> tuple[cst.BaseExpression, cst.Call] | None:
    """The loss and the ``backward`` call of a block that does nothing else."""
    if len(node.items) != 1 or node.asynchronous is not None:
        return None
    call = node.items[0].item
    name = node.items[0].asname
    if not isinstance(call, cst.Call) or facts.symbol(call.func) not in SCALE_LOSS or not call.args or name is None:
        return None
    body = node.body.body
    if len(body) != 1:
        return None
    small = body[0].body if isinstance(body[0], cst.SimpleStatementLine) else body
    if len(small) != 1 or not isinstance(small[0], cst.Expr) or not isinstance(small[0].value, cst.Call):
        return None
    backward = small[0].value
    if code_of(backward.func) != f"{code_of(name.name)}.backward":
        return None
    return call.args[0].value, backward


def in_brackets(node: cst.BaseExpression) -> str:
    """The text of an expression that can stand in another one."""
    text = code_of(node)
    simple = isinstance(node, cst.Name | cst.Attribute | cst.Call | cst.Subscript | cst.BaseNumber) or bool(node.lpar)
    return text if simple else f"({text})"


def _dump(body: cst.BaseSuite, visitor: _Plain) -> str:
    new = body.visit(visitor)
    if isinstance(new, cst.SimpleStatementSuite):
        new = cst.IndentedBlock([cst.SimpleStatementLine(new.body)])
    if not isinstance(new, cst.IndentedBlock):
        return ""
    text = cst.Module(body=[cst.If(test=cst.Name("_"), body=new)]).code
    return ast.dump(ast.parse(text))
