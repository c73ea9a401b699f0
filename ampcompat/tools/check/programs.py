"""Which files an import ties together: what is known of one holds in another only along imports."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ampcompat.tools.check.source import Source


class Import(NamedTuple):
    """One name that a file imports.

    Attributes:
        dots: The number of dots in front, of a relative import.
        module: The module; "" in ``from . import name``.
        name: The name that is imported from it, which may be a module, too; "" in ``import module``.
    """

    dots: int
    module: str
    name: str = ""


def imports(source: Source) -> Iterator[Import]:
    """What a file imports."""
    for node in source.kind(ast.Import):
        for alias in node.names:
            yield Import(0, alias.name)
    for statement in source.kind(ast.ImportFrom):
        for alias in statement.names:
            yield Import(statement.level, statement.module or "", alias.name)


class Programs:
    """The files of a scan, and which of them import which, by their paths."""

    def __init__(self, files: Mapping[str, Iterable[Import]]) -> None:
        self._modules = {_module_path(file): file for file in files}
        self._module_names = {os.path.basename(module) for module in self._modules}
        self._imported: dict[str, set[str]] = {}
        self._importers: dict[str, set[str]] = {file: set() for file in files}
        for file, names in files.items():
            self._imported[file] = set(self._files_of(file, names)) - {file}
            for other in self._imported[file]:
                self._importers[other].add(file)

    def relatives(self, file: str) -> set[str]:
        """The files that import a file, or that it imports, also by others between them; without itself."""
        return (_reached(self._importers, [file]) | _reached(self._imported, [file])) - {file}

    def program(self, file: str) -> set[str]:
        """The files of all programs that a file is a part of: what imports it, with all that this imports."""
        return _reached(self._imported, _reached(self._importers, [file]))

    def _files_of(self, file: str, names: Iterable[Import]) -> Iterator[str]:
        """The files that imports of ``file`` lead to."""
        for found in names:
            whole = f"{found.module}.{found.name}".strip(".")
            path = self._find(file, found.dots, whole) or self._find(file, found.dots, found.module)
            if path is not None:
                yield path

    def _find(self, file: str, dots: int, module: str) -> str | None:
        """The file of a module: beside ``file``, or in a folder above it, where the program may start."""
        folder = os.path.dirname(file)
        if dots:
            for _ in range(dots - 1):
                folder = os.path.dirname(folder)
            return self._modules.get(_joined(folder, module))
        if module.rpartition(".")[2] not in self._module_names:
            return None
        while True:
            path = self._modules.get(_joined(folder, module))
            above = os.path.dirname(folder)
            if path is not None or above == folder:
                return path
            folder = above


def _module_path(file: str) -> str:
    """The path of a file as a module: without its suffix, and of a package its folder."""
    path = os.path.splitext(file)[0]
    return os.path.dirname(path) if os.path.basename(path) == "__init__" else path


def _joined(folder: str, module: str) -> str:
    return os.path.join(folder, *module.split(".")) if module else folder


def _reached(edges: Mapping[str, set[str]], starts: Iterable[str]) -> set[str]:
    """The starts, and all that arrows lead to from there."""
    found = set(starts)
    waiting = list(found)
    while waiting:
        for other in edges[waiting.pop()] - found:
            found.add(other)
            waiting.append(other)
    return found
