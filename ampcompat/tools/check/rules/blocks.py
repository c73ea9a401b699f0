"""The blocks of ``amp.scale_loss`` in a file, what comes after one, and what clips gradients."""

from __future__ import annotations

import ast
from typing import TypeAlias

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.conditions import contradict
from ampcompat.tools.check.source import Source, called, once

CLIPS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")
With: TypeAlias = ast.With | ast.AsyncWith


def is_clip(source: Source, call: ast.Call) -> bool:
    """Whether a call clips gradients, under whatever name the file imports the function."""
    imported = source.full_name(call.func).rpartition(".")[2]
    return bool(call.args) and (called(call) in CLIPS or imported in CLIPS)


@once
def blocks_by_function(source: Source) -> dict[ast.AST, list[With]]:
    """The ``scale_loss`` blocks of each function, in the order of lines."""
    found: dict[ast.AST, list[With]] = {}
    for block in sorted(source.scaled_blocks(), key=lambda block: block.lineno):
        found.setdefault(source.scope(block), []).append(block)
    return found


def ended_block(source: Source, node: ast.expr | ast.stmt) -> With | None:
    """The last block of its function that ends above ``node``, if one run can reach both."""
    blocks = blocks_by_function(source).get(source.scope(node), [])
    above = [block for block in blocks if block.lineno < node.lineno]
    if not above or above[-1] in source.ancestors(node) or contradict(source, above[-1], node):
        return None
    return above[-1]


def yielded(block: With) -> set[str]:
    """The names of what a block yields."""
    return {dotted(item.optional_vars) for item in block.items if item.optional_vars is not None} - {""}
