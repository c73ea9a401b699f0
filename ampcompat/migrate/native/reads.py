"""Find reads of ``p.grad`` by hand: between backward and step apex had unscaled it, GradScaler has not."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from ampcompat.check.bindings import Bindings
from ampcompat.migrate.casts import READS_GRADIENTS, READS_NONE
from ampcompat.migrate.marks import code_of
from ampcompat.migrate.native.patterns import contains_scaled

# Followed for the optimizer whose parameters they are given.
CLIPS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")
# What empties a gradient does not read it.
EMPTYING = ("zero_", "detach_", "requires_grad_")


def _holds_gradients(given: cst.BaseExpression) -> bool:
    """Whether an argument may be a model, an optimizer or their parameters."""
    return re.search(r"param|model|net|optim|opt\b", code_of(given), re.IGNORECASE) is not None


class _Reads(cst.CSTVisitor):
    """Whether a node reads a ``.grad``, or calls a function of the file that does."""

    def __init__(self, readers: set[str]) -> None:
        self.readers = readers
        self.found = False

    def visit_Call(self, node: cst.Call) -> bool:
        called = code_of(node.func).rpartition(".")[2]
        by_name = READS_GRADIENTS.search(called) and not READS_NONE.search(called) and called not in (*EMPTYING, *CLIPS)
        self.found |= called in self.readers or (bool(by_name) and any(_holds_gradients(a.value) for a in node.args))
        if called == "grad" or (called in EMPTYING and isinstance(node.func, cst.Attribute)):
            for argument in node.args:  # torch.autograd.grad(...), p.grad.zero_()
                argument.visit(self)
            return False
        return True

    def visit_Comparison(self, node: cst.Comparison) -> bool:
        return not all(isinstance(part.operator, cst.Is | cst.IsNot) for part in node.comparisons)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:
        return not (isinstance(node.target, cst.Attribute) and node.target.attr.value == "grad")

    def visit_Del(self, node: cst.Del) -> bool:
        return False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False

    def visit_Attribute(self, node: cst.Attribute) -> None:
        self.found |= node.attr.value == "grad"


def reads(node: cst.CSTNode, readers: set[str]) -> bool:
    """Whether a node reads gradients itself or by one of the functions ``readers``."""
    visitor = _Reads(readers)
    node.visit(visitor)
    return visitor.found


def readers(functions: Sequence[cst.FunctionDef], bindings: Bindings) -> set[str]:
    """Names of the functions of a file that read gradients, those with a training step of their own aside."""
    found: set[str] = set()
    for function in functions:
        if not contains_scaled(function.body, bindings) and reads(function.body, found):
            found.add(function.name.value)
    return found
