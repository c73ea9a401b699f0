"""Files that share an optimizer with a translated one: where they step it, or read its gradients, a mark says so.

Each file is translated by itself. Here only names are compared: those of the optimizers that a translated file scales
gradients for, in files that import it or that it imports.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ampcompat.tools.migrate.result import Result

IMPORTED = re.compile(r"^\s*(?:from\s+(\.*[\w.]*)\s+import\s+([^\n#]*)|import\s+([\w.]+))", re.MULTILINE)
USES = re.compile(r"\.step\(|clip_grad|\.grad\b")
BORROWED = ("scale_loss", "master_params")
BORROWS = re.compile(r"\b(scale_loss|master_params)\s*\(")


def imported_names(code: str) -> set[str]:
    """The last parts of all names that a source imports: ``engine`` for ``from .engine import train``."""
    found: set[str] = set()
    for module, names, plain in IMPORTED.findall(code):
        found.add((module or plain).rpartition(".")[2])
        found |= {name.split(" as ")[0].strip(" ()\t") for name in names.split(",")}
    return found - {""}


def connected(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    """The modules that a module shares objects with: it imports them or they it, directly or through others.

    Args:
        start: A module, by the last part of its name.
        imports: What each module of the tree imports.
    """
    found: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found.add(module)
        waiting += [other for other in imports if other in imports.get(module, ()) or module in imports[other]]
    return found - {start}


def mark_uses(code: str, optimizers: Iterable[str], place: str) -> Result:
    """The source with marks above steps of optimizers of these names, and above reads of gradients.

    An optimizer that the file makes itself is another one.

    Args:
        code: The source of a file that makes no scaler.
        optimizers: The last parts of names, ``optimizer`` for ``self.optimizer``.
        place: Where the scaler is made.
    """
    import libcst as cst

    from ampcompat.tools.migrate.native.edits import Edits
    from ampcompat.tools.migrate.native.file import File
    from ampcompat.tools.migrate.native.nodes import last_name

    file = File(cst.parse_module(code))
    own = {
        last_name(target.target)
        for node in file.of_type(cst.Assign)
        if isinstance(node.value, cst.Call)
        for target in node.targets
    }
    names = set(optimizers)
    edits = Edits()
    if own & names:
        return Result.of(code)
    for node in file.of_type(cst.Attribute):
        message = ""
        if node.attr.value == "step" and last_name(node.value) in names:
            message = "hand the scaler on, and write scaler.step(optimizer), then scaler.update()"
        elif node.attr.value == "grad" or node.attr.value.startswith("clip_grad"):
            message = "they are scaled until scaler.unscale_(optimizer) is called, once before each step"
        statement = file.statement(node)
        if message:
            edits.mark(statement, f"if this is about the optimizer of {place}, whose gradients are scaled: {message}")
    return Result.of(edits.apply(file).code)


def mark_borrowed_amp(code: str) -> Result:
    """A source that gets amp from another file of the tree, with marks where it uses it."""
    import libcst as cst

    from ampcompat.tools.migrate.native.edits import Edits
    from ampcompat.tools.migrate.native.file import File
    from ampcompat.tools.migrate.native.nodes import last_name

    file = File(cst.parse_module(code))
    edits = Edits()
    for call in file.of_type(cst.Call):
        statement = file.statement(call)
        if last_name(call.func) in BORROWED:
            edits.mark(
                statement,
                "amp comes from another file: import apex here (from apex import amp), and migrate again",
            )
    return Result.of(edits.apply(file).code)
