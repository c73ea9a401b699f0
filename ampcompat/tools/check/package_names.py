"""Names that ampcompat defines, read from its source: importing it would need torch, which the check does not."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
# A package that takes this from `_replacements` only answers probes.
REFUSES = {"refuse", "supply"}


def provides(name: str) -> bool:
    """Whether ``ampcompat.a.b`` is a module of ampcompat or a name bound in one; below such a name all is its own."""
    place, parts = PACKAGE, name.split(".")[1:]
    while parts and _file(place / parts[0]).is_file():
        place /= parts.pop(0)
    bound = _bound(_file(place))
    if not parts:
        return not bound & REFUSES
    has_every_module = parts[0].startswith("__") and parts[0].endswith("__")
    return parts[0] in bound or (has_every_module and bool(bound))


@functools.cache
def exports(module: str) -> frozenset[str]:
    """The names that ``__all__`` of ampcompat's ``module`` lists; none without one."""
    file = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    names: set[str] = set()
    for node in ast.parse(file.read_bytes()).body:
        is_first = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        adds = isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "__all__"
        if isinstance(node, ast.Assign | ast.AugAssign) and (is_first or adds):
            names.update(ast.literal_eval(node.value))
    return frozenset(names)


@functools.cache
def names_of(module: str) -> frozenset[str]:
    """The names that ampcompat's ``module`` binds to something of ampcompat's own; submodules do not count."""
    file = _file(PACKAGE.joinpath(*module.split(".")[1:]))
    foreign: set[str] = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        outside = isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("ampcompat")
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and outside):
            foreign |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return _bound(file) - foreign


def _file(place: Path) -> Path:
    """The source of a module or package. A folder without one is what an older version left behind."""
    package = place / "__init__.py"
    return package if package.is_file() else place.with_suffix(".py")


@functools.cache
def _bound(file: Path) -> frozenset[str]:
    """The names that a module binds at its top level, in branches too."""
    names: set[str] = set()
    rest: list[ast.AST] = [ast.parse(file.read_bytes())]
    for node in rest:  # grows on the way
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif not isinstance(node, ast.comprehension):  # whose names are its own
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            rest += ast.iter_child_nodes(node)
    return frozenset(names)
