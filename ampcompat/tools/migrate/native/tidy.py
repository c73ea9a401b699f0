"""Last: imports that nothing needs any more go, the helper and its imports come."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor, ImportItem

from ampcompat.tools.migrate.native.edits import Edits
from ampcompat.tools.migrate.native.facts import Facts
from ampcompat.tools.migrate.native.file import PACKAGES, File, Pruned
from ampcompat.tools.migrate.text import code_of

HELPER_FILE = Path(__file__).with_name("helper.py")
FUNCTIONS = ("mixed_precision", "under_autocast", "to_float32")
MODULES = ("copy", "torch")


def drop_imports(module: cst.Module) -> cst.Module:
    """Remove imports of apex whose names nothing reads, and what only said that apex is missing."""
    file = File(module)
    dropped = module.visit(_Drop(file))
    if len(dropped.body) < 2 or len(module.body) < 2 or not _is_docstring(module.body[0]):
        return dropped
    # The blank line below the docstring stays, whatever import stood there.
    first = dropped.body[1]
    if any(line.comment is None for line in getattr(first, "leading_lines", ())[:1]):
        return dropped
    blank = [line for line in getattr(module.body[1], "leading_lines", ())[:1] if line.comment is None]
    first = first.with_changes(leading_lines=[*blank, *getattr(first, "leading_lines", ())])
    return dropped.with_changes(body=[dropped.body[0], first, *dropped.body[2:]])


class _Drop(Pruned):
    def __init__(self, file: File) -> None:
        super().__init__(file, [*file.of_type(cst.Import), *file.of_type(cst.ImportFrom)])
        self.file = file
        self.read = _names_read(file)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.RemovalSentinel:
        kept: list[cst.BaseSmallStatement] = []
        for old, new in zip(original_node.body, updated_node.body, strict=True):
            left = self._import(old, new) if isinstance(old, cst.Import | cst.ImportFrom) else new
            if left is not None:
                kept.append(left)
        if len(kept) == len(updated_node.body) and all(a is b for a, b in zip(kept, updated_node.body, strict=True)):
            return updated_node
        if not kept:
            return cst.RemoveFromParent()
        kept[-1] = kept[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
        return updated_node.with_changes(body=kept)

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
        kept: list[cst.BaseSmallStatement] = []
        for old, new in zip(original_node.body, updated_node.body, strict=True):
            left = self._import(old, new) if isinstance(old, cst.Import | cst.ImportFrom) else new
            if left is not None:
                kept.append(left)
        if len(kept) == len(updated_node.body):
            return updated_node
        return updated_node.with_changes(body=kept or [cst.Pass()])

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

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> cst.BaseSuite:
        if original_node.body and not updated_node.body:
            return updated_node.with_changes(body=[cst.SimpleStatementLine([cst.Pass()])])
        return updated_node


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


def add_torch(module: cst.Module) -> cst.Module:
    """The module with ``import torch`` where it names torch and does not import it."""
    names_torch = any(
        isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == "torch"
        for node in File(module).nodes
    )
    return _with_imports(module, ["torch"]) if names_torch and "torch" not in _bound_at_top(module) else module


def _with_imports(module: cst.Module, names: Sequence[str]) -> cst.Module:
    items = [ImportItem(name) for name in names]
    return AddImportsVisitor(CodemodContext(), items).transform_module(module)


def has_helper(file: File) -> bool:
    """Whether the helper was pasted into a file already, or is imported."""
    for node in file.of_type(cst.ImportFrom):
        if not isinstance(node.names, cst.ImportStar) and FUNCTIONS[0] in {code_of(one.name) for one in node.names}:
            return True
    return {node.name.value for node in file.of_type(cst.FunctionDef)}.issuperset(FUNCTIONS)


def holds_helper(code: str) -> bool:
    """Whether the helper was pasted into a source."""
    return HELPER_FILE.read_text("utf-8").partition("def under_autocast")[2] in code


def helper_names(file: File) -> dict[str, str]:
    """The names of the helper's functions in a file: others where the file has such names of its own."""
    if has_helper(file):
        return {name: name for name in FUNCTIONS}
    taken = {node.value for node in file.of_type(cst.Name)}
    return {name: f"amp_{name}" if name in taken else name for name in FUNCTIONS}


