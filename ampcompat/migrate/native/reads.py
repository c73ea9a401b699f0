"""Where a loop reads ``p.grad`` by hand between backward and step: apex had unscaled it there, GradScaler has not."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from ampcompat.check.bindings import Bindings
from ampcompat.migrate.marks import code_of
from ampcompat.migrate.native.patterns import contains_scaled, header, uses

# What empties a gradient does not read it.
EMPTYING = ("zero_", "detach_", "requires_grad_")


class _Reads(cst.CSTVisitor):
    """Whether a node reads a ``.grad``, or calls a function of the file that does."""

    def __init__(self, readers: set[str]) -> None:
        self.readers = readers
        self.found = False

    def visit_Call(self, node: cst.Call) -> bool:
        called = code_of(node.func).rpartition(".")[2]
        self.found |= called in self.readers
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


class _Functions(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: list[cst.FunctionDef] = []

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.found.append(node)


class HandReads:
    """The statements of a module before which gradients must be unscaled, since they read them.

    Attributes:
        found: Those statements, by identity.
    """

    def __init__(self, module: cst.Module, bindings: Bindings, optimizers: Sequence[str]) -> None:
        self.bindings = bindings
        self.steps = {f"{optimizer}.step" for optimizer in optimizers}
        self.readers: set[str] = set()
        self.found: set[cst.CSTNode] = set()
        functions = _Functions()
        module.visit(functions)
        for function in functions.found:
            if not contains_scaled(function.body, bindings) and self._reads(function.body):
                self.readers.add(function.name.value)
        self._block(module.body, False)
        for function in functions.found:
            self._block(function.body.body, False)

    def _reads(self, node: cst.CSTNode) -> bool:
        visitor = _Reads(self.readers)
        node.visit(visitor)
        return visitor.found

    def _block(self, body: Sequence[cst.CSTNode], scaled: bool) -> bool:
        """Look through statements; ``scaled`` is whether gradients are, before and (returned) after them."""
        for part in body:
            if isinstance(part, cst.FunctionDef):
                continue
            if contains_scaled(part, self.bindings):
                if not isinstance(part, cst.With):
                    self._inner(part, False)
                scaled = True
            elif scaled and self._reads(part if isinstance(part, cst.For | cst.While) else header(part)):
                self.found.add(part)
                scaled = False
            elif scaled and self._settles(part):
                scaled = False
            else:
                self._inner(part, scaled)
        return scaled

    def _inner(self, part: cst.CSTNode, scaled: bool) -> None:
        for child in part.children:
            if isinstance(child, cst.IndentedBlock):
                self._block(child.body, scaled)
            elif isinstance(child, cst.If | cst.Else | cst.ExceptHandler | cst.Finally | cst.MatchCase):
                self._inner(child, scaled)

    def _settles(self, part: cst.CSTNode) -> bool:
        """Whether a simple statement unscales for another reason, or steps."""
        if not isinstance(part, cst.SimpleStatementLine):
            return False
        code = code_of(part)
        return "clip_grad" in code or any(f"{step}(" in code for step in self.steps) or self._uses_masters(part)

    def _uses_masters(self, part: cst.CSTNode) -> bool:
        return "apex.amp.master_params" in uses(part, self.bindings)
