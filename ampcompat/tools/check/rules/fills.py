"""The rule of a fill that half precision does not hold: float16 ends at 65504."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.conditions import asks_for_precision
from ampcompat.tools.check.rules.rule import Hit
from ampcompat.tools.check.source import Source, argument, called, number

LARGEST_HALF = 65504.0
LARGEST_FLOAT = 3.4e38
#: Products of matrices, which O1 casts to half, and methods that change nothing but a tensor's shape.
PRODUCTS = ("matmul", "bmm", "einsum")
SHAPES = ("view", "reshape", "transpose", "permute", "contiguous", "squeeze", "unsqueeze")
#: Blocks in which casts are off.
WITHOUT_CASTS = ("disable_casts", "autocast")


def overflowing_fill(source: Source) -> Iterator[Hit]:
    """``torch.matmul(query, key).masked_fill(mask, -1e9)`` raises where the product is half."""
    for call in source.calls_named("masked_fill", "masked_fill_"):
        is_method = isinstance(call.func, ast.Attribute) and not source.full_name(call.func).startswith("torch.")
        tensor = call.func.value if is_method and isinstance(call.func, ast.Attribute) else argument(call, 0, "input")
        value = argument(call, 1 if is_method else 2, "value")
        size = _size(source, value)
        if value is None or size is None or not LARGEST_HALF < abs(size) < LARGEST_FLOAT:
            continue
        if _is_product(source, tensor) and not _is_deliberate(source, call):
            fix = "torch.finfo(x.dtype).min, or -1e4" if size < 0 else "torch.finfo(x.dtype).max, or 1e4"
            note = f"{ast.unparse(value)} does not fit float16 (largest: 65504) and raises there; use {fix}"
            yield Hit(call, note, is_certain=False)


def _size(source: Source, value: ast.expr | None) -> float | None:
    """The number that a value is: a literal, or a name that the file gives one literal."""
    given = source.assigned.get(dotted(value), [])
    return number(given[0] if len(given) == 1 else value)


def _is_product(source: Source, node: ast.expr | None) -> bool:
    """Whether a tensor is a product of matrices, perhaps divided or multiplied: of another sum it may be float32."""
    for _ in range(10):  # a name may be given itself
        if isinstance(node, ast.Name):
            node = source.value_above(node)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
            node = node.left
        elif isinstance(node, ast.BinOp):
            return isinstance(node.op, ast.MatMult)
        elif isinstance(node, ast.Call) and called(node) in SHAPES and isinstance(node.func, ast.Attribute):
            node = node.func.value
        else:
            return isinstance(node, ast.Call) and called(node) in PRODUCTS
    return False


def _is_deliberate(source: Source, call: ast.Call) -> bool:
    """Whether a test of the precision, or a block without casts, is around a call."""
    for block in source.ancestors(call):
        entries = [item.context_expr for item in block.items] if isinstance(block, ast.With) else []
        if any(isinstance(entry, ast.Call) and called(entry) in WITHOUT_CASTS for entry in entries):
            return True
    return asks_for_precision(source, call)
