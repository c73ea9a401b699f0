"""Which names of a file mean something of apex: imports with aliases, assignments, stars, and what shadows them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable

from ampcompat._extensions import EXTENSIONS
from ampcompat.tools.check.findings import UNSUPPORTED
from ampcompat.tools.check.package_names import provides
from ampcompat.tools.check.symbols import MODULES, is_symbol, names_in, verdict

PACKAGES = ("apex", "ampcompat", *EXTENSIONS)
#: The module that ``ampcompat migrate --to native`` puts in the place of ``apex.amp``.
NATIVE = "native_amp"
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def apex_name(name: str) -> str | None:
    """``name`` in apex's naming (``ampcompat.amp`` is ``apex.amp``), or None for what is not apex's.

    Names that ampcompat has beside apex's (``ampcompat.tools.report``, ``ampcompat.amp.unwrap``) are not.
    """
    root, _, rest = name.partition(".")
    if root in EXTENSIONS or root == "apex":
        return name
    if root != "ampcompat":
        return None
    symbol = f"apex.{rest}" if rest else "apex"
    return None if verdict(symbol).verdict == UNSUPPORTED and provides(name) else symbol


def dotted(node: ast.AST | None) -> str:
    """``a.b.c`` for a name with attributes, ``""`` for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


class Bindings:
    """The file-wide table name -> apex symbol.

    A name that any import of the file binds to apex, or an assignment of such a name (``self.amp = amp``), counts as
    apex everywhere in the file, except where a function's parameter shadows it. Names that are bound to something else
    too (``except ImportError: from torch.cuda import amp``) are ambiguous: they count as apex only for symbols that
    apex has.

    Attributes:
        is_native: The file imports ``native_amp``, whose names count as those of ``apex.amp``: it has no masters.
    """

    def __init__(self, nodes: Iterable[ast.AST]) -> None:
        self.is_native = False
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
            elif isinstance(node, ast.Assign):
                assigned += _pairs(node.targets, node.value)
                module = _imported_by_name(node.value)
                self.names |= {dotted(target): module for target in node.targets if module}
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                assigned += _pairs([node.target], node.value)
        for target, value in assigned:
            symbol = self.resolve(dotted(value))
            if symbol is None:
                other.add(target)
            elif is_symbol(symbol):  # `x = amp._amp_state.handle.is_active` is not an alias
                self.names.setdefault(target, symbol)
        self.ambiguous = other & set(self.names)
        #: Where a chain of attributes must begin to name anything of apex.
        self.heads = {name.partition(".")[0] for name in self.names}

    def _import(self, alias: ast.alias, other: set[str]) -> None:
        root = alias.name.partition(".")[0]
        if alias.name == NATIVE:
            self.is_native = True
            self.names[alias.asname or NATIVE] = "apex.amp"
        elif root in PACKAGES:
            self.names[alias.asname or root] = alias.name if alias.asname else root
        else:
            other.add(alias.asname or root)

    def _import_from(self, node: ast.ImportFrom, other: set[str]) -> None:
        module = node.module or ""
        ours = node.level == 0 and module.partition(".")[0] in PACKAGES
        if module.rpartition(".")[2] == NATIVE:
            self.is_native = ours = True
            module = "apex.amp"
        for alias in node.names:
            if alias.name == NATIVE:
                self.is_native = True
                self.names[alias.asname or NATIVE] = "apex.amp"
            elif not ours:
                other.add(alias.asname or alias.name)
            elif alias.name != "*":
                self.names[alias.asname or alias.name] = f"{module}.{alias.name}"
            else:
                for name in _public_names(apex_name(module)):
                    self.names.setdefault(name, f"{apex_name(module)}.{name}")

    def resolve(self, name: str) -> str | None:
        """The apex symbol that a dotted name of the file means, or None."""
        bound = self.bound(name)
        if bound is None:
            return None
        symbol = apex_name(self.names[bound] + name[len(bound) :])
        if symbol is None or (bound in self.ambiguous and not is_symbol(symbol)):
            return None
        return symbol

    def bound(self, name: str) -> str | None:
        """The longest beginning of a dotted name that is bound to something of apex: ``self.amp``, or ``amp``."""
        while name and name not in self.names:
            name = name.rpartition(".")[0]
        return name or None


@functools.cache
def _public_names(module: str | None) -> tuple[str, ...]:
    """What a star imports from a module of apex. Its modules are not meant: scripts have an ``opt`` of their own."""
    names = names_in(module) if module in MODULES else set()
    if module != "apex":
        names = {name for name in names if f"{module}.{name}" not in MODULES}
    return tuple(sorted(name for name in names if not name.startswith("_")))


def _pairs(targets: list[ast.expr], value: ast.expr) -> list[tuple[str, ast.expr]]:
    """Names with what is assigned to them, where that is a name too: ``self.amp = amp``, ``amp if x else None``."""
    values = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    names = [name for name in map(dotted, targets) if name]
    return [(name, one) for name in names for one in values if isinstance(one, ast.Attribute | ast.Name)]


def _imported_by_name(value: ast.expr) -> str:
    """The module of ``importlib.import_module("apex.amp")``; "" for what is no such call, or of another package."""
    if not isinstance(value, ast.Call) or dotted(value.func).rpartition(".")[2] != "import_module":
        return ""
    name = value.args[0].value if value.args and isinstance(value.args[0], ast.Constant) else ""
    return name if isinstance(name, str) and name.partition(".")[0] in PACKAGES else ""


def parameters(function: Function) -> set[str]:
    """Names of all parameters of a function."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return {argument.arg for argument in every if argument is not None}
