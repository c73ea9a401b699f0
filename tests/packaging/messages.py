"""The messages that the package raises, warns with or prints, read from its source: f-string holes become ``…``."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ampcompat"

#: Functions whose argument at this position is a message to the user.
SAYS = {"say": 0, "maybe_print": 0, "warn_or_err": 0, "warn": 0, "say_once": 1, "warn_once": 1}


def text_of(node: ast.expr) -> str:
    """The text of a string expression; what is computed becomes ``…``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "…"


def messages(folder: Path) -> dict[str, str]:
    """Message: where it is, for every message of the Python files in ``folder``."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            shown: ast.expr | None = None
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                shown = node.exc.args[0]
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in SAYS and len(node.args) > SAYS[name]:
                    shown = node.args[SAYS[name]]
            text = "" if shown is None else text_of(shown)
            if len(text.replace("…", "").split()) >= 3:
                found[text] = f"{path.relative_to(PACKAGE).as_posix()}:{node.lineno}"
    return found


if __name__ == "__main__":
    for message, place in messages(PACKAGE).items():
        print(f"{place}\t{message}")
