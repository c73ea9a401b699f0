"""Traps of half precision's range: float16 ends at 65504, and binary cross entropy of it is refused."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from ampcompat.tools.check.assigned import certain_value, value_above
from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.branches import is_not_half
from ampcompat.tools.check.findings import ERROR, WARNING
from ampcompat.tools.check.mistakes import Grade, Mistake
from ampcompat.tools.check.settings import Setting
from ampcompat.tools.check.source import Source, argument, called, number

LARGEST_HALF = 65504.0
#: Matrix products of two arguments, which O1 casts to half.
PRODUCTS = {"matmul", "bmm"}
#: Methods and functions that leave no half tensor, modules that know none, and the dtypes' names.
WIDENS = {"float", "double", "item", "cpu", "numpy", "to_float", "len"}
PLAIN_MODULES = {"np", "numpy", "math"}
WIDE = ("float32", "float64")
FIX = "use torch.finfo(x.dtype).min, or -1e4"


def _may_be_half(source: Source, node: ast.AST) -> bool:
    """Whether an expression may be a half tensor: it has a variable and nothing in it says float32 or numpy."""
    names = [name for name in source.within(node) if isinstance(name, ast.Name)]
    if not names or _has(source, node, _is_wide):
        return False
    return not any(_is_made_wide(source, name) for name in names)


def _is_made_wide(source: Source, name: ast.Name) -> bool:
    """Whether the last assignment above makes a name float32, in every case: ``scores = scores.float()``."""
    value = certain_value(source, name)
    if not isinstance(value, ast.Call):
        return False
    is_cast = called(value) == "to" and _has(source, value, _names_wide_dtype)
    return is_cast or called(value) in WIDENS


def _has(source: Source, node: ast.AST, wanted: Callable[[ast.AST], bool]) -> bool:
    """Whether a part of ``node``, or itself, is ``wanted``."""
    return any(map(wanted, source.within(node)))


def _words(node: ast.AST) -> str:
    """The name of a variable, an attribute or a keyword, or the text of a string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    word = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
    return word if isinstance(word, str) else ""


def _is_mask(node: ast.AST) -> bool:
    return "mask" in _words(node).lower()


def _is_wide(node: ast.AST) -> bool:
    """Whether a node says float32 or numpy."""
    if isinstance(node, ast.Call):
        return called(node) in WIDENS
    if isinstance(node, ast.Attribute) and _words(node.value) in PLAIN_MODULES:
        return True
    return _names_wide_dtype(node)


def _names_wide_dtype(node: ast.AST) -> bool:
    return any(dtype in _words(node) for dtype in WIDE)


def banned_cross_entropy(source: Source) -> Iterator[Mistake]:
    """``binary_cross_entropy`` / ``BCELoss`` on half inputs raises at O1: a sigmoid in half saturates to 0 and 1.

    ``BCEWithLogits`` computes both in float32. Or keep the sigmoid in float32 with
    ``amp.register_float_function(torch, "sigmoid")``.
    """
    if not source.imports("torch"):
        return
    note = (
        "raises when its input is half; use binary_cross_entropy_with_logits / BCEWithLogitsLoss without the "
        'sigmoid, or amp.register_float_function(torch, "sigmoid")'
    )
    for call in source.calls_named("BCELoss", "binary_cross_entropy"):
        if called(call) == "BCELoss":
            # Which loss is given what is not followed: a sigmoid somewhere makes it likely, no more.
            grade = WARNING
        elif call.args and _may_be_half(source, call.args[0]):
            grade = ERROR if _half_sigmoid(call.args[0]) else WARNING
        else:
            continue
        if not _casts_off(source, call):
            yield Mistake(call, note, _where_it_is_banned(grade))


def _where_it_is_banned(grade: str) -> Grade:
    """``grade`` where functions are cast and no sigmoid is kept in float32."""

    def grade_in(setting: Setting) -> str | None:
        return grade if setting.functions and not setting.float_sigmoid else None

    return grade_in


def _half_sigmoid(node: ast.AST) -> bool:
    """``torch.sigmoid(f(x))`` and ``f(x).sigmoid()``: nothing between the sigmoid and the loss."""
    return isinstance(node, ast.Call) and called(node) == "sigmoid"


def _casts_off(source: Source, node: ast.AST) -> bool:
    for parent in source.ancestors(node):
        if isinstance(parent, ast.With) and any(
            isinstance(i.context_expr, ast.Call) and called(i.context_expr) in ("disable_casts", "autocast")
            for i in parent.items
        ):
            return True
    return False


def overflowing_fill(source: Source) -> Iterator[Mistake]:
    """``scores.masked_fill(mask, -1e9)`` on half scores raises: float16 ends at 65504.

    ``scores + -1e9 * mask`` and ``scores[mask] = -1e9`` give -inf, and NaN after the softmax of a row of them. Use
    ``torch.finfo(scores.dtype).min``, or -1e4.
    """
    if not source.imports("torch"):
        return
    for call in source.calls_named("masked_fill", "masked_fill_"):
        value = argument(call, 1, "value")
        if not isinstance(call.func, ast.Attribute) or value is None or not _overflows(value):
            continue
        if is_not_half(source, call):
            continue
        filled = call.func.value
        if _may_be_half(source, filled):
            grade = _where_products_are_float16 if _is_product(source, filled) else _where_float16_is
            note = f"{ast.unparse(value)} does not fit float16 (largest: 65504) and raises there; {FIX}"
            yield Mistake(call, note, grade)
    nodes: Iterator[ast.Assign | ast.BinOp] = source.kind(ast.Assign, ast.BinOp)
    for node in nodes:
        number = _masked_with(source, node)
        if number is not None and not is_not_half(source, node):
            note = f"{ast.unparse(number)} is out of float16's range (65504); {FIX}"
            yield Mistake(node, note, _where_float16_is)


def _where_float16_is(setting: Setting) -> str | None:
    """A warning where weights or functions are cast to float16; bfloat16 has the range of float32."""
    return WARNING if "float16" in (setting.weights, setting.functions) else None


def _where_products_are_float16(setting: Setting) -> str | None:
    """An error where every matrix product is cast to float16."""
    return ERROR if setting.functions == "float16" else _where_float16_is(setting)


def _is_product(source: Source, node: ast.expr | None) -> bool:
    """Whether ``node`` is a matrix product, perhaps divided or multiplied, or a name that is given one just before."""
    while node is not None:
        if isinstance(node, ast.Name):
            node = value_above(source, node)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mult):
            node = node.left
        elif isinstance(node, ast.BinOp):
            return isinstance(node.op, ast.MatMult)
        else:
            return isinstance(node, ast.Call) and called(node) in PRODUCTS
    return False


def _masked_with(source: Source, node: ast.Assign | ast.BinOp) -> ast.expr | None:
    """The number beyond float16 in ``scores[mask] = -1e9`` or ``mask * -1e9``, where the other may be half."""
    if isinstance(node, ast.Assign):
        target, constant = node.targets[0], node.value
        if not isinstance(target, ast.Subscript) or not dotted(target.value):
            return None
        mask: ast.expr = target.slice
        other = target.value
    elif isinstance(node.op, ast.Mult):
        constant, mask = (node.right, node.left) if _overflows(node.right) else (node.left, node.right)
        other = mask
    else:
        return None
    meant = _overflows(constant) and _has(source, mask, _is_mask) and _may_be_half(source, other)
    return constant if meant else None


def _overflows(node: ast.AST | None) -> bool:
    value = number(node)
    return value is not None and LARGEST_HALF < abs(value) < float("inf")
