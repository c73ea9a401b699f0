"""What an expression tells of its dtype: whether it may be a half tensor, and whether it is a matrix product."""

from __future__ import annotations

import ast
from collections.abc import Callable

from ampcompat.tools.check.assigned import certain_value, value_above
from ampcompat.tools.check.settings import initializations
from ampcompat.tools.check.source import Source, called, number
from ampcompat.tools.check.traps.models import models_of

#: Matrix products of two arguments, which O1 casts to half.
PRODUCTS = {"matmul", "bmm"}
#: Methods and functions that leave no half tensor, modules that know none, and the dtypes' names.
WIDENS = {"float", "double", "item", "cpu", "numpy", "to_float", "len"}
WIDE = ("float32", "float64")
#: Methods that leave no floating tensor.
COUNTS = {"long", "int", "bool", "argmax"}
#: Functions of torch that make a tensor: of float32 or of integers, unless they are given a dtype.
FACTORIES = {"zeros", "ones", "empty", "full", "rand", "randn", "arange", "linspace", "eye", "tensor", "from_numpy"}
FACTORIES |= {"Tensor", "FloatTensor", "LongTensor", "randint", "randperm"}
#: Functions, and methods, that O1 runs in float32.
FLOAT_FUNCTIONS = {
    "softmax",
    "log_softmax",
    "exp",
    "log",
    "pow",
    "sum",
    "cumsum",
    "norm",
    "cross_entropy",
    "layer_norm",
}
#: What decides the dtype of its result, whatever it is called on.
DECIDE = {"half", "type", "type_as", *PRODUCTS, *COUNTS, *FACTORIES, *FLOAT_FUNCTIONS}


def may_be_half(source: Source, node: ast.expr) -> bool:
    """Whether an expression may be a half tensor: it has a variable and nothing tells that it has another dtype."""
    names = [name for name in source.within(node) if isinstance(name, ast.Name)]
    if not names or has(source, node, _is_wide) or _has_other_dtype(source, node):
        return False
    return not any(_is_made_wide(source, name) for name in names)


def has(source: Source, node: ast.AST, wanted: Callable[[ast.AST], bool]) -> bool:
    """Whether a part of ``node``, or itself, is ``wanted``."""
    return any(map(wanted, source.within(node)))


