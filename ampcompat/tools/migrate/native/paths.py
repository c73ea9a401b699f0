"""One walk over the paths of each function: what the gradients of each optimizer are, at each statement.

The walk follows a path through branches, loops and calls of the file's own functions. It knows, for each optimizer that
is under amp, which of these its gradients are:

| phase | meaning |
|---|---|
| entry | whatever they were when the function was called |
| clear | there are none, or zeros |
| scaled | a scaled loss had its backward pass |
| unscaled | the same, and ``unscale_`` was called |
| spent | they were cleared after ``unscale_``, which the scaler remembers until its update |
| stepped | the optimizer stepped; they are still there |

Beside its phase an optimizer has the plain ``backward()`` calls whose gradients it may hold.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import libcst as cst
from libcst.metadata import GlobalScope

from ampcompat.tools.migrate.native.facts import MASTER_PARAMS, OPTIMIZER, OTHER_CLASSES, OTHER_STEPS, SCALE_LOSS, Facts
from ampcompat.tools.migrate.native.file import File, Function, Variable
from ampcompat.tools.migrate.native.nodes import argument, children, descendants, elements, last_name
from ampcompat.tools.migrate.text import code_of

#: Calls that read or edit gradients, by name.
READS = re.compile(r"grad", re.IGNORECASE)
READS_NOT = re.compile(
    r"zero_?grad|no_grad|enable_grad|set_grad|requires_grad|is_grad|retain_grad|autograd|checkpoint|Scaler|"
    r"accumulat|^grad$|GradCAM|Reversal|penalty|zero_out",
    re.IGNORECASE,
)
CLEARS = re.compile(r"zero_?grad|clear_?grad|zero_out_grad", re.IGNORECASE)
#: torch's functions that clip, which may be imported under other names.
PLAIN_CLIPS = tuple(
    f"torch.nn.utils.{home}{name}" for home in ("", "clip_grad.") for name in ("clip_grad_norm_", "clip_grad_value_")
)
#: More paths than this are not followed.
MOST_CALLS = 3000
MOST_ROUNDS = 12
#: As many tests are told apart in a loop.
MOST_TESTS = 3


class Phase(NamedTuple):
    """What the gradients of an optimizer are on some path.

    Attributes:
        kind: One of the phases above.
        plain: Plain ``backward()`` calls whose gradients are among them.
        places: Where ``unscale_`` was called.
        over: Steps of other optimizers that were made since they were scaled.
        stale: Scaled losses whose gradients were added to those of a step before.
        losses: The ``loss_id`` of each loss that they come from.
    """

    kind: str
    plain: frozenset[cst.CSTNode] = frozenset()
    places: frozenset[cst.CSTNode] = frozenset()
    over: frozenset[cst.CSTNode] = frozenset()
    stale: frozenset[cst.CSTNode] = frozenset()
    losses: frozenset[str] = frozenset()


CLEAR = Phase("clear")
ENTRY = Phase("entry")
PENDING = ("entry", "scaled", "unscaled")
State = dict[Variable, frozenset[Phase]]


class At(NamedTuple):
    """A statement on a path: the call of a function that led there, and the statement."""

    frame: int
    statement: cst.CSTNode


Path = tuple[At, ...]


@dataclass
class Frame:
    """A function that the walk is in.

    Attributes:
        function: The function; None for the module.
        held: What its parameters hold, as far as the call tells.
        returned: The state at its ``return`` statements.
    """

    function: Function | None
    held: dict[Variable, frozenset[Variable]] = field(default_factory=dict)
    returned: list[State] = field(default_factory=list)


@dataclass
class Loop:
    """A loop that the walk is in, with the states at its ``break`` and ``continue``."""

    broken: list[State] = field(default_factory=list)
    continued: list[State] = field(default_factory=list)


@dataclass
class Step:
    """A step of an optimizer, with all that was seen there.

    Attributes:
        call: ``optimizer.step()``.
        path: One way to it.
        scaled: Whether gradients may be scaled there.
        plain: Whether they may come from plain backward passes alone.
        ids: The optimizers that may step here.
        later: Steps that the update must wait for.
        losses: The ``loss_id`` of each loss whose gradients step here.
    """

    call: cst.Call
    path: Path
    scaled: bool = False
    plain: bool = False
    ids: frozenset[Variable] = frozenset()
    later: set[cst.CSTNode] = field(default_factory=set)
    losses: set[str] = field(default_factory=set)


@dataclass
class Unscale:
    """A call of ``unscale_`` that is needed before a statement."""

    path: Path
    statement: cst.CSTNode
    function: Function | None
    names: dict[str, None] = field(default_factory=dict)
    ids: set[Variable] = field(default_factory=set)
    losses: set[str] = field(default_factory=set)


class Walk:
    """The walk over all functions of a file.

    Attributes:
        steps: The optimizer steps, by their calls.
        unscales: Where ``unscale_`` is needed, by the statement before which it stands.
        scaled_clips: Calls that clip gradients while these are scaled, since more are added before the step.
        scaled_backward: Plain ``backward()`` calls whose gradients are stepped together with scaled ones.
        problems: What ``GradScaler`` would get wrong without a word: statement and message.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.file = facts.file
        self.forced: dict[cst.CSTNode, set[Variable]] = {}
        self.refused: set[cst.CSTNode] = set()
        #: Those after which the gradients may be cleared, and the step left out.
        self.refused_for_cleared: set[cst.CSTNode] = set()
        self.scaled_backward: dict[cst.CSTNode, set[Variable]] = {}
        self.problems: dict[tuple[cst.CSTNode, str], None] = {}
        self.steady: dict[cst.CSTNode, list[str]] = {}
        self.decided: dict[str, bool] = {}
        self.ordered_events: dict[cst.CSTNode, list[cst.CSTNode]] = {}
        #: What variables are assigned, the last in the text.
        self.assigned = {
            self.file.variable(target.target): node.value
            for node in self.file.of_type(cst.Assign)
            for target in node.targets
        }
        self._meant: dict[Variable, list[str | cst.Lambda]] = {}
        self.interesting = self._interesting()
        self.uses = self._uses()
        self.all_ids = facts.ordered(self._all_ids())
        self.tensors = self._assigned_tensors()
        self._run()

    # What there is to walk.

    def _all_ids(self) -> frozenset[Variable]:
        found: set[Variable] = set()
        for names in self.uses.values():
            for node in names:
                variable = self.file.variable(node)
                if variable is not None:
                    found |= self.facts.roots(variable)
        return frozenset(found)

    def _uses(self) -> dict[Function | None, list[cst.BaseExpression]]:
        """Expressions of each function that are optimizers under amp."""
        found: defaultdict[Function | None, list[cst.BaseExpression]] = defaultdict(list)
        expressions: Iterable[Any] = self.file.of_types(cst.Name, cst.Attribute, cst.Subscript)
        for node in expressions:
            parent = self.file.parents.get(node)
            if isinstance(parent, cst.Attribute) and parent.attr is node:
                continue
            if isinstance(parent, cst.Param) and parent.name is node:
                continue
            if isinstance(parent, cst.Arg) and parent.keyword is node:
                continue
            if self.facts.is_optimizer(node):
                found[self.file.function(node)].append(node)
        return found

    def _interesting(self) -> set[Function]:
        """Functions that touch gradients, themselves or through what they call."""
        calls: defaultdict[Function, set[Function | None]] = defaultdict(set)
        found: set[Function] = set()
        for node in self.file.of_types(cst.Call, cst.Attribute):
            function = self.file.function(node)
            if isinstance(node, cst.Call):
                callee = self.facts.flows.callee(node)
                if callee is not None:
                    calls[callee[0]].add(function)
            if function is not None and self._is_event(node) and not self.facts.in_optimizer(function):
                found.add(function)
        waiting = list(found)
        while waiting:
            for caller in calls[waiting.pop()]:
                if caller is not None and caller not in found:
                    found.add(caller)
                    waiting.append(caller)
        self.called = {callee for callee, callers in calls.items() if callers - {callee}}
        return found

    def _is_event(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Attribute):
            return node.attr.value in ("grad", "step", "backward", "zero_grad", "initialize", "scale_loss")
        if isinstance(node, cst.Call):
            symbol = self.facts.symbol(node.func) or ""
            meant = self._functions_meant(node.func)
            reads = any(isinstance(one, cst.Lambda) or READS.search(one) for one in meant)
            return reads or symbol.startswith("apex.amp.")
        return False

    def _run(self) -> None:
        for _ in range(MOST_ROUNDS):
            before = (
                {k: set(v) for k, v in self.forced.items()}, len(self.refused), len(self.refused_for_cleared),
                {k: set(v) for k, v in self.scaled_backward.items()},
            )  # fmt: skip
            self._once()
            self._hoist_branches()
            after = (self.forced, len(self.refused), len(self.refused_for_cleared), self.scaled_backward)
            if before == after:
                break
        for call in self.scaled_clips & self.unscaled_clips:
            self._problem(call, ACCUMULATED)
        self.scaled_clips -= self.unscaled_clips

    def _once(self) -> None:
        self.steps: dict[cst.CSTNode, Step] = {}
        self.unscales: dict[cst.CSTNode, Unscale] = {}
        self.entered: dict[cst.CSTNode, State] = {}
        self.problems = {}
        self.scaled_clips: set[cst.Call] = set()
        self.unscaled_clips: set[cst.Call] = set()
        self.seen: set[Function | None] = set()
        self.losses_of: dict[Variable, set[str]] = {}
        self.scaled_at: dict[Variable, cst.CSTNode] = {}
        self.backward_of_scaled: set[cst.CSTNode] = set()
        self.calls = 0
        self.path: list[At] = []
        self.frames: list[Frame] = []
        self.loops: list[Loop] = []
        self.blocks: list[set[str]] = []
        self._frame(Frame(None), self.file.module.body, dict.fromkeys(self.all_ids, frozenset({CLEAR})))
        for function in sorted(self.interesting - self.called, key=self.file.order):
            self._frame(Frame(function), function.body.body, dict.fromkeys(self.all_ids, frozenset({ENTRY})))
        for function in sorted(self.interesting, key=self.file.order):
            if function not in self.seen:  # called from where the walk does not go, as from a lambda
                self._frame(Frame(function), function.body.body, dict.fromkeys(self.all_ids, frozenset({ENTRY})))

    # Statements.

    def _frame(self, frame: Frame, body: Iterable[cst.CSTNode], state: State, scaled: set[str] | None = None) -> State:
        loops, self.loops = self.loops, []
        blocks, self.blocks = self.blocks, [scaled] if scaled else []
        decided, self.decided = self.decided, {t: v for t, v in self.decided.items() if "." in t}
        self.frames.append(frame)
        self.seen.add(frame.function)
        left = self._block(body, state)
        self.frames.pop()
        self.loops, self.blocks = loops, blocks
        self.decided = decided
        return _join([*frame.returned, *([left] if left is not None else [])]) or dict(state)

    def _block(self, body: Iterable[cst.CSTNode], state: State | None) -> State | None:
        for statement in body:
            if state is None:
                return None
            if isinstance(statement, cst.SimpleStatementLine):
                for part in statement.body:
                    state = self._statement(part, state)
                    if state is None:
                        return None
            else:
                state = self._statement(statement, state)
        return state

    def _statement(self, node: cst.CSTNode, state: State) -> State | None:
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            return state
        self.path.append(At(len(self.frames) - 1, node))
        self.entered[node] = _join([self.entered[node], state]) if node in self.entered else state  # type: ignore[assignment]
        if node in self.forced and node not in self.refused:
            state = self._unscale(self.forced[node], state, node)
        result = self._inside(node, state)
        self.path.pop()
        return result

    def _inside(self, node: cst.CSTNode, state: State) -> State | None:
        if isinstance(node, cst.If):
            return self._if(node, state)
        if isinstance(node, cst.For | cst.While):
            return self._loop(node, state)
        if isinstance(node, cst.With):
            return self._with(node, state)
        if isinstance(node, cst.Try | cst.TryStar):
            return self._try(node, state)
        if isinstance(node, cst.Match):
            state = self._events(node.subject, state)
            return _join([self._block(case.body.body, dict(state)) for case in node.cases] + [state])
        state = self._events(node, state)
        if isinstance(node, cst.Return):
            self.frames[-1].returned.append(state)
            return None
        if isinstance(node, cst.Raise):
            return None
        if isinstance(node, cst.Break) and self.loops:
            self.loops[-1].broken.append(state)
            return None
        if isinstance(node, cst.Continue) and self.loops:
            self.loops[-1].continued.append(state)
            return None
        return state

    def _if(self, node: cst.If, state: State) -> State | None:
        state = self._events(node.test, state)
        decided = self.decided.get(code_of(node.test)) if self.decided else None
        if decided is True:
            return self._block(node.body.body, state)
        taken = None if decided is False else self._block(node.body.body, dict(state))
        if isinstance(node.orelse, cst.If):
            return _join([taken, self._if(node.orelse, dict(state))])
        if node.orelse is not None:
            return _join([taken, self._block(node.orelse.body.body, dict(state))])
        return _join([taken, state])

    def _loop(self, node: cst.For | cst.While, state: State) -> State | None:
        """The loop, once for each outcome of the tests that do not change while it runs."""
        tests = [test for test in self._steady_tests(node) if test not in self.decided][:MOST_TESTS]
        ends = []
        for outcomes in itertools.product((True, False), repeat=len(tests)):
            self.decided.update(zip(tests, outcomes, strict=True))
            ends.append(self._one_loop(node, dict(state)))
        for test in tests:
            self.decided.pop(test)
        return _join(ends)

    def _steady_tests(self, node: cst.For | cst.While) -> list[str]:
        """Tests inside of a loop on names that the loop does not assign, around what touches gradients."""
        if node not in self.steady:
            inner = list(descendants(node))
            assigned = {n.value for target in inner for n in _assigned_names(target)}
            found: dict[str, None] = {}
            for branch in inner:
                if not isinstance(branch, cst.If) or not any(self._is_event(n) for n in descendants(branch)):
                    continue
                names = [n for n in descendants(branch.test) if isinstance(n, cst.Name)]
                calls = any(isinstance(n, cst.Call) for n in descendants(branch.test))
                if not calls and not any(n.value in assigned for n in names):
                    found[code_of(branch.test)] = None
            self.steady[node] = list(found)
        return self.steady[node]

    def _one_loop(self, node: cst.For | cst.While, state: State) -> State | None:
        state = self._events(node.iter if isinstance(node, cst.For) else node.test, state)
        endless = isinstance(node, cst.While) and code_of(node.test) in ("True", "1")
        loop = Loop()
        self.loops.append(loop)
        begins: State | None = state
        ends: State | None = None
        for _ in range(3):
            before = begins
            after = self._block(node.body.body, dict(begins or {}))
            ends = _join([after, *loop.continued])
            begins = _join([state, ends])
            if begins == before:
                break
        self.loops.pop()
        left = None if endless else begins
        if self._surely_runs(node):
            # A loop over parameters or optimizers has something to go round for.
            left = ends
        if node.orelse is not None and left is not None:
            left = self._block(node.orelse.body.body, left)
        return _join([left, *loop.broken])

    def _surely_runs(self, node: cst.For | cst.While) -> bool:
        if not isinstance(node, cst.For):
            return False
        return "param" in code_of(node.iter) or bool(self._ids(node.iter)) or self.facts.is_model(node.iter)

    def _with(self, node: cst.With, state: State) -> State | None:
        names: set[str] = set()
        scales = False
        for item in node.items:
            call = item.item
            if isinstance(call, cst.Call) and self.facts.symbol(call.func) in SCALE_LOSS:
                scales = True
                if item.asname is not None:
                    names.add(code_of(item.asname.name))
                state = self._events(call.args[0].value, state) if call.args else state
                state = self._scale(call, state, node)
            else:
                state = self._events(call, state)
        if scales:
            self.blocks.append(names)
        result = self._block(node.body.body, state)
        if scales:
            self.blocks.pop()
        return result

    def _try(self, node: cst.Try | cst.TryStar, state: State) -> State | None:
        left = self._block(node.body.body, dict(state))
        failed = _join([state, left])
        ends = []
        for handler in node.handlers:
            ends.append(self._block(handler.body.body, dict(failed or state)))
        if node.orelse is not None and left is not None:
            left = self._block(node.orelse.body.body, left)
        result = _join([left, *ends])
        if node.finalbody is not None:
            result = self._block(node.finalbody.body.body, dict(result or failed or state)) if result else None
        return result

    # Events.

    def _events(self, node: cst.CSTNode, state: State) -> State:
        if node not in self.ordered_events:
            self.ordered_events[node] = list(_in_order(node))
        for event in self.ordered_events[node]:
            if isinstance(event, cst.Call):
                state = self._call(event, state)
            elif isinstance(event, cst.Attribute) and self._is_of_parameter(event):
                state = self._read(None, state) if not self._clears(event) else self._clear(None, state)
        return state

    def _is_of_parameter(self, grad: cst.Attribute) -> bool:
        """Whether a gradient may be one of a parameter: not of a variable that is assigned some other tensor."""
        if not isinstance(grad.value, cst.Name):
            return True
        return self.file.variable(grad.value) not in self.tensors

    def _assigned_tensors(self) -> set[Variable | None]:
        """Variables that an assignment makes from something else than parameters."""
        found: set[Variable | None] = set()
        for node in self.file.of_type(cst.Assign):
            text = code_of(node.value)
            made = isinstance(node.value, cst.Call | cst.BinaryOperation)
            if made and "param" not in text.lower() and not any(name in text for name in ("weight", "bias", "next(")):
                found |= {self.file.variable(target.target) for target in node.targets}
        return found

    def _clears(self, grad: cst.Attribute) -> bool:
        """Whether a statement sets a gradient to None or zero: ``p.grad = None``, ``p.grad.zero_()``."""
        node: cst.CSTNode = grad
        parent = self.file.parents[node]
        while isinstance(parent, cst.Attribute):
            if parent.attr.value == "zero_":
                return True
            node, parent = parent, self.file.parents[parent]
        if isinstance(parent, cst.AssignTarget):
            assign = self.file.parents[parent]
            return isinstance(assign, cst.Assign) and code_of(assign.value) == "None"
        return False

    def _call(self, call: cst.Call, state: State) -> State:
        name = last_name(call.func)
        symbol = self.facts.symbol(call.func) or ""
        base = call.func.value if isinstance(call.func, cst.Attribute) else None
        if symbol == "apex.amp.initialize":
            return dict.fromkeys(state, frozenset({CLEAR}))
        if symbol in SCALE_LOSS:
            return self._scale(call, state, call)
        if symbol in MASTER_PARAMS:
            return self._master_params(call, state)
        if symbol.startswith("apex."):
            return state
        callee = self.facts.flows.callee(call)
        if callee is not None:
            return self._enter(call, *callee, state) if callee[0] in self.interesting else state
        if name == "step" and base is not None:
            return self._step(call, base, state)
        if CLEARS.search(name):
            return self._clear(base if name == "zero_grad" else None, state)
        if name == "backward" and base is not None and not self.facts.is_model(base):
            return self._backward(call, base, state)
        for meant in self._functions_meant(call.func):
            if isinstance(meant, cst.Lambda):
                state = self._events(meant.body, state)
            elif READS.search(meant) and not READS_NOT.search(meant):
                return self._read(None, state, call)
        return state

    def _functions_meant(self, func: cst.BaseExpression) -> list[str | cst.Lambda]:
        """The names of what a call may run, and lambdas: through imports, ``partial``, variables and parameters."""
        found: list[str | cst.Lambda] = [last_name(func), self.file.qualified_name(func).rpartition(".")[2]]
        variable = self.file.variable(func)
        # A method of some object is meant by its name alone.
        on_self = isinstance(func, cst.Attribute) and isinstance(func.value, cst.Name) and func.value.value == "self"
        if variable is None or not (isinstance(func, cst.Name) or on_self):
            return found
        if variable not in self._meant:
            self._meant[variable] = [
                meant
                for source in self.facts.ordered(self.facts.flows.sources([variable]))
                for meant in self._functions_in(source)
            ]
        return found + self._meant[variable]

    def _functions_in(self, variable: Variable) -> list[str | cst.Lambda]:
        """What a variable is called or assigned: a function's name, a lambda, the function of a ``partial``."""
        value = self.assigned.get(variable)
        if isinstance(value, cst.Lambda):
            return [value]
        if isinstance(value, cst.Call) and last_name(value.func) == "partial" and value.args:
            return [last_name(value.args[0].value)]
        return [variable[1]]

    def _enter(self, call: cst.Call, function: Function, skip_first: bool, state: State) -> State:
        self.calls += 1
        if self.calls > MOST_CALLS or any(frame.function is function for frame in self.frames):
            return state
        frame = Frame(function)
        scaled: set[str] = set()
        for parameter, value in self.facts.flows.bound(call, function, skip_first):
            if any(code_of(value) in names for names in self.blocks):
                scaled.add(parameter.name.value)
            ids = self._ids(value)
            variable = self.file.variable(parameter.name)
            if ids and variable is not None:
                frame.held[variable] = ids
        return self._frame(frame, function.body.body, state, scaled)

    def _ids(self, node: cst.CSTNode | None) -> frozenset[Variable]:
        """The optimizers that an expression may be, here."""
        if node is None:
            return frozenset()
        inner = elements(node) if isinstance(node, cst.BaseExpression) else None
        if inner is not None:
            return frozenset().union(*map(self._ids, inner))
        if isinstance(node, cst.Call):
            return self._elements_of(node)
        variable = self.file.variable(node)
        if variable is None or not self.facts.is_optimizer(node):
            return frozenset()
        for frame in reversed(self.frames):
            if variable in frame.held:
                return frame.held[variable]
        return self.facts.roots(variable)

    def _elements_of(self, call: cst.Call) -> frozenset[Variable]:
        """The optimizers that ``optimizers.values()``, ``reversed(optimizers)`` and the like go through."""
        name = last_name(call.func)
        if name in ("values", "items") and isinstance(call.func, cst.Attribute):
            return self._ids(call.func.value)
        if name in ("list", "reversed", "enumerate", "zip", "tuple"):
            return frozenset().union(*(self._ids(arg.value) for arg in call.args))
        return frozenset()

    def _scale(self, call: cst.Call, state: State, node: cst.CSTNode) -> State:
        ids = self._ids(self.facts.optimizer_of(call))
        if not ids:
            self._problem(node, NO_OPTIMIZER)
        loss = self.facts.loss_id(call)
        state = dict(state)
        for one in self.facts.ordered(ids):
            self.losses_of.setdefault(one, set()).add(loss)
            self.scaled_at.setdefault(one, node)
            phases = set()
            for phase in state.get(one, ()):
                if phase.kind == "unscaled":
                    self.refused |= phase.places
                elif phase.kind == "spent":
                    refused = {place for place in phase.places if not self._is_updated(one, place)}
                    self.refused |= refused
                    self.refused_for_cleared |= refused
                self._convert(phase.plain, one)
                stale = phase.stale | {node} if phase.kind == "stepped" else phase.stale
                over = phase.over if phase.kind == "scaled" else frozenset()
                losses = phase.losses if phase.kind == "scaled" else frozenset()
                phases.add(Phase("scaled", over=over, stale=stale, losses=losses | {loss}))
            state[one] = frozenset(phases)
        return state

    def _is_updated(self, one: Variable, place: cst.CSTNode) -> bool:
        """Whether the step may be left out after ``unscale_``, and an update follows all the same."""
        if place not in self.unscales:
            return False
        unscaled = self.unscales[place].path
        return any(one in step.ids and is_beside(unscaled, step.path, self.file) for step in self.steps.values())

    def _backward(self, call: cst.Call, base: cst.BaseExpression, state: State) -> State:
        loss = call.args[0].value if is_autograd(base) and call.args else base
        if any(code_of(loss) in names for names in self.blocks):
            self.backward_of_scaled.add(call)
            return state
        state = dict(state)
        converted = self.scaled_backward.get(call, set())
        for one, phases in state.items():
            if one in converted:
                state[one] = frozenset(Phase("scaled") if p.kind != "scaled" else p for p in phases)
            else:
                state[one] = frozenset(p._replace(plain=p.plain | {call}) for p in phases)
        return state

    def _step(self, call: cst.Call, base: cst.BaseExpression, state: State) -> State:
        ids = self._ids(base)
        if not ids:
            return self._other_step(call, base, state)
        for arg in call.args:
            state = self._closure(arg.value, state)
        state = dict(state)
        step = self.steps.setdefault(call, Step(call, tuple(self.path)))
        step.ids |= ids
        for one in self.facts.ordered(ids):
            phases = state.get(one, frozenset())
            scaled = [p for p in phases if p.kind in ("scaled", "unscaled") or (p.kind == "entry" and not p.plain)]
            step.plain = step.plain or any(p not in scaled and (p.plain or p.kind == "clear") for p in phases)
            step.scaled = step.scaled or bool(scaled)
            step.losses |= self._losses(scaled, one)
            for phase in phases:
                if scaled:
                    self._convert(phase.plain, one)
                for node in phase.stale:
                    self._problem(node, NOT_CLEARED)
                for other in phase.over:
                    if other in self.steps and other is not call:
                        self.steps[other].later.add(call)
            state[one] = frozenset(p if p == CLEAR else Phase("stepped") for p in phases)
        for one in state.keys() - ids:
            state[one] = frozenset(p._replace(over=p.over | {call}) if p.kind in PENDING else p for p in state[one])
        return state

    def _closure(self, node: cst.BaseExpression, state: State) -> State:
        """A closure that a step calls."""
        function = self.facts.flows.functions.get(self.file.variable(node) or (None, ""))
        if function is None or any(frame.function is function for frame in self.frames):
            return state
        return self._frame(Frame(function), function.body.body, state)

    def _other_step(self, call: cst.Call, base: cst.BaseExpression, state: State) -> State:
        """A step of something else: an optimizer beside amp takes the plain gradients, a scheduler nothing."""
        name = last_name(base)
        if OTHER_STEPS.search(name) or self._made_by_scheduler(base) or not OPTIMIZER.search(name):
            return state
        return {one: frozenset(p._replace(plain=frozenset()) for p in phases) for one, phases in state.items()}

    def _made_by_scheduler(self, base: cst.BaseExpression) -> bool:
        variable = self.file.variable(base)
        for node in self.file.of_type(cst.Assign):
            made = isinstance(node.value, cst.Call) and OTHER_CLASSES.search(last_name(node.value.func))
            if made and any(self.file.variable(target.target) == variable for target in node.targets):
                return True
        return False

    def _clear(self, base: cst.BaseExpression | None, state: State) -> State:
        ids: Iterable[Variable] = state.keys()
        if base is not None:
            ids = self._ids(base) or self._optimizers_of_model(base) or state.keys()
        cleared = set(ids)
        return {one: frozenset(map(_cleared, phases)) if one in cleared else phases for one, phases in state.items()}

    def _optimizers_of_model(self, base: cst.BaseExpression) -> set[Variable]:
        text = code_of(base)
        if text not in self.facts.model_of.values():
            return set()
        return {root for v, model in self.facts.model_of.items() if model == text for root in self.facts.roots(v)}

    def _master_params(self, call: cst.Call, state: State) -> State:
        """``amp.master_params(optimizer)`` that is handed to a function, which may read their gradients."""
        parent = self.file.parents[call]
        if isinstance(parent, cst.Arg):
            outer = self.file.parents[parent]
            if isinstance(outer, cst.Call) and last_name(outer.func) in ("list", "tuple", "len", "iter", "set"):
                return state
            if isinstance(outer, cst.Call) and self.facts.flows.callee(outer) is None:
                return self._read(self._ids(argument(call, 0, "optimizer")), state, outer)
        return state

    def _read(self, ids: Iterable[Variable] | None, state: State, call: cst.Call | None = None) -> State:
        """Gradients are read or edited: by then they must be unscaled."""
        if self.blocks:
            return state
        named = set(ids) if ids else self._named_in(call)
        # A name that leads to no scaled gradients may mean another optimizer than it seems to.
        wanted = {one for one in named if any(p.kind in PENDING for p in state.get(one, ()))}
        if not wanted:
            wanted = {one for one, phases in state.items() if any(p.kind == "scaled" for p in phases)}
        if not wanted:
            wanted = {one for one, phases in state.items() if any(p.kind in PENDING for p in phases)}
        return self._unscale(wanted, state, None, call)

    def _named_in(self, call: cst.Call | None) -> set[Variable]:
        """The optimizers whose gradients a call reads, by its arguments."""
        found: set[Variable] = set()
        for arg in call.args if call is not None else ():
            value = arg.value
            if isinstance(value, cst.Call) and self.facts.symbol(value.func) in MASTER_PARAMS:
                found |= self._ids(argument(value, 0, "optimizer"))
            elif isinstance(value, cst.Call) and last_name(value.func) == "parameters":
                if isinstance(value.func, cst.Attribute):
                    found |= self._optimizers_of_model(value.func.value)
            else:
                found |= self._ids(value)
        return found

    def _unscale(
        self, ids: Iterable[Variable], state: State, forced: cst.CSTNode | None, reader: cst.Call | None = None
    ) -> State:
        state = dict(state)
        for one in self.facts.ordered(ids):
            phases = state.get(one, frozenset())
            waiting = [p for p in phases if p.kind == "scaled" or (p.kind == "entry" and not p.plain)]
            done = [p for p in phases if p.kind == "unscaled"]
            if done and reader is not None:
                self.unscaled_clips.add(reader)
            if not waiting:
                continue
            place = self._place(one, reader)
            if place is None:
                continue
            self._convert(frozenset().union(*(p.plain for p in waiting)), one)
            if done:
                self._hoist(one, place, done)
            place.losses |= self._losses(waiting, one)
            unscaled = Phase("unscaled", places=frozenset({place.statement}))
            state[one] = frozenset(
                unscaled._replace(over=p.over, stale=p.stale, losses=p.losses) if p in waiting else p for p in phases
            )
        return state

    def _losses(self, phases: Iterable[Phase], one: Variable) -> set[str]:
        """The losses that gradients come from: any of the optimizer's where the path does not tell."""
        found: set[str] = set()
        for phase in phases:
            found |= self.losses_of.get(one, set()) if phase.kind == "entry" else phase.losses
        return found

    def unstepped(self) -> list[cst.CSTNode]:
        """The scaled losses of optimizers whose step is not seen."""
        stepped = {one for step in self.steps.values() if step.scaled for one in step.ids}
        return [node for one, node in self.scaled_at.items() if one not in stepped]

    def _place(self, one: Variable, reader: cst.Call | None) -> Unscale | None:
        """The statement before which an optimizer is unscaled: in the innermost function that can name it."""
        for number in range(len(self.frames) - 1, -1, -1):
            statements = [i for i, at in enumerate(self.path) if at.frame == number]
            if not statements:
                continue
            index = statements[-1]
            name = self._name_of(one, number, index) or self._list_of(one, number)
            if name is None:
                continue
            statement = self.path[index].statement
            for number_of_refused in statements:
                outer = self.path[number_of_refused].statement
                if outer not in self.refused:
                    continue
                accumulates = outer not in self.refused_for_cleared
                if accumulates and reader is not None and is_plain_clip(reader, self.file):
                    self.scaled_clips.add(reader)
                else:
                    self._problem(statement, ACCUMULATED)
                return None
            path = tuple(self.path[: index + 1])
            place = self.unscales.setdefault(statement, Unscale(path, statement, self.frames[number].function))
            place.names[name] = None
            place.ids.add(one)
            return place
        self._problem(self.path[-1].statement, UNNAMED)
        return None

    def _name_of(self, one: Variable, number: int, index: int) -> str | None:
        """An expression for an optimizer in a function that the walk is in, before a statement on the path."""
        around = {at.statement for at in self.path[:index]}
        frame = self.frames[number]
        inner = self.frames[number + 1 :]
        del self.frames[number + 1 :]
        found = None
        for node in [*self.uses.get(frame.function, ()), *self._visible(frame.function)]:
            if self.file.variable(node) in self.facts.containers and not isinstance(node, cst.Subscript):
                continue
            if self.file.variable(node) not in self.facts.used_as_optimizers:
                continue
            loops = self.facts.loops.get(self.file.variable(node), [])
            if loops and not around.intersection(loops):
                continue
            if self._ids(node) == {one} and isinstance(node, cst.Name | cst.Attribute | cst.Subscript):
                found = code_of(node)
                break
        self.frames.extend(inner)
        return found

    def _list_of(self, one: Variable, number: int) -> str | None:
        """A list of optimizers that holds one, in a function that the walk is in."""
        for node in self.uses.get(self.frames[number].function, ()):
            if self.file.variable(node) in self.facts.containers and one in self._ids(node):
                return f"*{code_of(node)}"
        return None

    def _visible(self, function: Function | None) -> list[cst.BaseExpression]:
        """Expressions of other functions that mean the same here: globals, attributes of ``self``."""
        found: list[cst.BaseExpression] = []
        owner = self.file.class_of(function)
        for other, nodes in self.uses.items():
            for node in nodes:
                variable = self.file.variable(node)
                is_global = isinstance(node, cst.Name) and variable is not None and isinstance(variable[0], GlobalScope)
                same_class = owner is not None and self.file.class_of(other) is owner
                if is_global or (same_class and code_of(node).startswith("self.")):
                    found.append(node)
        return found

    # One ``unscale_`` for several readers.

    def _hoist(self, one: Variable, place: Unscale, done: list[Phase]) -> None:
        """Unscale before the statement that holds this place and those where it was done on other paths."""
        for other in {p for phase in done for p in phase.places}:
            if other not in self.unscales:
                continue
            path = self.unscales[other].path
            index = meeting(self.file, path, place.path)
            if other is place.statement:
                index = _innermost_loop(path)
            self.forced.setdefault(path[index].statement, set()).add(one)

    def _hoist_branches(self) -> None:
        """Unscale before an ``if`` instead of in several of its branches, where gradients are scaled before it."""
        places = list(self.unscales.values())
        for first in places:
            for second in places:
                if first is second:
                    continue
                common = _common(first.path, second.path) - 1
                if common < 0 or not isinstance(first.path[common].statement, cst.If):
                    continue
                statement = first.path[common].statement
                if self.file.function(statement) is not first.function:
                    continue
                for one in first.ids & second.ids:
                    phases = self.entered[statement].get(one, frozenset())
                    if phases and all(p.kind in ("scaled", "entry") and not p.plain for p in phases):
                        self.forced.setdefault(statement, set()).add(one)

    def _convert(self, calls: frozenset[cst.CSTNode], one: Variable) -> None:
        for call in sorted(calls, key=self.file.order):
            if call in self.backward_of_scaled:
                self._problem(call, BOTH)
                continue
            self.scaled_backward.setdefault(call, set()).add(one)

    def _problem(self, node: cst.CSTNode, message: str) -> None:
        self.problems[self.file.statement(node), message] = None