def import_helper(module: cst.Module, names: dict[str, str], source: str, scaler: str) -> cst.Module:
    """The module with the helper imported from another file.

    Args:
        module: The migrated module.
        names: What the helper's functions are called here.
        source: The module that has the helper, ``.mixed_precision`` for one of the same package.
        scaler: The statement that defines a scaler for the module, or ``""``.
    """
    name = source.lstrip(".")
    chosen = names["mixed_precision"]
    alias = None if chosen == "mixed_precision" else chosen
    item = ImportItem(name, "mixed_precision", alias, relative=len(source) - len(name))
    module = AddImportsVisitor(CodemodContext(), [item]).transform_module(module)
    if "copy.deepcopy(scaler" in module.code and "copy" not in _bound_at_top(module):
        module = _import_copy(module)
    if scaler:
        index = _place(module)
        line = cst.ensure_type(cst.parse_statement(f"{scaler}\n"), cst.SimpleStatementLine)
        line = line.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
        module = module.with_changes(body=[*module.body[:index], line, *module.body[index:]])
    return add_torch(module)


def add_helper(module: cst.Module, names: dict[str, str], scaler: str) -> cst.Module:
    """The module with the helper below its imports, and a scaler for all functions where they share one.

    Args:
        module: The migrated module.
        names: What the helper's functions are called here.
        scaler: The statement that defines a scaler for the module, or ``""``.
    """
    source = HELPER_FILE.read_text("utf-8")
    text = source[source.index("def mixed_precision") :]
    bound = _bound_at_top(module)
    missing: list[tuple[str, str | None]] = []
    for name in MODULES:
        if bound.get(name, name) != name:
            text = re.sub(rf"\b{name}\.", f"{name}_module.", text)
            missing.append((name, f"{name}_module"))
        elif name not in bound:
            missing.append((name, None))
    for name, chosen in names.items():
        text = re.sub(rf"\b{name}\b", chosen, text)
    if scaler:
        text += f"\n\n{scaler}\n"
    helper = list(cst.parse_module(text).body)
    blank = [cst.EmptyLine(indent=False), cst.EmptyLine(indent=False)]
    helper[0] = helper[0].with_changes(leading_lines=blank)
    index = _place(module)
    rest = list(module.body[index:])
    if rest:
        comments = list(rest[0].leading_lines)
        while comments and comments[0].comment is None:
            comments.pop(0)
        rest[0] = rest[0].with_changes(leading_lines=[*blank, *comments])
    # The imports are added to what stands above alone: libcst goes through the whole of what it is given.
    above = module.with_changes(body=module.body[:index])
    if ("copy", None) in missing:
        missing.remove(("copy", None))
        above = _import_copy(above)
    items = [ImportItem(name, alias=alias) for name, alias in missing]
    if items:
        above = AddImportsVisitor(CodemodContext(), items).transform_module(above)
    return above.with_changes(body=[*above.body, *helper, *rest], footer=module.footer)


def _import_copy(module: cst.Module) -> cst.Module:
    """The module with ``import copy`` in the place that the alphabet gives it among its imports."""
    body = list(module.body)
    plain = [index for index, line in enumerate(body) if _plain_import(line)]
    if not plain:
        return _with_imports(module, ["copy"])
    earlier = [index for index in plain if _plain_import(body[index]) < "copy"]
    new = cst.ensure_type(cst.parse_statement("import copy\n"), cst.SimpleStatementLine)
    if earlier:
        index = earlier[-1] + 1
        return module.with_changes(body=[*body[:index], new, *body[index:]])
    first = cst.ensure_type(body[plain[0]], cst.SimpleStatementLine)
    if not any(line.comment is not None for line in first.leading_lines):
        new = new.with_changes(leading_lines=first.leading_lines)
        first = first.with_changes(leading_lines=())
    return module.with_changes(body=[*body[: plain[0]], new, first, *body[plain[0] + 1 :]])


def _plain_import(statement: cst.CSTNode) -> str:
    """What ``import x`` imports; ``""`` for other statements."""
    part = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    return code_of(part.names[0].name) if isinstance(part, cst.Import) else ""


def _bound_at_top(module: cst.Module) -> dict[str, str]:
    """What the imports of a module bind, each name with the module that it is."""
    found: dict[str, str] = {}
    for node in File(module).nodes:
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


def _place(module: cst.Module) -> int:
    """Where the helper goes: below the last import that stands above all functions and classes."""
    last = 0
    for index, statement in enumerate(module.body):
        if isinstance(statement, cst.FunctionDef | cst.ClassDef):
            break
        if _holds_import(statement):
            last = index + 1
    if last == 0 and module.body and _is_docstring(module.body[0]):
        return 1
    return last


def _holds_import(statement: cst.CSTNode) -> bool:
    if isinstance(statement, cst.SimpleStatementLine):
        return any(isinstance(part, cst.Import | cst.ImportFrom) for part in statement.body)
    if isinstance(statement, cst.Try | cst.If):
        return any(_holds_import(part) for part in statement.body.body)
    return False


def _is_docstring(statement: cst.CSTNode) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine) or not isinstance(statement.body[0], cst.Expr):
        return False
    return isinstance(statement.body[0].value, cst.SimpleString)
