"""Traps of half precision's range: float16 holds 6e-8 to 65504, and binary cross entropy needs more than that."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampcompat.check.bindings import dotted
from ampcompat.check.findings import ERROR, WARNING, Finding
from ampcompat.check.halves import Halves
from ampcompat.check.source import Source, argument, called, number, text
from ampcompat.check.traps.repository import Repository

# What the text of a file must have for one of these traps to be in it: a search costs less than a look at each node.
# Each with the plain text that it begins with, which is searched for first.
SMALL = {begin: re.compile(f"{re.escape(begin)}0*(?:[89]|[1-9]\\d)") for begin in ("e-", "E-")}
SMALL[".0000000"] = re.compile(r"\.0{7}")
LARGE = re.compile(r"[\d.][eE]\+?0*(?:[4-9]|[1-9]\d)|\d[\d_]{4}")
LITERAL = re.compile(r"(?:\d[\d_]*\.?[\d_]*|\.[\d_]+)(?:[eE][+-]?\d[\d_]*)?")
MASKS = ("mask", "Mask", "MASK")
#: How far from the literal, in characters, the mask of an expression is looked for.
NEAR = 1000
#: Characters of a literal before its last five digits that are looked at.
LONGEST = 300
FILL = re.compile(r"\.\s*masked_fill_?\s*\(")
LOSSES = {name: re.compile(rf"{name}\s*\(") for name in ("BCELoss", "binary_cross_entropy")}
BRACKET = re.compile(r"[()]")
BRACKETS = re.compile(r"[][(){}]")
BLANKS = " \t\r\n\f\\"
MINIMUM = re.compile(r"\bmin\s*=\Z")
IMPORTS_TORCH = re.compile(r"\bimport\b(?:[^\n\\]|\\\s)*\btorch\b|\bfrom\s+torch\b")
LARGEST_HALF = 65504.0
# Below half of the smallest subnormal a number rounds to zero.
VANISHES_BELOW = 2.0**-25
FLOAT32 = re.compile(r"\.(float|double|item|cpu|numpy|to_float)\(|float32|float64|\b(np|numpy|math)\.|\b(float|len)\(")
NEEDS_GUARD = {"log", "log2", "log10", "sqrt", "rsqrt", "reciprocal"}
LIMITS = {"clamp", "clamp_", "clamp_min", "clamp_min_"}
#: What stands before the bracket around a guard: a division, or a call.
GUARDED = re.compile(rf"(?:/|\b(?:{'|'.join(sorted(NEEDS_GUARD | LIMITS))}))\Z")
FILLS = {"masked_fill": 1, "masked_fill_": 1}


def _may_be_half(node: ast.AST) -> bool:
    """Whether an expression may be a half tensor: it has a variable and nothing in it says float32 or numpy."""
    names = any(isinstance(n, ast.Name) for n in ast.walk(node))
    return names and FLOAT32.search(ast.unparse(node)) is None


def has_large_fill(code: str) -> bool:
    """Whether a text may hold an overflowing fill."""
    for fill in FILL.finditer(code) if "masked_fill" in code else ():
        if any(_is_too_large(code, found) for found in LARGE.finditer(code, fill.end(), _end(code, fill.end()))):
            return True
    return any(
        (_is_operand(code, found, "*") or _is_stored(code, found))
        and not _is_comment(code, found.start())
        and _is_too_large(code, found)
        for start, end in _around_masks(code)
        for found in LARGE.finditer(code, start, end)
    )


def _around_masks(code: str) -> Iterator[tuple[int, int]]:
    """The stretches of a text that are near a mask: tables of numbers are long, and have none."""
    for word in MASKS:
        end, at = 0, code.find(word)
        while at >= 0:
            start, end = max(end, at - NEAR), at + 2 * NEAR
            yield start, end
            at = code.find(word, end - NEAR)


def _is_too_large(code: str, found: re.Match[str]) -> bool:
    """Whether the literal that ``found`` is a part of may be out of float16's range."""
    left = code[max(0, found.start() - LONGEST) : found.start()]
    before = left.rstrip("0123456789._")
    literal = LITERAL.match(code, found.start() - len(left) + len(before))
    # The end of a name, of a hexadecimal number, of a number that goes on for lines.
    if literal is None or before[-1:].isalnum() or len(left) - len(before) == LONGEST:
        return True
    return LARGEST_HALF < float(literal[0].replace("_", "")) < float("inf")


def has_small_guard(code: str) -> bool:
    """Whether a text may hold a vanishing epsilon that guards something, or is a limit."""
    found = (match for begin, small in SMALL.items() if begin in code for match in small.finditer(code))
    return any(_may_guard(code, literal) for literal in found)


def _may_guard(code: str, literal: re.Match[str]) -> bool:
    """Whether the innermost brackets around a literal may be those of a divisor, or of a call that needs a guard."""
    at = literal.start()
    before = code[max(0, at - LONGEST) : at].rstrip("0123456789._").rstrip(BLANKS)
    follows = "#" in before.rpartition("\n")[2] or before[-1:] in (*"+-(,",) or MINIMUM.search(before) is not None
    if not follows or _is_comment(code, at):
        return False
    start, depth = max(0, at - 2 * NEAR), 0
    for bracket in reversed(list(BRACKETS.finditer(code, start, at))):
        depth += 1 if bracket[0] in ")]}" else -1
        if depth >= 0:
            continue
        if any(mark in code[bracket.start() : at] for mark in "\"'#"):
            return True  # a bracket may be in a string or a comment
        before = code[max(0, bracket.start() - 200) : bracket.start()].rstrip(BLANKS)
        if bracket[0] != "(":
            return False
        if GUARDED.search(before) or "#" in before.rpartition("\n")[2]:
            return True
        if before[-1:].isalnum() or before[-1:] in ("_", ")", "]"):
            return False  # a call of something else
        depth = 0  # the brackets may be redundant
    return "clamp" in code[start:at] or _is_operand(code, literal, "+-")


