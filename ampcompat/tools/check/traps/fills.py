"""The trap of fill values beyond half precision's range: float16 ends at 65504."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ampcompat.tools.check.assigned import value_above
from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.branches import is_not_half
from ampcompat.tools.check.calls import class_around
from ampcompat.tools.check.findings import ERROR, WARNING
from ampcompat.tools.check.mistakes import Grade, Mistake
from ampcompat.tools.check.settings import Setting
from ampcompat.tools.check.source import Source, argument, called, number
from ampcompat.tools.check.traps.half import (
    has,
    is_compared_with_integer,
    is_float32_under_casts,
    is_output,
    is_product,
    is_without_casts,
    may_be_half,
    names_half,
    words,
)
from ampcompat.tools.check.values import given_values, values_of

LARGEST_HALF = 65504.0
LARGEST_FLOAT = 3.4e38
FLOAT32 = ("float", "float32")
#: Where the fill values stand in each function of torch, after the tensor, which is the first argument. Methods, which
#: have one argument less, and those that end in ``_`` are the same. Half tensors refuse what is out of range.
REFUSED: Mapping[str, Mapping[str, int]] = {
    "masked_fill": {"value": 2},
    "index_fill": {"value": 3},
    "scatter": {"value": 3},
    "fill": {"value": 1},
    "fill_diagonal": {"fill_value": 1},
    "full": {"fill_value": 1},
    "full_like": {"fill_value": 1},
    "new_full": {"fill_value": 2},
    "pad": {"value": 3},
    "pad_sequence": {"padding_value": 2},
    "clamp": {"min": 1, "max": 2},
    "clamp_min": {"min": 1},
    "clamp_max": {"max": 1},
    "clip": {"min": 1, "max": 2},
    "threshold": {"value": 2},
    "hardtanh": {"min_val": 1, "max_val": 2},
}
#: Functions in which a value out of range becomes inf, or, with older torch, is refused by some.
INFINITE: Mapping[str, Mapping[str, int]] = {
    "nan_to_num": {"nan": 1, "posinf": 2, "neginf": 3},
    "new_tensor": {"data": 1},
    "tensor": {"data": 0},
    "scalar_tensor": {"s": 0},
    "where": {"other": 2},
}
#: Functions that are given no tensor: what they make is float32 without a dtype.
MAKES_TENSOR = ("full", "tensor", "scalar_tensor")


class Fill(NamedTuple):
    """A value that is written into a tensor.

    Attributes:
        node: Where.
        value: The value.
        tensor: The tensor, or another one that has its dtype; the dtype itself where that is named.
        is_refused: Whether a half tensor refuses what is out of range with every torch; else it may become inf.
    """

    node: ast.Call | ast.Assign | ast.AugAssign | ast.BinOp
    value: ast.expr
    tensor: ast.expr
    is_refused: bool


def overflowing_fill(source: Source) -> Iterator[Mistake]:
    """``scores.masked_fill(mask, -1e9)`` on half scores raises: float16 ends at 65504.

    ``scores + -1e9 * mask`` gives -inf, and NaN after the softmax of a row of them; so does ``scores[mask] = -1e9``
    where torch does not refuse it. Use ``torch.finfo(scores.dtype).min``, or -1e4.
    """
    if not source.imports("torch"):
        return
    for fill in (*_in_calls(source), *_in_items(source), *_in_products_with_masks(source)):
        is_half = names_half(fill.tensor) or may_be_half(source, fill.tensor)
        if is_half and not _is_of_integers(source, fill) and not is_not_half(source, fill.node):
            yield Mistake(fill.node, _note(source, fill), _grade(source, fill))


def _is_of_integers(source: Source, fill: Fill) -> bool:
    is_integer = isinstance(fill.value, ast.Constant) and isinstance(fill.value.value, int)
    return is_integer and is_compared_with_integer(source, fill.tensor)


def _note(source: Source, fill: Fill) -> str:
    what = "does not fit float16 (largest: 65504) and raises there"
    if not fill.is_refused:
        what = "is out of float16's range (65504) and becomes inf there, or raises"
    is_negative = (_number(source, fill.value) or 0.0) < 0
    fix = "torch.finfo(x.dtype).min, or -1e4" if is_negative else "torch.finfo(x.dtype).max, or 1e4"
    return f"{ast.unparse(fill.value)} {what}; use {fix}"


def _grade(source: Source, fill: Fill) -> Grade:
    if is_without_casts(source, fill.node) or is_float32_under_casts(source, fill.tensor):
        return _where_weights_are_float16
    if is_output(source, fill.tensor):
        return _where_outputs_are_float16
    if fill.is_refused and is_product(source, fill.tensor):
        return _where_products_are_float16
    return _where_float16_is


def _where_float16_is(setting: Setting) -> str | None:
    """A warning where weights or functions are cast to float16; bfloat16 has the range of float32."""
    return WARNING if "float16" in (setting.weights, setting.functions) else None


def _where_weights_are_float16(setting: Setting) -> str | None:
    """A warning where functions are not cast: the softmax of half scores is half there."""
    return _where_float16_is(setting) if not setting.functions else None


def _where_outputs_are_float16(setting: Setting) -> str | None:
    """A warning where outputs may be half: a model with half weights returns float32."""
    return _where_float16_is(setting) if not setting.weights else None


def _where_products_are_float16(setting: Setting) -> str | None:
    """An error where every matrix product is cast to float16."""
    return ERROR if setting.functions == "float16" else _where_float16_is(setting)


# -- the value ---------------------------------------------------------------------------------------------------------
def _overflows(source: Source, node: ast.expr | None) -> bool:
    value = None if node is None else _number(source, node)
    return value is not None and LARGEST_HALF < abs(value) < float("inf")


def _number(source: Source, node: ast.expr) -> float | None:
    """What a fill value is: a literal, a name that is given one, a parameter's default, or a limit of float32."""
    limit = _float32_limit(node)
    if limit is not None:
        return limit
    if isinstance(node, ast.Attribute):
        node = _kept_by_class(source, node) or node
    default = source.default_of(node.id, node) if isinstance(node, ast.Name) else None
    if default is not None:
        return number(default)
    given = values_of(source, node)
    usual = given.usual
    return number(ast.Constant(usual)) if isinstance(usual, int | float) and not given.is_open else None


