"""First pass: wrap what computes a scaled loss in ``torch.autocast``."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Sequence

import libcst as cst

from ampcompat.check.bindings import dotted
from ampcompat.migrate.marks import code_of, marked
from ampcompat.migrate.native.facts import Facts
from ampcompat.migrate.native.patterns import contains_scaled, scaled_call

# Calls that move data about: a loss does not start with them.
MOVES = frozenset(
    {"to", "cuda", "cpu", "float", "long", "int", "type", "item", "detach", "contiguous", "requires_grad_"}
    | {"view", "reshape", "squeeze", "unsqueeze", "permute", "transpose", "size"}
    | {"next", "iter", "len", "zip", "range", "enumerate", "keys", "items", "max", "min"}
    | {"zero_grad", "step", "train", "eval"}
)


class Flow:
    """Names that a statement reads and assigns, and whether it computes."""

    def __init__(self, code: str, models: Sequence[str]) -> None:
        tree = ast.parse(textwrap.dedent(code))
        self.reads: set[str] = set()
        self.assigns: set[str] = set()
        self.computes = self.uses_model = False
        for node in ast.walk(tree):
            name = dotted(node)
            if name is not None:
                stored = isinstance(getattr(node, "ctx", None), ast.Store)
                (self.assigns if stored else self.reads).add(name)
                if not stored and any(name == m or name.startswith(m + ".") for m in models):
                    self.uses_model = True
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                self.assigns.add(dotted(node.value) or "")
            if isinstance(node, ast.AugAssign):
                self.reads.add(dotted(node.target) or "")
            if isinstance(node, ast.Call):
                last = node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func)
                self.computes |= last not in MOVES
        self.uses_model &= self.computes
        self.reads -= {"", "self"}
        self.assigns -= {"", "self"}


class Autocast(cst.CSTTransformer):
    """Finds, for each ``amp.scale_loss`` block, the statements before it that the loss depends on, and wraps them."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.done: set[cst.CSTNode] = set()

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> cst.BaseSuite:
        return updated_node.with_changes(body=self._wrap(original_node.body, updated_node.body))

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        return updated_node.with_changes(body=self._wrap(original_node.body, updated_node.body))

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        for block in contains_scaled(original_node.body, self.facts.bindings):
            if block not in self.done:
                self.done.add(block)
                return marked(updated_node, "the forward pass is not in this function; run it under torch.autocast")
        return updated_node

    def _wrap(self, original: Sequence[cst.CSTNode], updated: Sequence[cst.CSTNode]) -> list[cst.CSTNode]:
        flows = [Flow(code_of(node), self.facts.models) for node in original]
        spans: list[tuple[int, int]] = []
        start = 0
        for end, node in enumerate(original):
            blocks = [b for b in contains_scaled(node, self.facts.bindings) if b not in self.done]
            if isinstance(node, cst.FunctionDef | cst.ClassDef) or not blocks:
                continue
            found = self._span(flows, start, end, blocks)
            if found is not None:
                spans.append(found)
                self.done.update(blocks)
            elif all(self._computes_inside(b) for b in blocks):
                self.done.update(blocks)
            elif any(self._chain(flows, a, b, blocks) for a, b in spans):
                self.done.update(blocks)  # computed in the region of an earlier loss
            start = end + 1
        result: list[cst.CSTNode] = list(updated)
        for first, last in reversed(spans):
            result[first:last] = [self._region(result[first:last])]
        return result

    def _computes_inside(self, block: cst.With) -> bool:
        call = scaled_call(block, self.facts.bindings)
        return call is not None and Flow(code_of(call.args[0].value), self.facts.models).computes

    def _chain(self, flows: list[Flow], start: int, end: int, blocks: Sequence[cst.With]) -> list[int]:
        needed: set[str] = set()
        for block in blocks:
            call = scaled_call(block, self.facts.bindings)
            needed |= Flow(code_of(call.args[0].value), self.facts.models).reads if call is not None else set()
        chain = []
        for index in range(end - 1, start - 1, -1):
            if flows[index].assigns & needed:
                chain.append(index)
                needed |= flows[index].reads
        return sorted(chain)

    def _span(self, flows: list[Flow], start: int, end: int, blocks: Sequence[cst.With]) -> tuple[int, int] | None:
        chain = self._chain(flows, start, end, blocks)
        first = next((i for i in chain if flows[i].uses_model), None)
        if first is None:
            first = next((i for i in chain if flows[i].computes), None)
        return None if first is None else (first, chain[-1] + 1)

    def _region(self, statements: Sequence[cst.CSTNode]) -> cst.With:
        region = cst.ensure_type(cst.parse_statement(f"with {self.facts.autocast()}:\n    pass\n"), cst.With)
        first = statements[0]
        lines = getattr(first, "leading_lines", ())
        body = [first.with_changes(leading_lines=[]), *statements[1:]]
        return region.with_changes(leading_lines=lines, body=region.body.with_changes(body=body))
