"""Where the scaler lives: beside the loop, on ``self``, or in the module."""

from __future__ import annotations

import libcst as cst

from ampcompat.tools.migrate.caller import NAME
from ampcompat.tools.migrate.native.facts import Facts
from ampcompat.tools.migrate.native.file import File, Function
from ampcompat.tools.migrate.native.place import helper_names

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
