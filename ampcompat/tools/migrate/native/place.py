"""Where a migrated module gets the helper that it calls."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor, ImportItem

from ampcompat.tools.migrate.caller import FUNCTIONS, Caller
from ampcompat.tools.migrate.native.file import File
from ampcompat.tools.migrate.native.imports import bound_names, is_docstring
from ampcompat.tools.migrate.text import code_of


def has_helper(file: File) -> bool:
    """Whether the helper was pasted into a file already, or is imported."""
    for node in file.of_type(cst.ImportFrom):
        if not isinstance(node.names, cst.ImportStar) and FUNCTIONS[0] in {code_of(one.name) for one in node.names}:
            return True
    return {node.name.value for node in file.of_type(cst.FunctionDef)}.issuperset(FUNCTIONS)


def helper_names(file: File) -> dict[str, str]:
    """The names of the helper's functions in a file: others where the file has such names of its own."""
    if has_helper(file):
        return {name: name for name in FUNCTIONS}
    taken = {node.value for node in file.of_type(cst.Name)}
    return {name: f"amp_{name}" if name in taken else name for name in FUNCTIONS}


def caller_of(module: cst.Module, code: str, file: File, names: Mapping[str, str], scaler: str) -> Caller:
    """What is needed to give a module the helper.

    Args:
        module: The migrated module.
        code: Its text.
        file: The same file before it was migrated.
        names: What the helper's functions are called here.
        scaler: The statement that defines a scaler for the module, or ``""``.
    """
    index = _place(module)
    top = module.with_changes(body=module.body[:index], footer=(), has_trailing_newline=True)
    below = code[len(top.code) :]
    bound = bound_names(file)
    renamed = dict(names)
    if bound.get("torch", "torch") != "torch":
        renamed["torch"] = "torch_module"
    missing = [ImportItem("torch", alias=renamed.get("torch"))] if bound.get("torch") != "torch" else []
    if missing:
        top = AddImportsVisitor(CodemodContext(), missing).transform_module(top)
    plain = [
        index
        for index, line in enumerate(top.body)
        if isinstance(line, cst.SimpleStatementLine) and _holds_import(line)
    ]
    imports = top.with_changes(body=top.body[: plain[-1] + 1]) if plain else top
    return Caller(top.code, len(top.code) - len(imports.code), below, renamed, scaler, module.default_newline)


def _place(module: cst.Module) -> int:
    """Where the helper goes: below the last import that stands above all functions and classes."""
    last = 0
    for index, statement in enumerate(module.body):
        if isinstance(statement, cst.FunctionDef | cst.ClassDef):
            break
        if _holds_import(statement):
            last = index + 1
    if last == 0 and module.body and is_docstring(module.body[0]):
        return 1
    return last


def _holds_import(statement: cst.CSTNode) -> bool:
    if isinstance(statement, cst.SimpleStatementLine):
        return any(isinstance(part, cst.Import | cst.ImportFrom) for part in statement.body)
    if isinstance(statement, cst.Try | cst.If):
        return any(_holds_import(part) for part in statement.body.body)
    return False
