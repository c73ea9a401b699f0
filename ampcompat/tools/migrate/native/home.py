"""Where the scaler lives: beside the loop, on ``self``, or in the module; and where the helper that makes it goes."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor, ImportItem

from ampcompat.tools.migrate.caller import FUNCTIONS, NAME, Caller
from ampcompat.tools.migrate.native.facts import Facts
from ampcompat.tools.migrate.native.file import File, Function
from ampcompat.tools.migrate.native.imports import bound_names, is_docstring
from ampcompat.tools.migrate.text import code_of

NAMES = ("scaler", "grad_scaler", "amp_scaler", "loss_grad_scaler")


class Home:
    """The name of the scaler in each function.

    Attributes:
        kind: ``local`` to one function or the module, an ``attribute`` of ``self``, ``global``, or in the helper's
            module where another file makes it.
        name: Its name, without ``self``.
    """

    def __init__(self, facts: Facts, uses: set[Function | None]) -> None:
        self.file = facts.file
        self.uses = uses
        if not facts.initialized:
            self.kind = "helper"
            self.name = f"{helper_names(self.file)[NAME]}.scaler"
            return
        makers = {self.file.function(made.call) for made in facts.initialized}
        self.name = _free_name(self.file)
        self.kind = self._kind(makers)

    def _kind(self, makers: set[Function | None]) -> str:
        if None in makers or all(any(self._within(use, maker) for maker in makers) for use in self.uses):
            return "local"
        classes = {self.file.class_of(function) for function in makers | self.uses}
        related = None not in classes and self._one_family({c for c in classes if c is not None})
        if related and all(_first_parameter(self._method(function)) for function in makers | self.uses):
            return "attribute"
        return "global"

    def _within(self, use: Function | None, maker: Function | None) -> bool:
        """Whether a function is ``maker`` or stands inside of it."""
        return use is maker or (use is not None and any(parent is maker for parent in self.file.ancestors(use)))

    def _one_family(self, classes: set[cst.ClassDef]) -> bool:
        """Whether one of the classes is the base of the others."""
        if len(classes) == 1:
            return True
        names = {c.name.value for c in classes}
        roots = [c for c in classes if not any(_base_name(base) in names for base in c.bases)]
        return len(roots) == 1

    def scaler(self, function: Function | None) -> str:
        """The scaler as a function writes it."""
        if self.kind != "attribute":
            return self.name
        return f"{_first_parameter(self._method(function)) or 'self'}.{self.name}"

    def _method(self, function: Function | None) -> Function | None:
        """The outermost function that holds this one."""
        while function is not None and self.file.function(function) is not None:
            function = self.file.function(function)
        return function


def _base_name(base: cst.Arg) -> str:
    return base.value.value if isinstance(base.value, cst.Name) else ""


def _first_parameter(function: Function | None) -> str | None:
    """``self``, in a method that has one."""
    if function is None:
        return None
    for decorator in function.decorators:
        if isinstance(decorator.decorator, cst.Name) and decorator.decorator.value in ("staticmethod", "classmethod"):
            return None
    params = [*function.params.posonly_params, *function.params.params]
    return params[0].name.value if params and params[0].name.value == "self" else None


def _free_name(file: File) -> str:
    """A name for the scaler that the file does not use."""
    taken = {node.value for node in file.of_type(cst.Name)}
    for name in NAMES:
        if name not in taken:
            return name
    number = 2
    while f"scaler{number}" in taken:
        number += 1
    return f"scaler{number}"


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
