"""Imports of apex that nothing reads any more go, with what only said that apex is missing."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor, ImportItem

from ampcompat.tools.migrate.native.file import PACKAGES, Dropping, File
from ampcompat.tools.migrate.text import code_of


def drop_imports(module: cst.Module) -> cst.Module:
    """Remove imports of apex whose names nothing reads, and what only said that apex is missing."""
    return module.visit(_Drop(File(module)))


class _Drop(Dropping):
    def __init__(self, file: File) -> None:
        super().__init__(file, [*file.of_type(cst.Import), *file.of_type(cst.ImportFrom)])
        self.file = file
        self.read = _names_read(file)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.RemovalSentinel:
        kept = self._kept(original_node.body, updated_node.body)
        if kept == list(updated_node.body):
            return updated_node
        if not kept:
            return cst.RemoveFromParent()
        kept[-1] = kept[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
        return updated_node.with_changes(body=kept)

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
        kept = self._kept(original_node.body, updated_node.body)
        if len(kept) == len(updated_node.body):
            return updated_node
        return updated_node.with_changes(body=kept or [cst.Pass()])

    def _kept(
        self, original: Sequence[cst.BaseSmallStatement], updated: Sequence[cst.BaseSmallStatement]
    ) -> list[cst.BaseSmallStatement]:
        """What is left of the statements of a line."""
        kept: list[cst.BaseSmallStatement] = []
        for old, new in zip(original, updated, strict=True):
            left = self._import(old, new) if isinstance(old, cst.Import | cst.ImportFrom) else new
            if left is not None:
                kept.append(left)
        return kept

    def _import(self, old: cst.Import | cst.ImportFrom, new: cst.BaseSmallStatement) -> cst.BaseSmallStatement | None:
        """What is left of an import."""
        if isinstance(old, cst.ImportFrom) and (old.relative or old.module is None):
            return new
        if isinstance(old.names, cst.ImportStar):
            ours = isinstance(old, cst.ImportFrom) and old.module is not None and _is_ours(code_of(old.module))
            return None if ours and isinstance(old, cst.ImportFrom) and not self.file.reads_star(old) else new
        names = [alias for alias in old.names if not self._is_dead(old, alias)]
        if len(names) == len(old.names):
            return new
        if not names:
            return None
        names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return new.with_changes(names=names)

    def _is_dead(self, part: cst.Import | cst.ImportFrom, alias: cst.ImportAlias) -> bool:
        module = part.module if isinstance(part, cst.ImportFrom) else None
        origin = code_of(module) if module is not None else code_of(alias.name)
        if not _is_ours(origin):
            return False
        bound: cst.CSTNode = alias.asname.name if alias.asname is not None else alias.name
        while isinstance(bound, cst.Attribute):
            bound = bound.value
        return not isinstance(bound, cst.Name) or bound.value not in self.read

    def leave_Try(
        self, original_node: cst.Try, updated_node: cst.Try
    ) -> cst.Try | cst.RemovalSentinel | cst.FlattenSentinel[cst.BaseStatement]:
        """Without its import a ``try`` has nothing that could fail."""
        old = list(original_node.body.body)
        new = [s for s in updated_node.body.body if not _is_pass(s)]
        lost_import = any(_holds_our_import(s) for s in old) and not any(_holds_our_import(s) for s in new)
        if not lost_import or updated_node.finalbody is not None or not all(map(_cannot_fail, new)):
            return updated_node
        rest = [*new, *(updated_node.orelse.body.body if updated_node.orelse is not None else [])]
        kept = [part if isinstance(part, cst.BaseStatement) else cst.SimpleStatementLine([part]) for part in rest]
        if not kept:
            return cst.RemoveFromParent()
        first = kept[0]
        lines = [*updated_node.leading_lines, *getattr(first, "leading_lines", ())]
        return cst.FlattenSentinel([first.with_changes(leading_lines=lines), *kept[1:]])

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.If | cst.RemovalSentinel:
        was_empty = not any(not _is_pass(s) for s in original_node.body.body)
        is_empty = not any(not _is_pass(s) for s in updated_node.body.body)
        elif_branch = isinstance(self.file.parents.get(original_node), cst.If)
        if is_empty and not was_empty and updated_node.orelse is None and not elif_branch:
            return cst.RemoveFromParent()
        return updated_node


def _names_read(file: File) -> set[str]:
    """Names that the file reads, and those that it exports."""
    found: set[str] = set()
    for node in file.of_type(cst.Name):
        parent = file.parents.get(node)
        if isinstance(parent, cst.ImportAlias | cst.AsName | cst.ImportFrom | cst.AssignTarget | cst.Import):
            continue
        if isinstance(parent, cst.Attribute) and (parent.attr is node or _in_import(parent, file)):
            continue
        if isinstance(parent, cst.Arg) and parent.keyword is node:
            continue
        found.add(node.value)
    for text in file.of_type(cst.SimpleString):
        statement = file.statement(text)
        if isinstance(statement, cst.Assign) and code_of(statement.targets[0].target) == "__all__":
            found.add(str(text.raw_value))
    return found


def _in_import(node: cst.CSTNode, file: File) -> bool:
    return any(isinstance(parent, cst.Import | cst.ImportFrom) for parent in file.ancestors(node))


def _is_ours(name: str) -> bool:
    return name.split(".")[0] in PACKAGES


def _is_pass(statement: cst.CSTNode) -> bool:
    if isinstance(statement, cst.Pass):
        return True
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    return len(statement.body) == 1 and isinstance(statement.body[0], cst.Pass)


def _small(statement: cst.CSTNode) -> Sequence[cst.CSTNode]:
    return statement.body if isinstance(statement, cst.SimpleStatementLine) else [statement]


def _holds_our_import(statement: cst.CSTNode) -> bool:
    for part in _small(statement):
        if isinstance(part, cst.Import) and any(_is_ours(code_of(alias.name)) for alias in part.names):
            return True
        module = part.module if isinstance(part, cst.ImportFrom) and not part.relative else None
        if module is not None and _is_ours(code_of(module)):
            return True
    return False


def _cannot_fail(statement: cst.CSTNode) -> bool:
    """Whether a statement only binds a literal or a name."""
    simple = cst.Name | cst.SimpleString | cst.Integer
    return all(isinstance(part, cst.Assign) and isinstance(part.value, simple) for part in _small(statement))


def with_torch(module: cst.Module) -> cst.Module:
    """The module with ``import torch`` where it names torch and does not import it."""
    file = File(module)
    if "torch" not in _names_read(file) or "torch" in bound_names(file):
        return module
    return AddImportsVisitor(CodemodContext(), [ImportItem("torch")]).transform_module(module)


def bound_names(file: File) -> dict[str, str]:
    """What the imports of a module bind, each name with the module that it is."""
    found: dict[str, str] = {}
    for node in file.of_types(cst.Import, cst.ImportFrom, cst.FunctionDef, cst.ClassDef, cst.AssignTarget):
        if isinstance(node, cst.Import):
            for alias in node.names:
                name = code_of(alias.asname.name) if alias.asname is not None else code_of(alias.name).split(".")[0]
                found[name] = code_of(alias.name) if alias.asname is not None else name
        elif isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
            for alias in node.names:
                name = code_of(alias.asname.name) if alias.asname is not None else code_of(alias.name)
                found[name] = f"from {name}"
        elif isinstance(node, cst.FunctionDef | cst.ClassDef):
            found[node.name.value] = "defined"
        elif isinstance(node, cst.AssignTarget) and isinstance(node.target, cst.Name):
            found[node.target.value] = "assigned"
    return found


def is_docstring(statement: cst.CSTNode) -> bool:
    """Whether a statement is a string and nothing else."""
    if not isinstance(statement, cst.SimpleStatementLine) or not isinstance(statement.body[0], cst.Expr):
        return False
    return isinstance(statement.body[0].value, cst.SimpleString | cst.ConcatenatedString)
