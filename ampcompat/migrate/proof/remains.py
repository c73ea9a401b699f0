"""Nothing of apex is left, or it is marked."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ampcompat._extensions import EXTENSIONS
from ampcompat.check.source import Source, called

ROOTS = ("apex", *EXTENSIONS)
#: What apex leaves on objects, by which scripts ask whether amp is on.
LEFT_BEHIND = frozenset({"_amp_stash", "_amp_state"})
PROBES = ("find_spec", "import_module", "__import__", "version", "get_distribution")


def apex_left(source: Source, marks: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Imports of apex, in whatever form, and probes for it; those whose uses are marked already are left out."""
    for node in source.nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            symbols = [f"{name}.{a.name}" for a in node.names] if isinstance(node, ast.ImportFrom) else [name]
            if any(mark.startswith(symbol) for symbol in symbols for mark in marks):
                continue
            if name.partition(".")[0] in ROOTS:
                yield getattr(node, "lineno", 1), f"{name} is still imported: its uses have no counterpart in torch.amp"
        asked = node.value if isinstance(node, ast.Constant) else node.attr if isinstance(node, ast.Attribute) else ""
        if isinstance(asked, str) and asked in LEFT_BEHIND and not any(asked in mark for mark in marks):
            yield getattr(node, "lineno", 1), f"{asked} is apex's: nothing has it any more"
        if isinstance(node, ast.Call) and called(node) in PROBES and node.args:
            first = node.args[0]
            given = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
            if given.partition(".")[0] in ROOTS:
                yield node.lineno, f"{given} is looked for by name: without apex the answer is no"
