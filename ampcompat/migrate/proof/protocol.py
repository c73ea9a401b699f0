"""The order of scale, unscale_, step and update, followed along every path for each optimizer.

Abstract interpretation: a set of states goes through the statements of each function; calls of functions of the file
go through those. GradScaler allows one ``unscale_`` and one ``step`` between updates, and gradients that are read
must be unscaled.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from enum import Enum

from ampcompat.check.bindings import dotted
from ampcompat.check.source import called, children
from ampcompat.check.traps.loop import switched
from ampcompat.migrate.casts import READS_GRADIENTS, READS_NONE, within
from ampcompat.migrate.objects import FUNCTIONS, SCOPES, Function, Label
from ampcompat.migrate.proof.subject import Subject

CLIPS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_", "dispatch_clip_grad")
# What empties a gradient, or asks for it, does not read it.
EMPTYING = ("zero_", "detach_", "requires_grad_", "zero_grad")


class State(Enum):
    """Of the gradients of one optimizer."""

    ENTRY = "whatever the callers left"
    CLEAR = "none scaled"
    SCALED = "scaled"
    UNSCALED = "unscaled by unscale_"
    STEPPED = "stepped, update due"
    EMPTIED = "stepped and set to zero, update due"
    LEFT = "unscaled, left over from the last step"
    PLAIN = "of a loss that was not scaled"


DUE = frozenset({State.STEPPED, State.EMPTIED})
ZEROED = {State.SCALED: State.CLEAR, State.LEFT: State.CLEAR, State.ENTRY: State.CLEAR, State.STEPPED: State.EMPTIED}
ZEROED[State.PLAIN] = State.CLEAR
NEVER_SCALED = "gradients of {0} may come from a loss that was not scaled: scale it, or step without {1} there"
#: What is wrong with a call of the scaler ``{1}`` where the gradients of the optimizer ``{0}`` are in a state.
WRONG: dict[str, dict[State, str]] = {
    "plain": {State.SCALED: NEVER_SCALED},
    "scale": {
        State.PLAIN: NEVER_SCALED,
        State.UNSCALED: "gradients of {0} were unscaled before: these would be added to them still scaled",
        **dict.fromkeys(DUE, "{1}.update() does not follow each step of {0} before this loss is scaled"),
        State.LEFT: "gradients of {0} left from its last step are added to scaled ones: zero_grad() first",
    },
    "unscale_": {
        State.PLAIN: NEVER_SCALED,
        State.UNSCALED: "unscale_ may run twice for {0} between updates, which raises",
        **dict.fromkeys(DUE, "unscale_ may run after the step of {0}, which raises"),
    },
    "step": {
        State.PLAIN: NEVER_SCALED,
        **dict.fromkeys(DUE, "{0} may step twice before {1}.update(), which raises"),
    },
    "update": {
        State.UNSCALED: "{0} was unscaled and has not stepped: after this update it is unscaled again",
        State.SCALED: "the scale may change here while gradients of {0} wait for their step",
    },
}
#: Wrong for a scaler of one optimizer: what another stepped is not known here.
NO_STEP = "update() may run without a step of {0}, which raises"
#: The states after such calls; those that are not listed stay.
AFTER: dict[str, dict[State, State]] = {
    "plain": dict.fromkeys((State.ENTRY, State.CLEAR, State.LEFT), State.PLAIN),
    "scale": dict.fromkeys(State, State.SCALED),
    "unscale_": dict.fromkeys(State, State.UNSCALED),
    "step": dict.fromkeys(State, State.STEPPED),
    "update": {
        State.STEPPED: State.LEFT,
        **dict.fromkeys((State.UNSCALED, State.EMPTIED, State.PLAIN), State.CLEAR),
    },
}


States = frozenset[State]
Failure = tuple[int, str]


class Protocol:
    """The proof for one file."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.objects = subject, subject.objects
        self.found: dict[Failure, None] = {}
        scales = [call for call in subject.source.calls if subject.on_scaler(call, "scale")]
        scales.sort(key=lambda call: (call.lineno, call.col_offset))
        scaled = subject.managed.scaled
        whose = zip(scaled, subject.managed.scaled_names, strict=True)
        self.scaled = dict(zip(scales, whose, strict=True)) if len(scales) == len(scaled) else {}
        within = subject.source.calls_within
        #: Functions in which the protocol goes on.
        self.touching = {f for f, calls in within.items() if any(map(self.touches, calls))}
        self.readers = self._readers()
        self._events: dict[ast.AST, tuple[ast.AST | None, list[tuple[ast.Call, bool]]]] = {}

    def failures(self) -> Iterator[Failure]:
        """Lines and messages, once each."""
        source = self.subject.source
        functions = [node for node in source.nodes if isinstance(node, FUNCTIONS)]
        entered = {f for call in source.calls for f in self.objects.called(call)}
        for index, name in enumerate(self.subject.managed.optimizers):
            flow = _Flow(self, Label("optimizer", index), name)
            flow.run(source.tree, source.tree.body, frozenset({State.CLEAR}))
            for function in functions:
                if function not in entered:
                    flow.run(function, function.body, frozenset({State.ENTRY}))
        return iter(self.found)

    def note(self, node: ast.AST, message: str) -> None:
        """A place where the proof fails."""
        self.found[getattr(node, "lineno", 1), message] = None

    def _readers(self) -> set[Function]:
        """Functions of the file that read gradients and have no step of their own."""
        functions = [node for node in self.subject.source.nodes if isinstance(node, FUNCTIONS)]
        found: set[Function] = set()
        before = -1
        while before != len(found):
            before = len(found)
            for function in functions:
                if function in self.touching:
                    continue
                if any(self.reads(part, found) for part in function.body):
                    found.add(function)
        return found

    def touches(self, node: ast.AST) -> bool:
        """Whether a node is a call of a scaler that belongs to the protocol."""
        return any(self.subject.on_scaler(node, method) for method in ("scale", "unscale_", "step", "update"))

    def reaches(self, function: Function) -> bool:
        """Whether the protocol goes on in a function, or in one that it calls."""
        return function in self._reaching

    @functools.cached_property
    def _reaching(self) -> set[ast.AST]:
        within = self.subject.source.calls_within
        entered = {f: {g for call in calls for g in self.objects.called(call)} for f, calls in within.items()}
        found: set[ast.AST] = set(self.touching)
        before = -1
        while before != len(found):
            before = len(found)
            found |= {f for f, others in entered.items() if not found.isdisjoint(others)}
        return found

    def events(self, node: ast.AST) -> tuple[ast.AST | None, list[tuple[ast.Call, bool]]]:
        """Find what reads gradients in a simple statement, and its calls in the order in which they end.

        With each call whether it may be left out: it is in a branch of an expression.
        """
        if node not in self._events:
            nodes = list(within(node))
            calls = [n for n in nodes if isinstance(n, ast.Call)]
            calls.sort(key=lambda c: (c.end_lineno or 0, c.end_col_offset or 0))
            branches = [part for n in nodes if isinstance(n, ast.IfExp | ast.BoolOp) for part in _later(n)]
            maybe = {n for part in branches for n in ast.walk(part)}
            self._events[node] = self.reads(node, self.readers), [(call, call in maybe) for call in calls]
        return self._events[node]

    def reads(self, part: ast.AST, readers: set[Function]) -> ast.AST | None:
        """The expression of a statement that reads gradients, or None."""
        rest: list[ast.AST] = [part]
        for node in rest:
            if isinstance(node, (*SCOPES, ast.Delete)) and node is not part:
                continue
            if isinstance(node, ast.Compare) and all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
                continue
            if isinstance(node, ast.Call):
                name = called(node)
                if self._reads_by_name(node) or name in CLIPS or any(f in readers for f in self.objects.called(node)):
                    return node
                if name == "getattr" and any(isinstance(a, ast.Constant) and a.value == "grad" for a in node.args):
                    return node
                if name == "grad" or name in EMPTYING:
                    rest += [*node.args, *(k.value for k in node.keywords)]
                    continue
            if isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Load):
                return node
            rest += children(node)
        return None

    def _reads_by_name(self, call: ast.Call) -> bool:
        """Whether a function that is not of this file says in its name that it reads gradients, and is given some."""
        name = called(call)
        if not READS_GRADIENTS.search(name) or READS_NONE.search(name) or self.objects.called(call):
            return False
        if self.subject.is_scaler(getattr(call.func, "value", call)):
            return False
        given = [*call.args, *(k.value for k in call.keywords)]
        return any(self.objects.of(g) or "param" in ast.unparse(g) for g in given)


