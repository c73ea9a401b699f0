"""One helper for several files: where files of a folder need it, it becomes a module beside them."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from ampcompat.tools.check.files import Text
from ampcompat.tools.migrate.caller import HELPER_FILE, NAME
from ampcompat.tools.migrate.change import Change
from ampcompat.tools.migrate.result import Result

RELATIVE = re.compile(r"^\s*from\s+\.", re.MULTILINE)


def with_one_helper(changes: list[Change]) -> list[Change]:
    """``changes`` in which the files of a folder import the helper, where more than one of them has it pasted."""
    folders: defaultdict[tuple[Path, str], list[Change]] = defaultdict(list)
    for change in changes:
        module = _module_for(change)
        if module:
            folders[change.path.parent, module].append(change)
    anew: dict[Path, Change] = {}
    added: list[Change] = []
    for (folder, module), wanting in folders.items():
        if len(wanting) > 1 and not (folder / f"{NAME}.py").exists():
            anew.update({change.path: _importing(change, module) for change in wanting})
            added.append(_helper_beside(wanting[0]))
    return [anew.get(change.path, change) for change in changes] + added


def _module_for(change: Change) -> str:
    """How a file names a module next to it; ``""`` where it needs no helper or may be run in two ways."""
    if change.path.suffix != ".py" or change.old is None or change.caller is None:
        return ""
    if not (change.path.parent / "__init__.py").exists():
        return NAME
    return f".{NAME}" if RELATIVE.search(change.old.code) else ""


def _importing(change: Change, module: str) -> Change:
    """The change with the helper imported."""
    code = change.caller.with_import(module) if change.caller is not None else change.new
    return replace(change, new=code, todos=Result.of(code).todos)


def _helper_beside(change: Change) -> Change:
    """The new file with the helper."""
    path = change.path.with_name(f"{NAME}.py")
    name = change.name.removesuffix(change.path.name) + path.name
    return Change(path, name, Text("", "utf-8"), HELPER_FILE.read_text("utf-8"), is_new=True)
