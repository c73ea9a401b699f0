"""The trap of binary cross entropy of half inputs, which amp refuses."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat.tools.check.findings import ERROR, WARNING
from ampcompat.tools.check.mistakes import Grade, Mistake
from ampcompat.tools.check.settings import Setting
from ampcompat.tools.check.source import Source, called
from ampcompat.tools.check.traps.half import is_without_casts, may_be_half


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
        elif call.args and may_be_half(source, call.args[0]):
            grade = ERROR if _half_sigmoid(call.args[0]) else WARNING
        else:
            continue
        if not is_without_casts(source, call):
            yield Mistake(call, note, _where_it_is_banned(grade))


def _where_it_is_banned(grade: str) -> Grade:
    """``grade`` where functions are cast and no sigmoid is kept in float32."""

    def grade_in(setting: Setting) -> str | None:
        return grade if setting.functions and not setting.float_sigmoid else None

    return grade_in


def _half_sigmoid(node: ast.AST) -> bool:
    """``torch.sigmoid(f(x))`` and ``f(x).sigmoid()``: nothing between the sigmoid and the loss."""
    return isinstance(node, ast.Call) and called(node) == "sigmoid"