def _kept_by_class(source: Source, node: ast.Attribute) -> ast.expr | None:
    """What a class gives an attribute: ``self.low = low`` of one method, or else ``low = -1e9`` of its body."""
    kept = given_values(source).get(dotted(node), [])
    if kept:
        return kept[0] if len(kept) == 1 else None
    owner = dotted(node.value)
    named = [found for found in source.kind(ast.ClassDef) if found.name == owner]
    classes = [class_around(source, node)] if owner == "self" else named
    statements = [statement for found in classes if found is not None for statement in found.body]
    assigned = [statement for statement in statements if isinstance(statement, ast.Assign)]
    constants = [statement.value for statement in assigned if node.attr in map(dotted, statement.targets)]
    return constants[0] if len(constants) == 1 else None


def _float32_limit(node: ast.expr) -> float | None:
    """What ``torch.finfo(torch.float32).min`` or ``.max`` is; None for anything else."""
    limits = {"min": -LARGEST_FLOAT, "max": LARGEST_FLOAT}
    if not isinstance(node, ast.Attribute) or node.attr not in limits or not isinstance(node.value, ast.Call):
        return None
    call = node.value
    is_of_float32 = called(call) == "finfo" and bool(call.args) and words(call.args[0]) in FLOAT32
    return limits[node.attr] if is_of_float32 else None


# -- where fill values stand -------------------------------------------------------------------------------------------
def _in_calls(source: Source) -> Iterator[Fill]:
    for call in source.calls:
        name = called(call).removesuffix("_")
        places = REFUSED.get(name) or INFINITE.get(name)
        if places is None:
            continue
        function = source.full_name(call.func)
        is_function = function.startswith("torch.")
        if function and not is_function:
            continue
        if name == "where" and is_function:
            yield from _in_where(source, call)
            continue
        tensor = _tensor_of(call, name, is_function)
        if tensor is None:
            continue
        values = [argument(call, at if is_function else at - 1, keyword) for keyword, at in places.items()]
        for value in values:
            if value is not None and _overflows(source, value):
                yield Fill(call, value, tensor, name in REFUSED)
                break


