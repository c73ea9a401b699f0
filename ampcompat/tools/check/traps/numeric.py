"""Traps of half precision's range: float16 holds 6e-8 to 65504, and binary cross entropy needs more than that."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.findings import ERROR, WARNING, Finding
from ampcompat.tools.check.halves import Halves
from ampcompat.tools.check.source import Source, argument, called, number, text
from ampcompat.tools.check.traps.repository import Repository

LARGEST_HALF = 65504.0
# Below half of the smallest subnormal a number rounds to zero.
VANISHES_BELOW = 2.0**-25
#: Methods and functions that leave no half tensor, modules that know none, and the dtypes' names.
WIDENS = {"float", "double", "item", "cpu", "numpy", "to_float", "len"}
PLAIN_MODULES = {"np", "numpy", "math"}
WIDE = ("float32", "float64")
NEEDS_GUARD = {"log", "log2", "log10", "sqrt", "rsqrt", "reciprocal"}
LIMITS = {"clamp", "clamp_", "clamp_min", "clamp_min_"}
FILLS = {"masked_fill": 1, "masked_fill_": 1}


def _may_be_half(source: Source, node: ast.AST) -> bool:
    """Whether an expression may be a half tensor: it has a variable and nothing in it says float32 or numpy."""
    return node in _holding(source, _is_variable) and node not in _holding(source, _is_wide)


def _holding(source: Source, wanted: Callable[[ast.AST], bool]) -> set[ast.AST]:
    """The nodes with a part, or that are one themselves, that ``wanted`` says is what is looked for."""
    key = ("holding", wanted)
    if key not in source.known:
        found: set[ast.AST] = set()
        for part in filter(wanted, source.nodes):
            node: ast.AST | None = part
            while node is not None and node not in found:
                found.add(node)
                node = source.parents.get(node)
        source.known[key] = found
    holding: set[ast.AST] = source.known[key]
    return holding


def _words(node: ast.AST) -> str:
    """The name of a variable, an attribute or a keyword, or the text of a string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    word = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
    return word if isinstance(word, str) else ""


def _is_variable(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


def _is_mask(node: ast.AST) -> bool:
    return "mask" in _words(node).lower()


def _is_wide(node: ast.AST) -> bool:
    """Whether a node says float32 or numpy."""
    if isinstance(node, ast.Call):
        return called(node) in WIDENS
    if isinstance(node, ast.Attribute) and _words(node.value) in PLAIN_MODULES:
        return True
    return any(dtype in _words(node) for dtype in WIDE)


def banned_cross_entropy(source: Source, repository: Repository) -> Iterator[Finding]:
    """``binary_cross_entropy`` / ``BCELoss`` on half inputs raises at O1: a sigmoid in half saturates to 0 and 1.

    ``BCEWithLogits`` computes both in float32. Or keep the sigmoid in float32 with
    ``amp.register_float_function(torch, "sigmoid")``.
    """
    if not repository.may_run_at("O1", "O4") or repository.float_sigmoid or not source.imports("torch"):
        return
    for call in source.calls_named("BCELoss", "binary_cross_entropy"):
        if called(call) == "BCELoss":
            # Which loss is given what is not followed: a sigmoid somewhere makes it likely, no more.
            level = WARNING
        elif call.args and _may_be_half(source, call.args[0]):
            level = ERROR if repository.runs_at("O1", "O4") and _half_sigmoid(call.args[0]) else WARNING
        else:
            continue
        if _casts_off(source, call):
            continue
        note = (
            "raises at O1 when its input is half; use binary_cross_entropy_with_logits / BCEWithLogitsLoss without the "
            'sigmoid, or amp.register_float_function(torch, "sigmoid")'
        )
        yield source.finding(call, "trap", "banned_cross_entropy", level, note)


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


def vanishing_constant(source: Source, repository: Repository) -> Iterator[Finding]:
    """An epsilon such as 1e-8 that guards a division, logarithm or root is exactly zero in float16.

    ``x / (norm + 1e-8)`` divides by zero where it was meant not to. Use 1e-6 or above (the smallest float16 is 6e-8,
    the smallest normal one 6e-5), or compute in ``x.float()``. Reported where the guarded value is shown to be half.
    """
    if not source.imports("torch"):
        return
    halves = Halves(source, repository.casts, repository.keeps_half)
    for node in source.kind(ast.BinOp, ast.Call):
        constant: ast.AST | None = None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and _guards(source, node):
            constant = next((side for side in (node.right, node.left) if _vanishes(side)), None)
            if constant is None or not halves.of(node.left if constant is node.right else node.right):
                continue
        elif isinstance(node, ast.Call) and called(node) in LIMITS:
            given = [k.value for k in node.keywords if k.arg == "min"] + node.args
            constant = next((value for value in given if _vanishes(value)), None)
            function = (dotted(node.func) or "").startswith("torch.") and node.args
            if constant is None or not halves.of(node.args[0] if function else getattr(node.func, "value", node)):
                continue
        if constant is not None:
            value = ast.unparse(constant)
            note = f"{value} is 0 in float16 (smallest: 6e-8) and guards nothing; use 1e-6 or more, or .float() first"
            yield source.finding(constant, "trap", "vanishing_constant", WARNING, note)


def _vanishes(node: ast.AST) -> bool:
    value = number(node)
    return value is not None and 0 < abs(value) < VANISHES_BELOW


def _guards(source: Source, node: ast.BinOp) -> bool:
    parent = source.parents.get(node)
    if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Div):
        return parent.right is node
    if not isinstance(parent, ast.Call):
        return False
    # torch.log(x + 1e-8), or (x + 1e-8).log() through an attribute.
    return called(parent) in NEEDS_GUARD and parent.func not in _holding(source, _is_wide)


