"""One helper for several files: where files of a folder need it, it becomes a module beside them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ampcompat.tools.check.files import Text
from ampcompat.tools.migrate.caller import NAME, helper_module
from ampcompat.tools.migrate.change import Change
from ampcompat.tools.migrate.result import Result

RELATIVE = re.compile(r"^\s*from\s+\.", re.MULTILINE)


def with_one_helper(changes: list[Change]) -> list[Change]:
    """``changes`` in which the files of a folder import the helper, where more than one file needs it."""
    callers = [change for change in changes if change.caller is not None]
    if not callers:
        return changes
    codes = codes_of(changes)
    folders: defaultdict[tuple[Path, str], list[Change]] = defaultdict(list)
    for change in callers:
        module = module_for(change.path, change.path.parent, codes)
        folders[change.path.parent, module].append(change)
    anew: dict[Path, Change] = {}
    added: list[Change] = []
    for (_, module), wanting in folders.items():
        shares = any(change.shares for change in wanting)
        if module and (len(wanting) > 1 or shares):
            anew.update({change.path: _importing(change, module) for change in wanting})
            added.append(_helper_beside(wanting[0], shares))
    return [anew.get(change.path, change) for change in changes] + added


def codes_of(changes: list[Change]) -> dict[Path, str]:
    """The sources of the files as they are now, but for those that cannot be read."""
    return {change.path: code for change in changes if (code := change.source()) is not None}


def module_for(path: Path, folder: Path, codes: Mapping[Path, str]) -> str:
    """How a file names the module with the helper in ``folder``; ``""`` where it may be run in several ways.

    Args:
        path: The file.
        folder: Where the helper is.
        codes: The sources of the tree.
    """
    if path.suffix != ".py" or (folder / f"{NAME}.py").exists():
        return ""
    if not (folder / "__init__.py").exists():
        return NAME if path.is_relative_to(folder) else ""
    return f".{NAME}" if path.parent == folder and _is_run_in_its_package(path, codes) else ""


def _is_run_in_its_package(path: Path, codes: Mapping[Path, str]) -> bool:
    """Whether relative imports work in a module: it has some, or others import it by its package."""
    if RELATIVE.search(codes[path]):
        return True
    module = re.escape(path.stem)
    package = re.escape(path.parent.name)
    by_name = rf"(?:from|import)\s+(?:\w+\.)*{package}\.{module}\b|from\s+(?:\w+\.)*{package}\s+import\s.*\b{module}\b"
    named = re.compile(rf"^\s*(?:{by_name})", re.MULTILINE)
    relatively = re.compile(rf"^\s*from\s+\.(?:{module}\s+import|\s*import\s.*\b{module}\b)", re.MULTILINE)
    for other, code in codes.items():
        if named.search(code) or (other.parent == path.parent and relatively.search(code)):
            return True
    return False


def _importing(change: Change, module: str) -> Change:
    """The change with the helper imported."""
    code = change.caller.with_import(module) if change.caller is not None else change.new
    return replace(change, new=code, todos=Result.of(code).todos)


def _helper_beside(change: Change, shares_scaler: bool) -> Change:
    """The new file with the helper."""
    path = change.path.with_name(f"{NAME}.py")
    name = change.name.removesuffix(change.path.name) + path.name
    return Change(path, name, Text("", "utf-8"), helper_module(shares_scaler), is_new=True)