class _Flow:
    """One optimizer followed through a file."""

    def __init__(self, protocol: Protocol, label: Label, name: str) -> None:
        self.protocol, self.subject, self.objects = protocol, protocol.subject, protocol.objects
        self.label, self.name = label, name
        self.scaler = self.subject.managed.scaler_of.get(label.index, self.subject.managed.scaler)
        self.alone = list(self.subject.managed.scaler_of.values()).count(self.scaler) == 1
        self.known: dict[tuple[ast.AST, States, frozenset[tuple[str, bool]]], States] = {}
        self.active: set[ast.AST] = set()
        self.loops: list[tuple[set[State], set[State]]] = []
        self.returned: list[set[State]] = []
        # For the functions on the way: which of their parameters are this optimizer, where the call tells.
        self.frames: list[dict[str, bool]] = []

    def run(self, scope: ast.AST, body: Sequence[ast.stmt], states: States) -> None:
        """Follow a function that nothing of this file calls, or the module."""
        ends = self.function(scope, body, states)
        if ends & DUE:
            steps = [n for n in ast.walk(scope) if self.subject.on_scaler(n, "step") and self._mine(n.args[0])]  # type: ignore[attr-defined]
            self.note(steps[-1] if steps else scope, f"{self.scaler}.update() does not follow this step on every path")

    def note(self, node: ast.AST, message: str) -> None:
        self.protocol.note(node, message)

    def function(self, scope: ast.AST, body: Sequence[ast.stmt], states: States) -> States:
        """States after a call that begins in ``states``."""
        key = scope, states, frozenset(self.frames[-1].items()) if self.frames else frozenset()
        if key in self.known:
            return self.known[key]
        if scope in self.active or len(self.active) > 20:
            return states
        self.active.add(scope)
        outer, self.loops = self.loops, []
        self.returned.append(set())
        ends = self.block(body, states) | self.returned.pop()
        self.loops = outer
        self.active.discard(scope)
        self.known[key] = frozenset(ends)
        return self.known[key]

    def block(self, body: Sequence[ast.stmt], states: States) -> States:
        """States after statements; empty where their end is not reached."""
        for part in body:
            if not states:
                break
            states = self.statement(part, states)
        return states

    def statement(self, part: ast.stmt, states: States) -> States:
        if isinstance(part, (*FUNCTIONS, ast.ClassDef)):
            return states
        if isinstance(part, ast.If):
            states = self.events(part.test, states)
            return self.block(part.body, states) | self.block(part.orelse, states)
        if isinstance(part, ast.For | ast.AsyncFor | ast.While):
            return self.loop(part, states)
        if isinstance(part, ast.With | ast.AsyncWith):
            for item in part.items:
                states = self.events(item.context_expr, states)
            return self.block(part.body, states)
        if isinstance(part, ast.Try) or type(part).__name__ == "TryStar":
            ends = self.block(part.body, states)  # type: ignore[attr-defined]
            # What raises between unscale_ and update does so in torch itself.
            caught = states | (ends & {State.SCALED, State.CLEAR})
            handled = [self.block(handler.body, caught) for handler in part.handlers]  # type: ignore[attr-defined]
            ends = self.block(part.orelse, ends) if ends else ends  # type: ignore[attr-defined]
            return self.block(part.finalbody, ends.union(*handled))  # type: ignore[attr-defined]
        if isinstance(part, ast.Match):
            states = self.events(part.subject, states)
            return states.union(*(self.block(case.body, states) for case in part.cases))
        if isinstance(part, ast.Return):
            if part.value is not None:
                states = self.events(part.value, states)
            self.returned[-1].update(states)
            return frozenset()
        if isinstance(part, ast.Raise):
            return frozenset()
        if isinstance(part, ast.Break | ast.Continue):
            if self.loops:
                self.loops[-1][isinstance(part, ast.Continue)].update(states)
            return frozenset()
        return self.events(part, states)

    def loop(self, part: ast.For | ast.AsyncFor | ast.While, states: States) -> States:
        header = part.test if isinstance(part, ast.While) else part.iter
        states = self.events(header, states)
        # `for o in optimizers`: once for each, so once for this one.
        held = frozenset() if isinstance(part, ast.While) else self.objects.of(part.iter)
        once = self.label in held or any(label.kind == "model" for label in held)
        endless = isinstance(part, ast.While) and isinstance(part.test, ast.Constant) and bool(part.test.value)
        before: States = frozenset()
        breaks: set[State] = set()
        while before != states:
            before = states
            self.loops.append((set(), set()))
            ends = self.block(part.body, states)
            stopped, continued = self.loops.pop()
            breaks |= stopped
            if once:
                return ends | continued | breaks
            states = states | ends | continued
        if endless:
            return frozenset(breaks)
        return self.block(part.orelse, states) | frozenset(breaks)

    def events(self, node: ast.AST, states: States) -> States:
        """States after the calls of an expression or simple statement, in the order in which they end."""
        read, calls = self.protocol.events(node)
        for call, conditional in calls:
            after = self.call(call, states)
            states = after | states if conditional else after
        if read is not None and self._concerns(read, node):
            self.read(read, states)
        return states

    def call(self, call: ast.Call, states: States) -> States:
        subject = self.subject
        if subject.on_scaler(call, "scale"):
            affected, name = self.protocol.scaled.get(call, (None, ""))
            if affected is None:
                return states | self.each(call, states, "scale")
            mine = self.frames[-1].get(name, self.label in affected) if self.frames else self.label in affected
            return self.each(call, states, "scale") if mine else states
        if subject.on_scaler(call, "update"):
            return self.each(call, states, "update") if self._scaler_is(call) else states
        if call.args and (subject.on_scaler(call, "unscale_") or subject.on_scaler(call, "step")):
            if not self._mine(call.args[0]):
                return states
            after = self.each(call, states, called(call))
            return (
                after if len(self.objects.optimizers(call.args[0])) == 1 or self._loops_over(call) else after | states
            )
        if self._is_plain(call):
            return self.each(call, states, "plain")
        if called(call) == "zero_grad" and self._zeroes(call):
            return frozenset(ZEROED.get(s, s) for s in states)
        for function in self._unresolved(call):
            states |= self.function(function, function.body, states)
        for function in self.objects.called(call):
            if function not in self.protocol.readers and self.protocol.reaches(function):
                self.frames.append(self._frame(call, function))
                states = self.function(function, function.body, states)
                self.frames.pop()
        return states

    def _frame(self, call: ast.Call, function: Function) -> dict[str, bool]:
        outer = self.frames[-1] if self.frames else {}
        given = {name: (value, self.objects.optimizers(value)) for name, value in self.objects.bound(call, function)}
        return {
            name: outer.get(ast.unparse(value), self.label in labels)
            for name, (value, labels) in given.items()
            if labels
        }

    def _zeroes(self, call: ast.Call) -> bool:
        """Whether ``zero_grad`` is of this optimizer, of its model, or of something that is not known."""
        labels = self.objects.of(getattr(call.func, "value", None))
        paired = len(self.subject.managed.models) == len(self.subject.managed.optimizers)
        mine = {self.label, Label("model", self.label.index)}
        return not labels or bool(labels & mine) or (not paired and any(x.kind == "model" for x in labels))

    def _unresolved(self, call: ast.Call) -> list[Function]:
        """Methods of the file, of the name that is called on something unknown, which go on with the protocol."""
        if not isinstance(call.func, ast.Attribute) or self.objects.called(call) or self.objects.of(call.func.value):
            return []
        if self.subject.is_scaler(call.func.value) or any(
            self.subject.on_scaler(n, "scale") for n in ast.walk(call.func)
        ):
            return []
        if self.subject.casts._tensor(call.func.value, self.objects.scope(call)):
            return []
        methods = self.objects.methods.get(call.func.attr, [])
        return [f for f in methods if f not in self.active and self.protocol.reaches(f)]

    def _loops_over(self, call: ast.Call) -> bool:
        """Whether the call is in a loop over all of the optimizers that its argument may be."""
        for parent in self.subject.source.ancestors(call):
            if isinstance(parent, ast.For) and self.label in self.objects.optimizers(parent.iter):
                return True
        return False

    def _is_plain(self, call: ast.Call) -> bool:
        """Whether a backward pass of a loss that is not scaled may reach this optimizer's parameters.

        A test that names the precision in use is the script's switch: on its other side nothing is scaled.
        """
        func = call.func
        if called(call) != "backward" or call.args or not isinstance(func, ast.Attribute):
            return False
        scope = self.objects.scope(call)
        if self._is_scaled(func.value) or switched(self.subject.source, call):
            return False
        values = [func.value, *self._values(func.value)]
        casts = self.subject.casts
        return any(casts._tensor(v, scope) or any(map(self.objects.models, ast.walk(v))) for v in values)

    def _values(self, node: ast.AST) -> list[ast.expr]:
        path = dotted(node)
        return [v for _, target, v in self.objects.assignments if path is not None and dotted(target) == path]

    def _is_scaled(self, node: ast.AST) -> bool:
        """Whether an expression is, or may be a name for, what ``scaler.scale`` returned."""
        return any(self.subject.on_scaler(n, "scale") for v in (node, *self._values(node)) for n in ast.walk(v))

    def _mine(self, node: ast.AST | None) -> bool:
        return node is not None and self.label in self.objects.optimizers(node)

    def _scaler_is(self, call: ast.Call) -> bool:
        name = ast.unparse(getattr(call.func, "value", call))
        return name == self.scaler or name == "scaler" or not name.endswith("]")

    def _concerns(self, read: ast.AST, part: ast.AST) -> bool:
        """Whether what is read may be gradients of this optimizer's parameters."""
        if len(self.subject.managed.optimizers) == 1:
            return True
        labels = {label for node in ast.walk(part) for label in self.objects.of(node)}
        for parent in self.subject.source.ancestors(read):
            if isinstance(parent, ast.For):
                labels |= {label for node in ast.walk(parent.iter) for label in self.objects.of(node)}
        if self.label in labels:
            return True
        paired = len(self.subject.managed.models) == len(self.subject.managed.optimizers)
        return not labels or (paired and any(x.kind == "model" and x.index == self.label.index for x in labels))

    def each(self, call: ast.Call, states: States, event: str) -> States:
        """States after a call of the protocol; what is wrong with it in one of ``states`` is noted."""
        wrong = WRONG[event]
        if event == "update" and self.alone:
            wrong = {**wrong, State.CLEAR: NO_STEP, State.LEFT: NO_STEP}
        for state in State:  # in this order in each run
            if state in states and state in wrong:
                self.note(call, wrong[state].format(self.name, self.scaler))
        return frozenset(AFTER[event].get(state, state) for state in states)

    def read(self, node: ast.AST, states: States) -> None:
        scope = self.objects.scope(node)
        while State.ENTRY in states and scope is not self.subject.source.tree:
            if scope in self.protocol.touching or self._reads_managed(node):
                self.note(
                    node,
                    f"gradients of {self.name} may still be scaled here: {self.scaler}.unscale_({self.name}) first",
                )
            break
        if State.SCALED in states:
            self.note(
                node, f"gradients of {self.name} are still scaled here: {self.scaler}.unscale_({self.name}) first, once"
            )

    def _reads_managed(self, node: ast.AST) -> bool:
        return any(self.objects.of(inner) for inner in ast.walk(node))


def _later(node: ast.AST) -> list[ast.AST]:
    """The parts of a conditional expression that may not be evaluated."""
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    return list(node.values[1:]) if isinstance(node, ast.BoolOp) else []