def overflowing_fill(source: Source, repository: Repository) -> Iterator[Finding]:
    """``scores.masked_fill(mask, -1e9)`` on half scores raises: float16 ends at 65504.

    ``scores + -1e9 * mask`` and ``scores[mask] = -1e9`` give -inf, and NaN after the softmax of a row of them. Use
    ``torch.finfo(scores.dtype).min``, or -1e4.
    """
    if not source.imports("torch"):
        return
    fix = "use torch.finfo(x.dtype).min, or -1e4"
    halves = Halves(source, repository.casts, repository.keeps_half)
    for node in source.kind(ast.Call, ast.Assign, ast.BinOp):
        if isinstance(node, ast.Call) and called(node) in FILLS and isinstance(node.func, ast.Attribute):
            value = argument(node, FILLS[called(node)], "value")
            if value is not None and _overflows(value) and _may_be_half(source, node.func.value):
                # Shown to be half it raises; else it may be.
                level = ERROR if halves.of(node.func.value) else WARNING
                note = f"{ast.unparse(value)} does not fit float16 (largest: 65504) and raises there; {fix}"
                yield source.finding(node, "trap", "overflowing_fill", level, note)
        elif isinstance(node, ast.Assign) and _overflows(node.value) and isinstance(node.targets[0], ast.Subscript):
            target = node.targets[0]
            if target.slice in _holding(source, _is_mask) and text(target.value) and _may_be_half(source, target.value):
                note = f"{ast.unparse(node.value)} is out of float16's range (65504); {fix}"
                yield source.finding(node, "trap", "overflowing_fill", WARNING, note)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            constant, other = (node.right, node.left) if _overflows(node.right) else (node.left, node.right)
            if _overflows(constant) and other in _holding(source, _is_mask) and _may_be_half(source, other):
                note = f"{ast.unparse(constant)} is out of float16's range (65504); {fix}"
                yield source.finding(node, "trap", "overflowing_fill", WARNING, note)


def _overflows(node: ast.AST | None) -> bool:
    value = number(node)
    return value is not None and LARGEST_HALF < abs(value) < float("inf")