def _tensor_of(call: ast.Call, name: str, is_function: bool) -> ast.expr | None:
    """The tensor that a call fills, or that has the dtype of what it makes; None for none."""
    dtype = next((keyword.value for keyword in call.keywords if keyword.arg == "dtype"), None)
    if isinstance(dtype, ast.Attribute) and dtype.attr == "dtype":
        return dtype.value
    if dtype is not None:
        return dtype if names_half(dtype) else None
    if is_function:
        return None if name in MAKES_TENSOR else argument(call, 0, "input")
    if isinstance(call.func, ast.Attribute) and dotted(call.func.value) != "self" and name not in MAKES_TENSOR:
        return call.func.value
    return None


def _in_where(source: Source, call: ast.Call) -> Iterator[Fill]:
    """The fills of ``torch.where(mask, scores, -1e9)``, on either side."""
    first, second = argument(call, 1, "input"), argument(call, 2, "other")
    for value, tensor in ((first, second), (second, first)):
        if value is not None and tensor is not None and _overflows(source, value):
            yield Fill(call, value, tensor, is_refused=False)


def _in_items(source: Source) -> Iterator[Fill]:
    """``scores[mask] = -1e9``."""
    nodes: Iterator[ast.Assign | ast.AugAssign] = source.kind(ast.Assign, ast.AugAssign)
    for node in nodes:
        target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
        if not isinstance(target, ast.Subscript) or not dotted(target.value) or not _overflows(source, node.value):
            continue
        if _is_tensor(source, target.value) or _is_mask(source, target.slice):
            yield Fill(node, node.value, target.value, is_refused=False)


def _is_tensor(source: Source, node: ast.expr) -> bool:
    """Whether ``node`` is given to ``forward``, or the last assignment above makes it half, or a module's result."""
    is_given = isinstance(node, ast.Name) and source.is_parameter(node.id, node)
    if is_product(source, node) or (is_given and getattr(source.scope(node), "name", "") == "forward"):
        return True
    value = value_above(source, node) if isinstance(node, ast.Name) else None
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if called(value) == "half" or dotted(value.func.value) == "self":
            return True
        value = value.func.value
    return False


def _is_mask(source: Source, index: ast.expr) -> bool:
    """Whether an index is a mask, by its name, or as what a comparison gives."""
    if has(source, index, _is_called_mask):
        return True
    value = value_above(source, index) if isinstance(index, ast.Name) else index
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    return any(isinstance(part, ast.Compare) or _is_inverted(part) for part in parts)


def _is_called_mask(node: ast.AST) -> bool:
    return "mask" in words(node).lower()


def _is_inverted(node: ast.expr | None) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert)


def _in_products_with_masks(source: Source) -> Iterator[Fill]:
    """``scores + mask * -1e9``."""
    for node in source.kind(ast.BinOp):
        if isinstance(node.op, ast.Mult):
            for value, mask in ((node.right, node.left), (node.left, node.right)):
                is_mask = has(source, mask, _is_called_mask) or _is_inverted_mask(source, mask)
                if is_mask and _overflows(source, value):
                    yield Fill(node, value, mask, is_refused=False)


def _is_inverted_mask(source: Source, node: ast.expr) -> bool:
    """Whether an expression is ``1 - m.to(scores.dtype)``: a mask in the dtype of another tensor."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub) or number(node.left) != 1:
        return False
    return has(source, node.right, _is_cast_like_a_tensor)


def _is_cast_like_a_tensor(node: ast.AST) -> bool:
    """Whether a node is ``m.to(scores.dtype)``, or ``m.to(dtype=scores.dtype)``."""
    if not isinstance(node, ast.Call) or called(node) != "to":
        return False
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    return any(isinstance(value, ast.Attribute) and value.attr == "dtype" for value in given)
