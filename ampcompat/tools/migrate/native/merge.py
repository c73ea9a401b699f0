"""Before the translation: branches that differ by amp alone become one, and tests for apex are answered."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import libcst as cst

from ampcompat.tools.migrate.native.facts import MASTER_PARAMS, SCALE_LOSS, Facts
from ampcompat.tools.migrate.native.file import File, Pruned
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


def answer_probes(facts: Facts) -> cst.Module | None:
    """The module with ``amp is not None`` answered, where ``amp`` is None only if apex is not installed."""
    file = facts.file
    modules = {node.value for node in file.of_type(cst.Name) if file.symbol(node) == "apex.amp"}
    names = _optional(file)
    asked: list[cst.CSTNode] = [node for node in file.of_type(cst.Name) if node.value in names or node.value in modules]
    asked += [call for call in file.of_type(cst.Call) if _looks_for_apex(call)]
    stashes = {call for call in file.of_type(cst.Call) if _asks_for_stash(call, facts)}
    if not asked and not stashes:
        return None
    visitor = _Answer(file, [*asked, *stashes], names, modules, stashes)
    answered = file.module.visit(visitor)
    return cst.parse_module(answered.code) if visitor.changed else None


def _optional(file: File) -> set[str]:
    """Names that a ``try`` imports from apex, and that its handler sets to None."""
    found: set[str] = set()
    for node in file.of_type(cst.Try):
        imported = {
            alias.asname.name.value if alias.asname is not None else alias.name.value  # type: ignore[union-attr]
            for line in node.body.body
            for part in _small(line)
            if isinstance(part, cst.ImportFrom) and not isinstance(part.names, cst.ImportStar)
            for alias in part.names
            if part.module is not None and code_of(part.module).split(".")[0] == "apex"
        }
        for handler in node.handlers:
            for line in handler.body.body:
                for part in _small(line):
                    if isinstance(part, cst.Assign) and code_of(part.value) in ("None", "False"):
                        found |= {code_of(t.target) for t in part.targets} & imported
    return found


def _small(line: cst.CSTNode) -> Sequence[cst.CSTNode]:
    return line.body if isinstance(line, cst.SimpleStatementLine) else [line]


class _Answer(Pruned):
    """Answers the tests, and folds what they stood in."""

    def __init__(
        self, file: File, asked: list[cst.CSTNode], names: set[str], modules: set[str], stashes: set[cst.Call]
    ) -> None:
        super().__init__(file, asked)
        self.stashes = stashes
        self.names = names
        self.modules = modules
        self.changed = False
        self.answers: list[cst.CSTNode] = []
        self.elifs: dict[int, bool] = {}

    def _answer(self, value: bool) -> cst.BaseExpression:
        self.changed = True
        node = cst.Name("True" if value else "False")
        self.answers.append(node)
        return node

    def _known(self, node: cst.CSTNode) -> bool | None:
        """The value of a test that was answered; None for others."""
        if any(node is answer for answer in self.answers) and isinstance(node, cst.Name):
            return node.value == "True"
        if isinstance(node, cst.Name) and node.value in self.names:
            return True
        if isinstance(node, cst.Call) and _looks_for_apex(node):
            return True
        return None

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """``hasattr(amp, "state_dict")``, ``hasattr(optimizer, "_amp_stash")``."""
        if original_node in self.stashes:
            return self._answer(True)
        if last_name(updated_node.func) == "hasattr" and code_of(updated_node.args[0].value) in self.modules:
            return self._answer(True)
        return updated_node

    def leave_Comparison(self, original_node: cst.Comparison, updated_node: cst.Comparison) -> cst.BaseExpression:
        if len(updated_node.comparisons) != 1:
            return updated_node
        comparison = updated_node.comparisons[0]
        if isinstance(comparison.operator, cst.In) and code_of(comparison.comparator) in self._dicts():
            return self._answer(True)
        if code_of(updated_node.left) not in self.names and not _looks_for_apex(updated_node.left):
            return updated_node
        if code_of(comparison.comparator) not in ("None", "False"):
            return updated_node
        if isinstance(comparison.operator, cst.IsNot | cst.NotEqual):
            return self._answer(True)
        return self._answer(False) if isinstance(comparison.operator, cst.Is | cst.Equal) else updated_node

    def _dicts(self) -> set[str]:
        return {f"{name}.__dict__" for name in self.modules} | {f"dir({name})" for name in self.modules}

    def leave_UnaryOperation(
        self, original_node: cst.UnaryOperation, updated_node: cst.UnaryOperation
    ) -> cst.BaseExpression:
        known = self._known(updated_node.expression)
        if isinstance(updated_node.operator, cst.Not) and known is not None:
            return self._answer(not known)
        return updated_node

    def leave_BooleanOperation(
        self, original_node: cst.BooleanOperation, updated_node: cst.BooleanOperation
    ) -> cst.BaseExpression:
        conjunction = isinstance(updated_node.operator, cst.And)
        for one, other in ((updated_node.left, updated_node.right), (updated_node.right, updated_node.left)):
            known = self._known(one)
            if known is None:
                continue
            if known == conjunction:
                self.changed = True
                return other
            return self._answer(known)
        return updated_node

    def leave_IfExp(self, original_node: cst.IfExp, updated_node: cst.IfExp) -> cst.BaseExpression:
        known = self._known(updated_node.test)
        if known is None:
            return updated_node
        self.changed = True
        return updated_node.body if known else updated_node.orelse

    def leave_Assert(self, original_node: cst.Assert, updated_node: cst.Assert) -> cst.Assert | cst.RemovalSentinel:
        if self._known(updated_node.test):
            self.changed = True
            return cst.RemoveFromParent()
        return updated_node

    def leave_If(
        self, original_node: cst.If, updated_node: cst.If
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel:
        known = self._known(updated_node.test)
        if known is None:
            return self._without_empty(original_node, updated_node)
        kept: cst.CSTNode | None = updated_node.body if known else updated_node.orelse
        if isinstance(kept, cst.If):
            self.changed = True
            return kept.with_changes(leading_lines=updated_node.leading_lines)
        body = kept.body if isinstance(kept, cst.Else) else kept
        if body is None:
            self.changed = True
            return cst.RemoveFromParent()
        if not isinstance(body, cst.IndentedBlock):
            return updated_node
        self.changed = True
        first, *rest = body.body
        lines = [*updated_node.leading_lines, *getattr(first, "leading_lines", ())]
        return cst.FlattenSentinel([first.with_changes(leading_lines=lines), *rest])

    def _without_empty(self, original: cst.If, updated: cst.If) -> cst.If | cst.RemovalSentinel:
        """An ``if`` whose only statement was an answered assertion goes with it."""
        had = [code_of(line).strip() for line in original.body.body]
        has = [code_of(line).strip() for line in updated.body.body]
        emptied = has == ["pass"] and had != ["pass"] and updated.orelse is None
        return cst.RemoveFromParent() if emptied and id(original) not in self.elifs else updated

    def visit_If(self, node: cst.If) -> None:
        if isinstance(node.orelse, cst.If):
            self.elifs[id(node.orelse)] = True

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> cst.BaseSuite:
        if original_node.body and not updated_node.body:
            return updated_node.with_changes(body=[cst.SimpleStatementLine([cst.Pass()])])
        return updated_node


def _asks_for_stash(node: cst.Call, facts: Facts) -> bool:
    """Whether a call asks if an optimizer is under amp, by what apex leaves on it."""
    if last_name(node.func) != "hasattr" or len(node.args) != 2:
        return False
    optimizer, name = node.args
    return code_of(name.value).strip("\"'") == "_amp_stash" and facts.is_optimizer(optimizer.value)


def _looks_for_apex(node: cst.BaseExpression) -> bool:
    """Whether an expression is ``find_spec("apex")`` or the like."""
    if not isinstance(node, cst.Call) or last_name(node.func) not in ("find_spec", "version", "find_loader"):
        return False
    return len(node.args) == 1 and code_of(node.args[0].value).strip("\"'").split(".")[0] == "apex"