def words(node: ast.AST) -> str:
    """The name of a variable, an attribute or a keyword, or the text of a string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    word = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
    return word if isinstance(word, str) else ""


def names_half(dtype: ast.expr) -> bool:
    """Whether the name of a dtype is that of float16."""
    return words(dtype) in ("half", "float16")


def is_product(source: Source, node: ast.expr | None) -> bool:
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


def is_without_casts(source: Source, node: ast.AST) -> bool:
    """Whether ``node`` stands in a block that switches casts off."""
    for block in source.ancestors(node):
        entries = [item.context_expr for item in block.items] if isinstance(block, ast.With) else []
        if any(isinstance(entry, ast.Call) and called(entry) in ("disable_casts", "autocast") for entry in entries):
            return True
    return False


def _is_made_wide(source: Source, name: ast.Name) -> bool:
    """Whether the last assignment above makes a name float32, in every case: ``scores = scores.float()``.

    So does a sum with a float32 tensor, or a product of matrices.
    """
    value = certain_value(source, name)
    if isinstance(value, ast.Call):
        return _is_cast_to_float32(source, value) or called(value) in WIDENS
    terms = [value]
    for term in terms:  # grows on the way
        if isinstance(term, ast.Name):
            before = certain_value(source, term)
            terms += [before] if before not in terms else []
        elif isinstance(term, ast.BinOp) and isinstance(term.op, ast.Add | ast.Sub | ast.MatMult):
            terms += [term.left, term.right]
        elif isinstance(term, ast.Call) and _is_float32_tensor(source, term):
            return True
    return False


def _is_cast_to_float32(source: Source, call: ast.Call) -> bool:
    return called(call) == "to" and has(source, call, _names_wide_dtype)


def _is_float32_tensor(source: Source, call: ast.Call) -> bool:
    """Whether a call makes a float32 tensor, or an array: not a number, which leaves the other term its dtype."""
    is_method = isinstance(call.func, ast.Attribute) and called(call) in ("float", "double", "numpy")
    return is_method or _is_cast_to_float32(source, call) or _is_of_numpy(source, call)


def _is_wide(node: ast.AST) -> bool:
    """Whether a node says float32."""
    if isinstance(node, ast.Call):
        return called(node) in WIDENS
    return _names_wide_dtype(node)


def _names_wide_dtype(node: ast.AST) -> bool:
    return any(dtype in words(node) for dtype in WIDE)


def _has_other_dtype(source: Source, node: ast.expr) -> bool:
    """Whether a tensor comes from numpy, a factory without a half dtype, a comparison, or a method as ``long()``."""
    origin = _origin(source, node)
    if not isinstance(origin, ast.Call):
        return isinstance(origin, ast.Compare)
    if _is_of_numpy(source, origin):
        return True
    if called(origin) in FACTORIES and _is_of_torch(source, origin):
        return not any(keyword.arg == "dtype" and _may_name_half(keyword.value) for keyword in origin.keywords)
    return called(origin) in COUNTS


def is_compared_with_integer(source: Source, node: ast.expr) -> bool:
    """Whether a tensor is somewhere tested for a whole number above 1, as token ids are: ``ids == 102``."""
    origin = _origin(source, node)
    for compare in source.kind(ast.Compare):
        other = compare.comparators[0]
        is_test_for_equality = isinstance(compare.ops[0], ast.Eq | ast.NotEq)
        is_integer = isinstance(other, ast.Constant) and isinstance(other.value, int) and other.value > 1
        if is_test_for_equality and is_integer and _is_same_name(source, _origin(source, compare.left), origin):
            return True
    return False


def _is_same_name(source: Source, first: ast.expr, second: ast.expr) -> bool:
    """Whether two expressions are one name of a function, given the same."""
    if not isinstance(first, ast.Name) or not isinstance(second, ast.Name) or first.id != second.id:
        return False
    is_in_same_function = source.scope(first) is source.scope(second)
    return is_in_same_function and value_above(source, first) is value_above(source, second)


def is_output(source: Source, node: ast.expr) -> bool:
    """Whether a tensor is what a model that ``amp.initialize`` got returns, in the dtype that the level gives it."""
    origin = _origin(source, node)
    if not isinstance(origin, ast.Call) or not isinstance(origin.func, ast.Name):
        return False
    model = origin.func
    for call in initializations(source):
        if any(keyword.arg in (None, "cast_model_outputs") for keyword in call.keywords):
            continue
        is_same_model = source.scope(call) is source.scope(model) or not source.is_parameter(model.id, model)
        if is_same_model and model.id in models_of(source, call):
            return True
    return False


def is_float32_under_casts(source: Source, node: ast.expr) -> bool:
    """Whether a tensor comes from a function that O1 runs in float32."""
    origin = _origin(source, node)
    return isinstance(origin, ast.Call) and called(origin) in FLOAT_FUNCTIONS


def _origin(source: Source, node: ast.expr) -> ast.expr:
    """What an expression has its dtype from: ``torch.ones(n)`` of ``mask = torch.ones(n).triu()[None]``."""
    while True:
        before: ast.expr | None = None
        if isinstance(node, ast.Name):
            before = certain_value(source, node)
        elif isinstance(node, ast.Subscript):
            before = node.value
        elif isinstance(node, ast.BinOp):
            before = _beside_number(node)
        elif isinstance(node, ast.Call):
            before = _same_dtype(source, node)
        if before is None:
            return node
        node = before


def _beside_number(node: ast.BinOp) -> ast.expr | None:
    """The tensor that a number is added to or multiplied with; None where there are two tensors."""
    if number(node.left) is not None:
        return node.right
    return node.left if number(node.right) is not None else None


def _may_name_half(dtype: ast.expr) -> bool:
    """Whether a dtype is float16 by its name, or that of some tensor."""
    return names_half(dtype) or words(dtype) == "dtype"


def _same_dtype(source: Source, call: ast.Call) -> ast.expr | None:
    """The tensor whose dtype the result of a call has; None where that is not known."""
    is_cast = called(call) == "to" and not has(source, call, _names_device)
    if is_cast or called(call) in DECIDE or _is_of_numpy(source, call):
        return None
    if _is_of_torch(source, call):
        return call.args[0] if call.args else None
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def _names_device(node: ast.AST) -> bool:
    return any(device in words(node) for device in ("device", "cuda", "cpu"))


def _is_of_torch(source: Source, call: ast.Call) -> bool:
    return source.full_name(call.func).startswith("torch.")


def _is_of_numpy(source: Source, call: ast.Call) -> bool:
    return source.full_name(call.func).startswith("numpy.")
