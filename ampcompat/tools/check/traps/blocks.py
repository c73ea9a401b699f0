"""The blocks of ``amp.scale_loss`` in a file, and what comes after one."""

from __future__ import annotations

import ast
import bisect
from typing import TypeAlias

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.branches import contradict
from ampcompat.tools.check.source import Source, called, once

CLIPS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")
With: TypeAlias = ast.With | ast.AsyncWith


@once
def clips(source: Source) -> list[ast.Call]:
    """The calls that clip gradients, under whatever name the file imports the function."""
    return [call for call in source.calls if is_clip(source, call)]


def is_clip(source: Source, call: ast.Call) -> bool:
    """Whether a call clips gradients."""
    imported = source.full_name(call.func).rpartition(".")[2]
    return called(call) in CLIPS or imported in CLIPS


def follows_a_block(source: Source, node: ast.expr | ast.stmt) -> bool:
    """Whether ``node`` runs after a ``scale_loss`` block of its function, outside of it."""
    block = block_above(blocks_by_function(source).get(source.scope(node), []), node)
    return block is not None and block not in source.ancestors(node) and not contradict(source, block, node)


@once
def blocks_by_function(source: Source) -> dict[ast.AST, list[With]]:
    """The ``scale_loss`` blocks of each function, in the order of lines."""
    found: dict[ast.AST, list[With]] = {}
    for block in sorted(source.scaled_blocks(), key=lambda block: block.lineno):
        found.setdefault(source.scope(block), []).append(block)
    return found


def block_above(blocks: list[With], node: ast.expr | ast.stmt) -> With | None:
    """The last of ``blocks`` that begins above ``node``."""
    above = bisect.bisect_left(blocks, node.lineno, key=lambda block: block.lineno)
    return blocks[above - 1] if above else None


def yielded(block: With) -> set[str]:
    """The names of what a block yields."""
    return {dotted(item.optional_vars) for item in block.items if item.optional_vars is not None} - {""}
