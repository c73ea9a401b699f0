"""Unscale gradients where it is due: before they are clipped or read, and once between two updates of their scaler.

``unscale_`` raises when it is called a second time before ``update``. So statements are followed along every branch,
and a call that some branches need and a later statement needs too is put before the branches.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Collection, Sequence
from enum import Enum

import libcst as cst

from ampcompat.check.source import Source
from ampcompat.migrate.casts import READS_GRADIENTS
from ampcompat.migrate.marks import code_of
from ampcompat.migrate.native.facts import Facts
from ampcompat.migrate.native.patterns import contains_scaled, header, holds_statements, receiver, scaled_call, symbol
from ampcompat.migrate.native.places import Places
from ampcompat.migrate.native.reads import CLIPS, readers, reads
from ampcompat.migrate.objects import FUNCTIONS, Label

SEVERAL = "gradients read here are still scaled: call unscale_(optimizer) of their scaler first"
NOT_EACH_TIME = (
    "gradients are still scaled here: {}.step() does not follow each time, and unscale_ may run once between updates"
)

Body = Sequence[cst.CSTNode]


class State(Enum):
    """Of an optimizer's gradients at a place of the code."""

    UNKNOWN = "no backward pass in this function, or stepped since"
    SCALED = "scaled"
    UNSCALED = "unscaled"


# In the place of a state: the branching statement after which gradients are unscaled or not.
Now = State | cst.CSTNode


class _Again(Exception):
    """The flow is followed again: a call moved before a branching statement."""


class Unscaling:
    """The statements of a module before which gradients are unscaled.

    Attributes:
        before: For each such statement the optimizers, in order.
        marks: For statements that need it where it cannot be done, why.
    """

    def __init__(
        self,
        module: cst.Module,
        facts: Facts,
        places: Places,
        shown: Callable[[int], bool],
    ) -> None:
        self.places = places
        self.facts, self.bindings = facts, facts.bindings
        functions = _Functions()
        module.visit(functions)
        every = (node for kind in FUNCTIONS for node in facts.source.kind(kind) if shown(node.lineno))
        scopes = sorted(every, key=lambda n: n.lineno)
        touched = _touching_gradients(facts.source)
        touching = [cst_one for cst_one, one in zip(functions.found, scopes, strict=True) if one in touched]
        self.readers = readers(touching, self.bindings)
        words = {"master_params", *self.readers}
        self.lines = sorted(
            {n.end_lineno or n.lineno for n in facts.source.kind(ast.Attribute) if _is_gradient(n.attr, words)}
            | {n.lineno for n in facts.source.kind(ast.Name) if _is_gradient(n.id, words)}
        )
        self.before: dict[cst.CSTNode, list[str]] = {}
        self.marks: dict[cst.CSTNode, str] = {}
        bodies: list[Body] = [module.body, *(function.body.body for function in functions.found)]
        for body, scope in zip(bodies, [facts.source.tree, *scopes], strict=True):
            if scope not in touched:
                continue
            self.scales = any(contains_scaled(part, self.bindings) for part in body)
            for optimizer in facts.names_in(scope).values():
                self._follow(body, optimizer)

    def _follow(self, body: Body, optimizer: str) -> None:
        early: set[cst.CSTNode] = set()
        while True:
            flow = _Flow(self, optimizer, early)
            try:
                flow.block(body, State.UNKNOWN, ())
            except _Again:
                continue
            for part in flow.before:
                self.before.setdefault(part, []).append(optimizer)
            self.marks |= flow.marks
            return

    def needs(self, part: cst.CSTNode, optimizer: str) -> tuple[bool, bool]:
        """Whether a statement (its blocks aside) clips the gradients of ``optimizer``, and whether it reads some."""
        if isinstance(part, cst.FunctionDef | cst.ClassDef) or not self._names_gradients(part):
            return False, False
        facts = self.facts
        shown = part if self._whole(part, optimizer) else _line(part)
        for call in calls_in(shown):
            name = symbol(call.func, self.bindings)
            given = code_of(call.args[0].value) if call.args else ""
            if name == "apex.amp.master_params" and facts.same(given, optimizer):
                return True, False
            if (
                code_of(call.func).rpartition(".")[2] in CLIPS
                and given
                and self.scales
                and "master_params" not in given
            ):
                owners = [
                    name
                    for index, name in enumerate(facts.optimizers)
                    if any(given.startswith(path + ".") for path in facts.objects.paths(Label("model", index)))
                ]
                if any(facts.same(owner, optimizer) for owner in owners) or facts.groups == 1:
                    return True, False
        return False, reads(shown, self.readers)

    def _names_gradients(self, part: cst.CSTNode) -> bool:
        """Whether a line of a statement names gradients, or what reads them: a look that costs little."""
        start, end = self.places[part]
        return any(start <= line <= end for line in self.lines)

    def _whole(self, part: cst.CSTNode, optimizer: str) -> bool:
        """Whether a loop is taken as one: what it unscales inside, it would unscale again."""
        loop = isinstance(part, cst.For | cst.While)
        return loop and not contains_scaled(part, self.bindings) and not steps(part, self.facts, optimizer)


def _is_gradient(word: str, words: Collection[str]) -> bool:
    return word in words or READS_GRADIENTS.search(word) is not None


def _touching_gradients(source: Source) -> set[ast.AST]:
    """Find the nodes that step, clip or read gradients, and those around them: following the rest costs too much."""
    found: set[ast.AST] = set()
    for node in source.nodes:
        if not isinstance(node, ast.Attribute | ast.Name):
            continue
        word = node.attr if isinstance(node, ast.Attribute) else node.id
        if word in ("step", "master_params") or READS_GRADIENTS.search(word):
            around: ast.AST = node
            while around not in found:
                found.add(around)
                around = source.parents.get(around, around)
    return found