NO_OPTIMIZER = (
    "which optimizer steps with this loss is not seen: call __scaler__.step(optimizer) in the place of its step(), "
    "then __scaler__.update()"
)
NOT_CLEARED = (
    "the gradients of the step before may still be here, unscaled, and scaled ones are added to them: "
    "call zero_grad() after each step"
)
ACCUMULATED = (
    "these gradients are scaled, and on some path more are added without a step between: divide a norm of them by "
    "__scaler__.get_scale(), or call __scaler__.unscale_(optimizer) before this line only where the step follows, and "
    "__scaler__.update() where it is left out"
)
BOTH = (
    "this gets scaled and unscaled losses, and their gradients are stepped together: hand __scaler__.scale(loss) to it "
    "everywhere"
)
UNNAMED = "gradients are scaled here; call __scaler__.unscale_(optimizer) before they are read, once before each step"


def is_plain_clip(call: cst.Call, file: File) -> bool:
    """Whether a call is torch's clipping of gradients, with a threshold."""
    known = file.qualified_name(call.func) in PLAIN_CLIPS and not any(arg.star for arg in call.args)
    return known and clip_threshold(call) is not None


def clip_threshold(call: cst.Call) -> cst.BaseExpression | None:
    """The argument of torch's clipping that says how large gradients may be."""
    return argument(call, 1, "max_norm" if last_name(call.func) == "clip_grad_norm_" else "clip_value")


