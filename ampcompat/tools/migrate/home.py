"""Where ``native_amp.py`` goes: beside the scripts that import it, or into the package of the modules that do."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
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


def homes(wanting: Collection[Path], codes: Mapping[Path, str]) -> dict[Path, Home]:
    """The copy of ``native_amp.py`` that each file imports.

    Scripts share the copy of a package that they import. Packages of one folder share one in that folder: their state
    is one. So do modules that are imported as those of a package without ``__init__.py``.

    Args:
        wanting: The files that import it.
        codes: The sources of the tree.
    """
    imports = {path: _imports(code) for path, code in codes.items()} if wanting else {}
    roots = _import_roots(imports)
    tops = {path: _package_of(path, roots, imports) for path in wanting}
    there = [path.parent for path in codes if path.name == f"{NAME}.py" and _has_init(path.parent)]
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
        elif not _has_init(top):
            is_script = MAIN.search(codes[path]) is not None
            found[path] = Home(top.parent, own_folder=path.parent if is_script else None)
        elif len(packages[top.parent]) > 1:
            found[path] = Home(top.parent)
        else:
            found[path] = Home(top, top.name)
    return found


def _import_roots(imports: Mapping[Path, Sequence[Import]]) -> dict[Path, set[Path]]:
    """For each folder, from where its modules are imported by dotted names: the folder of ``p`` for ``p.q.module``.

    That is the folder of the file that imports, or one above it.
    """
    modules = {path.parent if path.name == "__init__.py" else path.with_suffix(""): path.parent for path in imports}
    names = {module.name for module in modules}
    found: dict[Path, set[Path]] = {}
    for importing, all_of_file in imports.items():
        absolute = [one for one in all_of_file if one.dots == 0]
        dotted = {name.strip(".") for one in absolute for name in (one.module, f"{one.module}.{one.name}")}
        for name in dotted:
            first, _, last = name.rpartition(".")
            if not first or last not in names:
                continue
            for folder in importing.parents:
                module = folder.joinpath(*name.split("."))
                if module in modules:
                    found.setdefault(modules[module], set()).add(folder)
                    break
    return found


def _package_of(
    path: Path, roots: Mapping[Path, Iterable[Path]], imports: Mapping[Path, Sequence[Import]]
) -> Path | None:
    """The package that a module is imported as a part of, with or without ``__init__.py``; None for a script.

    Where modules of its folder are imported from several places, the innermost counts; where from none by a dotted
    name, it is the outermost package around the module.
    """
    for root in sorted(roots.get(path.parent, ()), key=lambda root: -len(root.parts)):
        package = root / path.relative_to(root).parts[0]
        is_script = _is_script(path, package, imports) if _has_init(package) else not _is_mentioned(path, imports)
        return None if is_script else package
    if not _has_init(path.parent):
        return None
    package = path.parent
    while _has_init(package.parent):
        package = package.parent
    return None if _is_script(path, package, imports) else package


def _has_init(folder: Path) -> bool:
    return (folder / "__init__.py").exists()


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