def _is_comment(code: str, at: int) -> bool:
    """Whether a place of a text is shown to be in a comment (or in a string that began on an earlier line)."""
    before = code[max(code.rfind("\n", 0, at), code.rfind("\r", 0, at)) + 1 : at]
    return "#" in before and not any(mark in before for mark in "\"'{")


def _end(code: str, start: int) -> int:
    """Find where a call's arguments end, which begin behind its bracket."""
    depth = 1
    for found in BRACKET.finditer(code, start):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    return len(code)


def _is_operand(code: str, literal: re.Match[str], operators: str) -> bool:
    """Whether one of ``operators`` may stand before or behind a literal, brackets, signs and comments aside."""
    left = code[max(0, literal.start() - 200) : literal.start()].rstrip("0123456789._")
    signs = "" if "-" in operators else "+-"
    left = left.rstrip(f" \t\r\n\f\\({signs}")
    right = code[literal.end() : literal.end() + 200].lstrip("0123456789_ \t\r\n\f\\)")
    # A comment, or more space than was looked through: it may.
    return left[-1:] in operators or right[:1] in f"{operators}#" or "#" in left.rpartition("\n")[2]


def _is_stored(code: str, literal: re.Match[str]) -> bool:
    """Whether a literal may be assigned to an element: ``x[mask] = -1e9``."""
    left = code[max(0, literal.start() - 200) : literal.start()].rstrip("0123456789._ \t\r\n\f\\(+-")
    return left.endswith("=") and left[:-1].rstrip().endswith("]")


def may_hold_one(code: str) -> bool:
    """Whether a text may hold one of these traps."""
    if "torch" not in code:
        return False
    if "import torch" not in code and "from torch" not in code and IMPORTS_TORCH.search(code) is None:
        return False
    return has_large_fill(code) or _has_loss(code) or has_small_guard(code)


def _has_loss(code: str) -> bool:
    found = (match.start() for name, loss in LOSSES.items() if name in code for match in loss.finditer(code))
    # Not by \b in the patterns: they are searched for faster where they begin with plain text.
    return any(at == 0 or not (code[at - 1].isalnum() or code[at - 1] == "_") for at in found)


def banned_cross_entropy(source: Source, repository: Repository) -> Iterator[Finding]:
    """``binary_cross_entropy`` / ``BCELoss`` on half inputs raises at O1: a sigmoid in half saturates to 0 and 1.

    ``BCEWithLogits`` computes both in float32. Or keep the sigmoid in float32 with
    ``amp.register_float_function(torch, "sigmoid")``.
    """
    if not _has_loss(source.code):
        return
    if not repository.may_run_at("O1", "O4") or repository.float_sigmoid or not source.imports("torch"):
        return
    for call in source.calls:
        if called(call) == "BCELoss":
            # Which loss is given what is not followed: a sigmoid somewhere makes it likely, no more.
            level = WARNING
        elif called(call) == "binary_cross_entropy" and call.args and _may_be_half(call.args[0]):
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
    if not has_small_guard(source.code) or not source.imports("torch"):
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
    return called(parent) in NEEDS_GUARD and FLOAT32.search(ast.unparse(parent.func)) is None


def overflowing_fill(source: Source, repository: Repository) -> Iterator[Finding]:
    """``scores.masked_fill(mask, -1e9)`` on half scores raises: float16 ends at 65504.

    ``scores + -1e9 * mask`` and ``scores[mask] = -1e9`` give -inf, and NaN after the softmax of a row of them. Use
    ``torch.finfo(scores.dtype).min``, or -1e4.
    """
    if not has_large_fill(source.code) or not source.imports("torch"):
        return
    fix = "use torch.finfo(x.dtype).min, or -1e4"
    halves = Halves(source, repository.casts, repository.keeps_half)
    for node in source.kind(ast.Call, ast.Assign, ast.BinOp):
        if isinstance(node, ast.Call) and called(node) in FILLS and isinstance(node.func, ast.Attribute):
            value = argument(node, FILLS[called(node)], "value")
            if value is not None and _overflows(value) and _may_be_half(node.func.value):
                # Shown to be half it raises; else it may be.
                level = ERROR if halves.of(node.func.value) else WARNING
                note = f"{ast.unparse(value)} does not fit float16 (largest: 65504) and raises there; {fix}"
                yield source.finding(node, "trap", "overflowing_fill", level, note)
        elif isinstance(node, ast.Assign) and _overflows(node.value) and isinstance(node.targets[0], ast.Subscript):
            target = node.targets[0]
            index_is_mask = "mask" in ast.unparse(target.slice).lower()
            if index_is_mask and text(target.value) and _may_be_half(target.value):
                note = f"{ast.unparse(node.value)} is out of float16's range (65504); {fix}"
                yield source.finding(node, "trap", "overflowing_fill", WARNING, note)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            constant, other = (node.right, node.left) if _overflows(node.right) else (node.left, node.right)
            if _overflows(constant) and "mask" in ast.unparse(other).lower() and _may_be_half(other):
                note = f"{ast.unparse(constant)} is out of float16's range (65504); {fix}"
                yield source.finding(node, "trap", "overflowing_fill", WARNING, note)


def _overflows(node: ast.AST | None) -> bool:
    value = number(node)
    return value is not None and LARGEST_HALF < abs(value) < float("inf")
