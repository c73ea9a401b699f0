"""The table of levels, read from amp's source: importing it would import torch.

The check does without torch, and so does the command line, which imports nothing before the script does.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).parents[1] / "amp" / "levels.py"


@dataclass(frozen=True)
class Level:
    """What the check asks of a level.

    Attributes:
        weights: The dtype that the weights are cast to, as ``"float16"``; "" where they are not cast.
        functions: The dtype that functions are cast to; "" where they are not.
        masters: Whether the optimizer steps float32 masters.
        loss_scale: ``"dynamic"``, or the static scale.
    """

    weights: str
    functions: str
    masters: bool
    loss_scale: float | str


def read_levels(code: str) -> dict[str, Level]:
    """The levels of ``LEVELS`` in the source of ``ampcompat/amp/levels.py``, by name."""
    tree = ast.parse(code)
    assigned = [node for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "LEVELS"]
    (table,) = [node.value for node in assigned if isinstance(node.value, ast.Dict)]
    levels = {}
    for name, row in zip(table.keys, table.values, strict=True):
        if isinstance(name, ast.Constant) and isinstance(row, ast.Call):
            cells = {keyword.arg: _value(keyword.value) for keyword in row.keywords if keyword.arg is not None}
            levels[str(name.value)] = _level(cells)
    return levels


def _value(cell: ast.expr) -> object:
    """A literal, or the name of a dtype: ``torch.float16`` is ``"float16"``."""
    if isinstance(cell, ast.Constant):
        return cell.value
    return ast.unparse(cell).rpartition(".")[2]


def _level(cells: dict[str, object]) -> Level:
    functions = cells["patch_torch_functions_type"] if cells["patch_torch_functions"] else None
    scale = cells["loss_scale"]
    return Level(
        weights=str(cells["cast_model_type"] or ""),
        functions=str(functions or ""),
        masters=bool(cells["master_weights"]),
        loss_scale=scale if isinstance(scale, int | float) else str(scale),
    )


LEVELS = read_levels(TABLE.read_text("utf-8"))
