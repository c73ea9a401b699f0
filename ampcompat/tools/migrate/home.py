"""Where ``native_amp.py`` goes: beside the scripts that import it, or into the package of the modules that do."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from ampcompat.tools.check.source import Source

NAME = "native_amp"
CONTENT = Path(__file__).with_name(f"{NAME}.py")


@functools.cache
def provided() -> frozenset[str]:
    """The names of ``native_amp``; it is not imported for that, since torch may not be installed."""
    names: set[str] = set()
    for node in Source(CONTENT.name, CONTENT.read_text("utf-8")).tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def homes(wanting: Iterable[Path], codes: Mapping[Path, str]) -> dict[Path, Path]:
    """The folder of ``native_amp.py`` for each file that imports it.

    Scripts share the copy of a package that they import. Packages beside each other share one beside them all: their
    state is one.

    Args:
        wanting: The files that import it.
        codes: The sources of the tree.
    """
    found = {path: _top_package(path, codes) or path.parent for path in wanting}
    packages = {home for home in found.values() if (home / "__init__.py").exists()}
    beside: defaultdict[Path, set[Path]] = defaultdict(set)
    for package in packages:
        beside[package.parent].add(package)
    for path, home in found.items():
        if home in packages and len(beside[home.parent]) > 1:
            found[path] = home.parent
        elif home not in packages:
            found[path] = _home_of_script(path, packages, beside, codes)
    return found


def package_of(home: Path) -> str:
    """The package that a folder is; ``""`` for the folder of a script."""
    return home.name if (home / "__init__.py").exists() else ""


def _home_of_script(
    path: Path, packages: set[Path], beside: Mapping[Path, set[Path]], codes: Mapping[Path, str]
) -> Path:
    """The copy of a package that a script imports, itself or by modules next to it, else its own folder."""
    if len(beside.get(path.parent, ())) > 1:
        return path.parent
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        module = waiting.pop()
        if module in seen or module not in codes:
            continue
        seen.add(module)
        for name in _imported(codes[module]):
            for package in packages:
                if package.name == name:
                    return package.parent if len(beside[package.parent]) > 1 else package
            waiting.append(path.parent / f"{name}.py")
    return path.parent


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
    names = _imported(code)
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


def _imported(code: str) -> set[str]:
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
