"""Which names of a file mean something of apex: imports with aliases, assignments, stars, and what shadows them."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from ampcompat._extensions import EXTENSIONS
from ampcompat.check.findings import UNSUPPORTED
from ampcompat.check.own import provides
from ampcompat.check.symbols import SYMBOLS, verdict

PACKAGES = ("apex", "ampcompat", *EXTENSIONS)
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def apex_name(name: str) -> str | None:
    """``name`` in apex's naming (``ampcompat.amp`` is ``apex.amp``), or None for what is not apex's.

    Names that ampcompat has beside apex's (``ampcompat.report``, ``ampcompat.amp.unwrap``) are not.
    """
    root, _, rest = name.partition(".")
    if root in EXTENSIONS or root == "apex":
        return name
    if root != "ampcompat":
        return None
    symbol = f"apex.{rest}" if rest else "apex"
    return None if verdict(symbol).verdict == UNSUPPORTED and provides(name) else symbol


def dotted(node: ast.AST) -> str | None:
    """``a.b.c`` for a chain of attributes on a name, else None."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


class Bindings:
    """The file-wide table name -> apex symbol.

    A name that any import of the file binds to apex counts as apex everywhere in the file, except where a function's
    parameter shadows it. Names that another import binds too (``except ImportError: from torch.cuda import amp``) are
    ambiguous: they count as apex only for symbols that apex has.
    """

    def __init__(self, nodes: Iterable[ast.AST]) -> None:
        # As written: whether a name of ampcompat's is apex's shows only when the whole chain is known.
        self.names: dict[str, str] = {}
        self.ambiguous: set[str] = set()
        other: set[str] = set()
        assigned: list[tuple[str, ast.expr]] = []
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._import(alias, other)
            elif isinstance(node, ast.ImportFrom):
                self._import_from(node, other)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = dotted(node.targets[0])
                if target is not None and isinstance(node.value, ast.Attribute | ast.Name):
                    assigned.append((target, node.value))
        for target, value in assigned:
            symbol = self.resolve(dotted(value))
            # Only modules and symbols of the table: `x = amp._amp_state.loss_scalers[0]` is no alias.
            if symbol in SYMBOLS and target not in self.names:
                self.names[target] = symbol
        self.ambiguous = other & set(self.names)
        #: Where a chain of attributes must begin to name anything of apex.
        self.heads = {name.partition(".")[0] for name in self.names}

    def _import(self, alias: ast.alias, other: set[str]) -> None:
        root = alias.name.partition(".")[0]
        if root in PACKAGES:
            self.names[alias.asname or root] = alias.name if alias.asname else root
        else:
            other.add(alias.asname or root)

    def _import_from(self, node: ast.ImportFrom, other: set[str]) -> None:
        module = node.module or ""
        ours = node.level == 0 and module.partition(".")[0] in PACKAGES
        for alias in node.names:
            if not ours:
                other.add(alias.asname or alias.name)
            elif alias.name != "*":
                self.names[alias.asname or alias.name] = f"{module}.{alias.name}"
            else:
                for symbol in SYMBOLS:
                    parent, _, name = symbol.rpartition(".")
                    if parent == apex_name(module) and not name.startswith("_"):
                        self.names.setdefault(name, symbol)

    def resolve(self, name: str | None) -> str | None:
        """The apex symbol that a dotted name of the file means, or None."""
        if name is None:
            return None
        head, rest = name, ""
        while head:
            if head in self.names:
                symbol = apex_name(self.names[head] + rest)
                if head in self.ambiguous and symbol not in SYMBOLS:
                    return None
                return symbol
            head, _, last = head.rpartition(".")
            rest = f".{last}{rest}"
        return None


def parameters(function: Function) -> set[str]:
    """Names of all parameters of a function."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return {argument.arg for argument in every if argument is not None}
