"""Where ``native_amp.py`` goes: beside the scripts that import it, or into the package of the modules that do."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ampcompat.tools.check.source import Source
from ampcompat.tools.migrate.parts import NAME


class Home(NamedTuple):
    """The folder of a copy, and the package that it is imported from; ``""`` where it is imported as a script is."""

    folder: Path
    package: str = ""


def homes(wanting: Mapping[Path, Path], codes: Mapping[Path, str]) -> dict[Path, Home]:
    """The copy of ``native_amp.py`` that each file imports.

    Scripts share the copy of a package that they import. Packages of one folder share one in that folder: their state
    is one. So does a package without ``__init__.py``.

    Args:
        wanting: The files that import it, and the folder that is migrated.
        codes: The sources of the tree.
    """
    imported = _files_imported(codes)
    namespaces = {path: _namespace_package(path, root, codes, imported) for path, root in wanting.items()}
    tops = {path: namespace or _top_package(path, codes) for path, namespace in namespaces.items()}
    there = [path.parent for path in codes if path.name == f"{NAME}.py" and (path.parent / "__init__.py").exists()]
    packages: defaultdict[Path, set[Path]] = defaultdict(set)
    for top in (*tops.values(), *there):
        if top is not None:
            packages[top.parent].add(top)
    found: dict[Path, Home] = {}
    for path, top in tops.items():
        if top is None:
            top = _package_of_script(path, packages, codes)
        if top is None:
            found[path] = Home(path.parent)
        elif top in namespaces.values() or len(packages[top.parent]) > 1:
            found[path] = Home(top.parent)
        else:
            found[path] = Home(top, top.name)
    return found


def _files_imported(codes: Mapping[Path, str]) -> set[str]:
    """What the sources of a tree import by dotted names, as the path of a file: ``pkg/util.py`` for ``pkg.util``."""
    names: set[str] = set()
    for code in codes.values():
        for node in _imports(code):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif node.level == 0 and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {f"{name.replace('.', '/')}.py" for name in names if "." in name}


def _namespace_package(path: Path, root: Path, codes: Mapping[Path, str], imported: Iterable[str]) -> Path | None:
    """The folder around a module, within ``root``, that the tree imports as a package without ``__init__.py``."""
    for folder in path.parents:
        if folder == root or root not in folder.parents:
            return None
        is_imported = any(file.startswith(f"{folder.name}/") and folder.parent / file in codes for file in imported)
        if is_imported and not (folder / "__init__.py").exists():
            return folder
    return None


def _package_of_script(path: Path, packages: Mapping[Path, set[Path]], codes: Mapping[Path, str]) -> Path | None:
    """The first package with a copy that a script imports, itself or by modules next to it."""
    by_name = {package.name: package for found in packages.values() for package in found}
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        module = waiting.pop()
        if module in seen or module not in codes:
            continue
        seen.add(module)
        for name in sorted(imported(codes[module])):
            if name in by_name:
                return by_name[name]
            waiting.append(path.parent / f"{name}.py")
    return None


def _top_package(path: Path, codes: Mapping[Path, str]) -> Path | None:
    """The outermost package around a module; None for a script, even if its folder has an ``__init__.py``."""
    if not (path.parent / "__init__.py").exists():
        return None
    top = path.parent
    while (top.parent / "__init__.py").exists():
        top = top.parent
    return None if _is_script(path, top, codes) else top


def _is_script(path: Path, top: Path, codes: Mapping[Path, str]) -> bool:
    """Whether a file in a package is run by its path: it imports a neighbour by a bare name, or nothing imports it."""
    code = codes.get(path, "")
    names = imported(code)
    if path.name == "__init__.py" or top.name in names or _imports_relatively(code):
        return False
    if any((path.parent / f"{name}.py").exists() for name in names):
        return True
    return not any(path.stem in _mentioned(other) for file, other in codes.items() if file != path)


def _mentioned(code: str) -> set[str]:
    """The last parts of what a source imports: modules, and names that may be modules."""
    found: set[str] = set()
    for node in _imports(code):
        found |= {alias.name.rpartition(".")[2] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.rpartition(".")[2])
    return found


def imported(code: str) -> set[str]:
    """The first parts of what a source imports."""
    found: set[str] = set()
    for node in _imports(code):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def _imports_relatively(code: str) -> bool:
    return any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in _imports(code))


def _imports(code: str) -> list[ast.Import | ast.ImportFrom]:
    try:
        return list(Source("", code).kind(ast.Import, ast.ImportFrom))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