def is_autograd(base: cst.BaseExpression) -> bool:
    """Whether ``base.backward`` is torch's function, which is given the loss."""
    return code_of(base) in ("torch.autograd", "autograd")


def _assigned_names(node: cst.CSTNode) -> Iterator[cst.Name]:
    """The names that a statement binds."""
    if isinstance(node, cst.AssignTarget | cst.AugAssign | cst.AnnAssign | cst.For | cst.NamedExpr):
        for inner in descendants(node.target):
            if isinstance(inner, cst.Name):
                yield inner
                break
            if isinstance(inner, cst.Attribute):
                yield inner.attr
                break
        for one in elements(node.target) or ():
            yield from (n for n in descendants(one) if isinstance(n, cst.Name))


def _cleared(phase: Phase) -> Phase:
    """The phase after the gradients were cleared."""
    return Phase("spent", places=phase.places) if phase.kind in ("unscaled", "spent") else CLEAR


def meeting(file: File, one: Path, other: Path) -> int:
    """The place in ``one`` of the statement that stands in the same block as the other path's, or holds both."""
    common = _common(one, other)
    if common == min(len(one), len(other)):
        return common - 1
    blocks = [file.parents.get(file.line_of(path[common].statement)) for path in (one, other)]
    return common if blocks[0] is blocks[1] else common - 1


