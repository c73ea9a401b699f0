"""Before the translation: tests for apex, and for what it leaves on an optimizer, are answered."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from ampcompat.tools.migrate.native.facts import Facts
from ampcompat.tools.migrate.native.file import Dropping, File
from ampcompat.tools.migrate.native.nodes import last_name
from ampcompat.tools.migrate.text import code_of


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


class _Answer(Dropping):
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
