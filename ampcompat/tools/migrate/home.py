"""Where ``native_amp.py`` goes: beside the scripts that import it, or into the package of the modules that do."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ampcompat.tools.check.programs import Import
from ampcompat.tools.check.programs import imports as imports_of
from ampcompat.tools.check.source import UNPARSABLE, Source
from ampcompat.tools.migrate.copied import NAME

#: What a file has that is made to be run.
MAIN = re.compile(r"^if\s+__name__\s*==", re.MULTILINE)


class Home(NamedTuple):
    """The copy that a file imports.

    Attributes:
        folder: Its folder.
        package: The package that it is imported from; ``""`` where it is imported as a script is.
        own_folder: The folder of a script that others import, too: run by its path, it finds a copy only there.
    """

    folder: Path
    package: str = ""
    own_folder: Path | None = None

    def copies(self) -> list[Path]:
        """The folders that need a copy."""
        return [self.folder] if self.own_folder in (None, self.folder) else [self.folder, self.own_folder]


def homes(wanting: Mapping[Path, Path], codes: Mapping[Path, str]) -> dict[Path, Home]:
    """The copy of ``native_amp.py`` that each file imports.

    Scripts share the copy of a package that they import. Packages of one folder share one in that folder: their state
    is one. So do modules that are imported as those of a package without ``__init__.py``.

    Args:
        wanting: The files that import it, and the folder that is migrated.
        codes: The sources of the tree.
    """
    imports = {path: _imports(code) for path, code in codes.items()} if wanting else {}
    dotted = _files_imported(imports.values())
    namespaces = {path: _namespace_package(path, root, dotted, imports) for path, root in wanting.items()}
    tops = {path: namespace or _top_package(path, imports) for path, namespace in namespaces.items()}
    there = [path.parent for path in codes if path.name == f"{NAME}.py" and (path.parent / "__init__.py").exists()]
    packages: defaultdict[Path, set[Path]] = defaultdict(set)
    for top in (*tops.values(), *there):
        if top is not None:
            packages[top.parent].add(top)
    found: dict[Path, Home] = {}
    for path, top in tops.items():
        if top is None:
            top = _package_of_script(path, packages, imports)
        if top is None:
            found[path] = Home(path.parent)
        elif top in namespaces.values() or len(packages[top.parent]) > 1:
            is_script = namespaces[path] is not None and MAIN.search(codes[path]) is not None
            found[path] = Home(top.parent, own_folder=path.parent if is_script else None)
        else:
            found[path] = Home(top, top.name)
    return found


def _files_imported(imports: Iterable[Sequence[Import]]) -> set[str]:
    """What a tree imports by dotted names, as the path of a file: ``pkg/util.py`` for ``pkg.util``."""
    names: set[str] = set()
    for found in imports:
        for one in found:
            if one.dots == 0:
                names |= {one.module, f"{one.module}.{one.name}"}
    return {f"{name.strip('.').replace('.', '/')}.py" for name in names if "." in name.strip(".")}


def _namespace_package(
    path: Path, root: Path, dotted: Iterable[str], imports: Mapping[Path, Sequence[Import]]
) -> Path | None:
    """The folder within ``root`` that is imported as a package without ``__init__.py`` and that a module is a part of.

    A file there that nothing imports is a script of its own.
    """
    if not _is_mentioned(path, imports):
        return None
    for folder in path.parents:
        if folder == root or root not in folder.parents:
            return None
        is_beside = any(
            file.startswith(f"{folder.name}/") and (folder.parent / file).parent == path.parent for file in dotted
        )
        if is_beside and not (folder / "__init__.py").exists():
            return folder
    return None


def _package_of_script(
    path: Path, packages: Mapping[Path, set[Path]], imports: Mapping[Path, Sequence[Import]]
) -> Path | None:
    """The first package with a copy that a script imports, itself or by modules next to it."""
    by_name = {package.name: package for found in packages.values() for package in found}
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        module = waiting.pop()
        if module in seen or module not in imports:
            continue
        seen.add(module)
        for name in sorted(_first_names(imports[module])):
            if name in by_name:
                return by_name[name]
            waiting.append(path.parent / f"{name}.py")
    return None


def _top_package(path: Path, imports: Mapping[Path, Sequence[Import]]) -> Path | None:
    """The outermost package around a module; None for a script, even if its folder has an ``__init__.py``."""
    if not (path.parent / "__init__.py").exists():
        return None
    top = path.parent
    while (top.parent / "__init__.py").exists():
        top = top.parent
    return None if _is_script(path, top, imports) else top


def _is_script(path: Path, top: Path, imports: Mapping[Path, Sequence[Import]]) -> bool:
    """Whether a file in a package is run by its path: it imports a neighbour by a bare name, or nothing imports it."""
    names = _first_names(imports.get(path, ()))
    is_relative = any(one.dots for one in imports.get(path, ()))
    if path.name == "__init__.py" or top.name in names or is_relative:
        return False
    if any((path.parent / f"{name}.py").exists() for name in names):
        return True
    return not _is_mentioned(path, imports)


def _is_mentioned(path: Path, imports: Mapping[Path, Sequence[Import]]) -> bool:
    """Whether another file imports something of the name of a module."""
    for other, found in imports.items():
        if other != path and any(path.stem in (one.name, one.module.rpartition(".")[2]) for one in found):
            return True
    return False


def _first_names(imports: Sequence[Import]) -> set[str]:
    """The first parts of what is imported, but for relative imports."""
    return {one.module.partition(".")[0] for one in imports if one.dots == 0}


def _imports(code: str) -> list[Import]:
    try:
        return list(imports_of(Source("", code)))
    except UNPARSABLE:
        return []