class _Flow:
    def __init__(self, module: Unscaling, optimizer: str, early: set[cst.CSTNode]) -> None:
        self.module, self.optimizer, self.early = module, optimizer, early
        self.before: list[cst.CSTNode] = []
        self.marks: dict[cst.CSTNode, str] = {}

    def block(self, body: Body, now: Now, after: Body) -> Now:
        """Follow statements from the state ``now``; ``after`` are those that come after the block."""
        for index, part in enumerate(body):
            rest = (*body[index + 1 :], *after)
            if scaled_call(part, self.module.bindings) is not None:
                now = State.SCALED
                continue
            clips, by_hand = self.module.needs(part, self.optimizer)
            if clips or (by_hand and now is not State.UNKNOWN) or part in self.early:
                now = self._unscaled(part, now, rest, not clips)
            if isinstance(part, cst.SimpleStatementLine):
                now = State.UNKNOWN if steps(part, self.module.facts, self.optimizer) else now
            elif not isinstance(part, cst.FunctionDef | cst.ClassDef):
                now = self._branches(part, now, rest)
        return now

    def _unscaled(self, part: cst.CSTNode, now: Now, rest: Body, by_hand: bool) -> Now:
        if now is State.UNSCALED:
            return now
        if by_hand and self.module.facts.groups > 1 and part not in self.early:
            self.marks[part] = SEVERAL
            return now
        if isinstance(now, cst.CSTNode):
            if now not in self.early and not contains_scaled(now, self.module.bindings):
                self.early.add(now)
                raise _Again
        elif self._each_time(rest):
            self.before.append(part)
            return State.UNSCALED
        self.marks[part] = NOT_EACH_TIME.format(self.optimizer)
        return now

    def _branches(self, part: cst.CSTNode, now: Now, rest: Body) -> Now:
        """Follow the blocks of a compound statement; the state after it is the statement where they end unlike."""
        if isinstance(part, cst.With):
            return self.block(part.body.body, now, rest)
        last = part.finalbody.body.body if isinstance(part, cst.Try | cst.TryStar) and part.finalbody else ()
        ends = [self.block(block.body, now, (*last, *rest)) for block in _blocks(part)]
        if not _has_else(part):
            ends.append(now)
        # Stepped on one side only: what counts is the other, unless gradients are not scaled there.
        kept = [end for end in ends if end is not State.UNKNOWN] if State.UNSCALED not in ends else ends
        together = kept[0] if len(set(kept)) == 1 else part if kept else State.UNKNOWN
        return self.block(last, together, rest)

    def _is_for(self, call: cst.Call) -> bool:
        given = code_of(call.args[1])
        return any(
            name in given for name in self.module.facts.scaler_of if self.module.facts.same(name, self.optimizer)
        )

    def _each_time(self, rest: Body) -> bool:
        """Whether the step follows in any case, or in none: in another function, then."""
        for part in rest:
            if isinstance(part, cst.FunctionDef | cst.ClassDef):
                continue
            every = isinstance(part, cst.For) and code_of(part.iter) in self.module.facts.containers
            if (every or isinstance(part, cst.SimpleStatementLine | cst.With)) and steps(
                part, self.module.facts, self.optimizer
            ):
                return True
            scaled = [scaled_call(block, self.module.bindings) for block in contains_scaled(part, self.module.bindings)]
            if any(call and self._is_for(call) for call in scaled):
                return False
            if steps(part, self.module.facts, self.optimizer):
                return _has_else(part) and all(self._each_time(block.body) for block in _blocks(part))
        return True


def steps(node: cst.CSTNode, facts: Facts, optimizer: str) -> bool:
    """Whether a statement calls the optimizer's step, by whatever name."""
    calls = [call for call in calls_in(node) if isinstance(call.func, cst.Attribute) and call.func.attr.value == "step"]
    return any(facts.same(receiver(call), optimizer) for call in calls)


def _blocks(part: cst.CSTNode) -> list[cst.BaseSuite]:
    """The blocks of a compound statement, those of ``elif`` and ``except`` too, in order."""
    found = []
    for child in part.children:
        if isinstance(child, cst.BaseSuite):
            found.append(child)
        elif isinstance(child, cst.If | cst.Else | cst.ExceptHandler | cst.ExceptStarHandler | cst.MatchCase):
            found += _blocks(child)
    return found


def _has_else(part: cst.CSTNode) -> bool:
    """Whether one of the blocks runs in any case."""
    if isinstance(part, cst.If):
        return isinstance(part.orelse, cst.Else) or (part.orelse is not None and _has_else(part.orelse))
    return isinstance(part, cst.Try | cst.TryStar | cst.With)


def _line(part: cst.CSTNode) -> cst.CSTNode:
    """Return what a statement computes before its blocks, the tests of ``elif`` included."""
    return _tests(part) if isinstance(part, cst.If) else header(part)


def _tests(part: cst.If) -> cst.BaseExpression:
    if isinstance(part.orelse, cst.If):
        return cst.BooleanOperation(part.test, cst.Or(), _tests(part.orelse))
    return part.test


class _Functions(cst.CSTVisitor):
    def on_visit(self, node: cst.CSTNode) -> bool:
        return holds_statements(node) and super().on_visit(node)

    def __init__(self) -> None:
        self.found: list[cst.FunctionDef] = []

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.found.append(node)


class _Calls(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: list[cst.Call] = []

    def visit_Call(self, node: cst.Call) -> None:
        self.found.append(node)


@functools.lru_cache(maxsize=10_000)
def calls_in(node: cst.CSTNode) -> tuple[cst.Call, ...]:
    """All calls in a node."""
    visitor = _Calls()
    node.visit(visitor)
    return tuple(visitor.found)