def is_beside(place: Path, step: Path, file: File) -> bool:
    """Whether a step may be left out after ``unscale_``: the update then stands beside that call, for both cases."""
    index = meeting(file, place, step)
    same_block = index == len(place) - 1 and index < len(step)
    if not same_block:
        return False
    blocks = [file.parents.get(file.line_of(path[index].statement)) for path in (place, step)]
    return blocks[0] is blocks[1]


def _innermost_loop(path: Path) -> int:
    """The place of the loop that a statement stands in; its own place where there is none."""
    for index in range(len(path) - 2, -1, -1):
        if isinstance(path[index].statement, cst.For | cst.While):
            return index
    return len(path) - 1


def _common(one: Path, other: Path) -> int:
    """How many statements two paths share from the beginning."""
    count = 0
    for first, second in zip(one, other, strict=False):
        if first.statement is not second.statement:
            break
        count += 1
    return count


def _join(states: Iterable[State | None]) -> State | None:
    """What holds where paths meet; None where none arrives."""
    found: State | None = None
    for state in states:
        if state is None:
            continue
        if found is None:
            found = dict(state)
            continue
        for one, phases in state.items():
            found[one] = found.get(one, frozenset()) | phases
    return found


def _is_none_test(node: cst.Comparison) -> bool:
    return code_of(node.comparisons[0].comparator) == "None"


def _in_order(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Calls and ``.grad`` of an expression in the order of their evaluation; functions are not entered."""
    if isinstance(node, cst.Lambda | cst.FunctionDef | cst.ClassDef):
        return
    if isinstance(node, cst.Comparison) and isinstance(node.left, cst.Attribute) and _is_none_test(node):
        return
    if isinstance(node, cst.Assign):
        yield from _in_order(node.value)
        for target in node.targets:
            yield from _in_order(target.target)
        return
    for child in children(node):
        yield from _in_order(child)
    if isinstance(node, cst.Call) or (isinstance(node, cst.Attribute) and node.attr.value == "grad"):
        yield node
