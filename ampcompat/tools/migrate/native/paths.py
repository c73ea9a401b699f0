"""One walk over the paths of each function: what the gradients of each optimizer are, at each statement.

The walk follows a path through branches, loops and calls of the file's own functions (``control``). It knows, for each
optimizer that is under amp, in which phase its gradients are (``phases``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import libcst as cst

from ampcompat.tools.migrate.native.control import (
    ControlFlow,
    Frame,
    Path,
    innermost_loop,
    is_beside,
    meeting,
    shared_length,
    start_of_function,
)
from ampcompat.tools.migrate.native.facts import MASTER_PARAMS, OPTIMIZER, OTHER_STEPS, SCALE_LOSS, Facts
from ampcompat.tools.migrate.native.file import Function, Variable
from ampcompat.tools.migrate.native.gradients import (
    CLEARS,
    READS,
    READS_NOT,
    Gradients,
    is_autograd,
    is_norm,
    is_plain_clip,
)
from ampcompat.tools.migrate.native.nodes import argument, descendants, elements, last_name
from ampcompat.tools.migrate.native.optimizers import Optimizers
from ampcompat.tools.migrate.native.phases import CLEAR, ENTRY, PENDING, Phase, State, cleared, join
from ampcompat.tools.migrate.text import code_of

#: More paths than this are not followed.
MOST_CALLS = 3000
MOST_ROUNDS = 12


@dataclass
class Step:
    """A step of an optimizer, with all that was seen there.

    Attributes:
        call: ``optimizer.step()``.
        path: One way to it.
        scaled: Whether gradients may be scaled there.
        unseen: Whether there may be none that this file computes.
        ids: The optimizers that may step here.
        later: Steps that the update must wait for.
    """

    call: cst.Call
    path: Path
    scaled: bool = False
    unseen: bool = False
    ids: frozenset[Variable] = frozenset()
    later: set[cst.CSTNode] = field(default_factory=set)


@dataclass
class Unscale:
    """A call of ``unscale_`` that is needed before a statement."""

    path: Path
    statement: cst.CSTNode
    function: Function | None
    names: dict[str, None] = field(default_factory=dict)
    ids: set[Variable] = field(default_factory=set)


class Walk(ControlFlow):
    """The walk over all functions of a file.

    Attributes:
        steps: The optimizer steps, by their calls.
        unscales: Where ``unscale_`` is needed, by the statement before which it stands.
        scaled_clips: Calls that clip or measure gradients while these are scaled, since more are added before the step.
        scaled_backward: Plain ``backward()`` calls whose gradients are stepped together with scaled ones.
        problems: What ``GradScaler`` would get wrong without a word: statement and message.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.facts = facts
        self.file = facts.file
        self.gradients = Gradients(facts)
        self.forced: dict[cst.CSTNode, set[Variable]] = {}
        self.refused: set[cst.CSTNode] = set()
        #: Those after which the gradients may be cleared, and the step left out.
        self.refused_for_cleared: set[cst.CSTNode] = set()
        self.scaled_backward: dict[cst.CSTNode, set[Variable]] = {}
        self.problems: dict[tuple[cst.CSTNode, str], None] = {}
        self.interesting = self._interesting()
        self.optimizers = Optimizers(facts, self.frames)
        self._run()

    # What there is to walk.

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
            if function is not None and self.is_event(node) and not self.facts.in_optimizer(function):
                found.add(function)
        waiting = list(found)
        while waiting:
            for caller in calls[waiting.pop()]:
                if caller is not None and caller not in found:
                    found.add(caller)
                    waiting.append(caller)
        self.called = {callee for callee, callers in calls.items() if callers - {callee}}
        return found

    def _run(self) -> None:
        for _ in range(MOST_ROUNDS):
            before = (
                {k: set(v) for k, v in self.forced.items()}, len(self.refused), len(self.refused_for_cleared),
                {k: set(v) for k, v in self.scaled_backward.items()},
            )  # fmt: skip
            self._once()
            self.refused |= self.newly_refused
            self.refused_for_cleared |= self.newly_refused_for_cleared
            self._hoist_branches()
            after = (self.forced, len(self.refused), len(self.refused_for_cleared), self.scaled_backward)
            if before == after:
                break
        self._mark_exits()
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
        self.exits: dict[Path, set[Variable]] = {}
        self.newly_refused: set[cst.CSTNode] = set()
        self.newly_refused_for_cleared: set[cst.CSTNode] = set()
        self.scaled_at: dict[Variable, cst.CSTNode] = {}
        self.backward_of_scaled: set[cst.CSTNode] = set()
        self.calls = 0
        self.blocks: list[set[str]] = []
        clear = dict.fromkeys(self.optimizers.all, frozenset({CLEAR}))
        self._function(Frame(None), self.file.module.body, clear)
        for function in sorted(self.interesting - self.called, key=self.file.order):
            self._from_its_start(function)
        for function in sorted(self.interesting, key=self.file.order):
            if function not in self.seen:  # called from where the walk does not go, as from a lambda
                self._from_its_start(function)

    def _from_its_start(self, function: Function) -> None:
        """Walk a function that is called from somewhere else."""
        entry = dict.fromkeys(self.optimizers.all, frozenset({ENTRY}))
        self._function(Frame(function), function.body.body, entry)

    # What the statements do.

    def is_event(self, node: cst.CSTNode) -> bool:
        """Whether a node may touch gradients."""
        return self.gradients.is_event(node)

    def arrive(self, statement: cst.CSTNode, state: State) -> State:
        """The state in which a statement begins: after an ``unscale_`` that several paths behind it need."""
        self.entered[statement] = join([self.entered.get(statement), state]) or state
        if statement in self.forced and statement not in self.refused:
            return self._unscale(self.forced[statement], state, statement)
        return state

    def surely_runs(self, node: cst.For) -> bool:
        """Whether a loop has something to go round for: parameters, or optimizers."""
        if any(isinstance(n, cst.Call) and self.facts.symbol(n.func) in SCALE_LOSS for n in descendants(node.body)):
            return True  # without a loss the scaler's step raises
        return (
            "param" in code_of(node.iter) or bool(self.optimizers.meant_by(node.iter)) or self.facts.is_model(node.iter)
        )

    def leave(self, node: cst.CSTNode, state: State) -> State:
        """The state after a ``return``, ``break`` or ``continue``."""
        unscaled = {one for one, phases in state.items() if any(p.kind in ("unscaled", "spent") for p in phases)}
        self.exits.setdefault(tuple(self.path), set()).update(unscaled)
        return state

    def _mark_exits(self) -> None:
        """Mark the exits that leave out a step after ``unscale_``: one in the same loop, or function, behind them."""
        for path, unscaled in self.exits.items():
            node = path[-1].statement
            inside = start_of_function(path) - 1 if isinstance(node, cst.Return) else innermost_loop(path)
            steps = [step for step in self.steps.values() if step.ids & unscaled]
            if any(self._stands_behind(step.path, path, inside) for step in steps):
                self._problem(node, LEFT_OUT)

    def _stands_behind(self, step: Path, node: Path, inside: int) -> bool:
        """Whether a step stands behind a node in the loop or function that begins at a place of its path."""
        common = shared_length(step, node)
        if common <= inside or common == len(step):
            return False
        first, second = (path[common].statement for path in (node, step))
        same_function = self.file.function(first) is self.file.function(second)
        return same_function and self.file.order(second) > self.file.order(node[-1].statement)

    def _function(
        self, frame: Frame, body: Iterable[cst.CSTNode], state: State, scaled: set[str] | None = None
    ) -> State:
        """The state after a function, some of whose parameters are scaled losses."""
        blocks, self.blocks = self.blocks, [scaled] if scaled else []
        self.seen.add(frame.function)
        left = self.follow(frame, body, state)
        self.blocks = blocks
        return left

    def block(self, node: cst.With, state: State) -> State | None:
        """The state after a ``with`` statement, which may scale a loss."""
        names: set[str] = set()
        scales = False
        for item in node.items:
            call = item.item
            if isinstance(call, cst.Call) and self.facts.symbol(call.func) in SCALE_LOSS:
                scales = True
                if item.asname is not None:
                    names.add(code_of(item.asname.name))
                state = self.events(call.args[0].value, state) if call.args else state
                state = self._scale(call, state, node)
            else:
                state = self.events(call, state)
        if scales:
            self.blocks.append(names)
        result = self.statements(node.body.body, state)
        if scales:
            self.blocks.pop()
        return result

    # Events.

    def events(self, node: cst.CSTNode, state: State) -> State:
        """The state after an expression or a small statement."""
        for event in self.gradients.events(node):
            if isinstance(event, cst.Call):
                state = self._call(event, state)
            elif isinstance(event, cst.Attribute) and self.gradients.is_of_parameter(event):
                state = self._read(None, state) if not self.gradients.clears(event) else self._clear(None, state)
        return state

    def _call(self, call: cst.Call, state: State) -> State:
        name = last_name(call.func)
        symbol = self.facts.symbol(call.func) or ""
        base = call.func.value if isinstance(call.func, cst.Attribute) else None
        if symbol.startswith("apex."):
            return self._call_of_apex(call, symbol, state)
        callee = self.facts.flows.callee(call)
        if is_norm(call, callee[0] if callee is not None else None):
            self.seen.add(callee[0] if callee is not None else None)
            return self._read(None, state, call)
        if callee is not None:
            return self._enter(call, *callee, state) if callee[0] in self.interesting else state
        if name == "step" and base is not None:
            return self._step(call, base, state)
        if CLEARS.search(name):
            return self._clear(base if name == "zero_grad" else None, state)
        if name == "backward" and base is not None and not self.facts.is_model(base):
            return self._backward(call, base, state)
        return self._unknown(call, state)

    def _call_of_apex(self, call: cst.Call, symbol: str, state: State) -> State:
        if symbol == "apex.amp.initialize":
            return dict.fromkeys(state, frozenset({CLEAR}))
        if symbol in SCALE_LOSS:
            return self._scale(call, state, call)
        if symbol in MASTER_PARAMS:
            return self._master_params(call, state)
        return state

    def _unknown(self, call: cst.Call, state: State) -> State:
        """The state after a call of something else, which may read gradients as its name says."""
        for meant in self.gradients.functions_meant(call.func):
            if isinstance(meant, cst.Lambda):
                state = self.events(meant.body, state)
            elif READS.search(meant) and not READS_NOT.search(meant):
                return self._read(None, state, call)
        return state

    def _enter(self, call: cst.Call, function: Function, already: int, state: State) -> State:
        self.calls += 1
        if self.calls > MOST_CALLS or any(frame.function is function for frame in self.frames):
            return state
        frame = Frame(function)
        scaled: set[str] = set()
        for parameter, value in self.facts.flows.bound(call, function, already):
            if any(code_of(value) in names for names in self.blocks):
                scaled.add(parameter.name.value)
            ids = self.optimizers.meant_by(value)
            variable = self.file.variable(parameter.name)
            if ids and variable is not None:
                frame.held[variable] = ids
        return self._function(frame, function.body.body, state, scaled)

    def _scale(self, call: cst.Call, state: State, node: cst.CSTNode) -> State:
        ids = self.optimizers.meant_by(self.facts.optimizer_of(call))
        if not ids:
            self._problem(node, NO_OPTIMIZER)
        state = dict(state)
        for one in self.facts.ordered(ids):
            self.scaled_at.setdefault(one, node)
            phases = set()
            for phase in state.get(one, ()):
                if phase.kind == "unscaled":
                    self.newly_refused |= phase.places
                elif phase.kind == "spent":
                    refused = {place for place in phase.places if not self._is_updated(one, place)}
                    self.newly_refused |= refused
                    self.newly_refused_for_cleared |= refused
                self._convert(phase.plain, one)
                stale = phase.stale | {node} if phase.kind == "stepped" else phase.stale
                over = phase.over if phase.kind == "scaled" else frozenset()
                phases.add(Phase("scaled", over=over, stale=stale))
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
        ids = self.optimizers.meant_by(base)
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
            step.unseen = step.unseen or CLEAR in phases
            step.scaled = step.scaled or bool(scaled)
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
        return self._function(Frame(function), function.body.body, state)

    def _other_step(self, call: cst.Call, base: cst.BaseExpression, state: State) -> State:
        """A step of something else: an optimizer beside amp takes the plain gradients, a scheduler nothing."""
        name = last_name(base)
        if OTHER_STEPS.search(name) or not OPTIMIZER.search(name):
            return state
        return {one: frozenset(p._replace(plain=frozenset()) for p in phases) for one, phases in state.items()}

    def _clear(self, base: cst.BaseExpression | None, state: State) -> State:
        ids: Iterable[Variable] = state.keys()
        if base is not None:
            ids = self.optimizers.meant_by(base) or self.optimizers.of_model(base) or state.keys()
        chosen = set(ids)
        return {one: frozenset(map(cleared, phases)) if one in chosen else phases for one, phases in state.items()}

    def _master_params(self, call: cst.Call, state: State) -> State:
        """``amp.master_params(optimizer)`` that is handed to a function, which may read their gradients."""
        parent = self.file.parents[call]
        if isinstance(parent, cst.Arg):
            outer = self.file.parents[parent]
            if isinstance(outer, cst.Call) and last_name(outer.func) in ("list", "tuple", "len", "iter", "set"):
                return state
            if isinstance(outer, cst.Call) and self.facts.flows.callee(outer) is None:
                return self._read(self.optimizers.meant_by(argument(call, 0, "optimizer")), state, outer)
        return state

    def _read(self, ids: Iterable[Variable] | None, state: State, call: cst.Call | None = None) -> State:
        """Gradients are read or edited: by then they must be unscaled."""
        if self.blocks:
            return state
        # A name that leads to no scaled gradients may mean another optimizer than it seems to.
        wanted = {one for one in ids or () if any(p.kind in PENDING for p in state.get(one, ()))}
        for kind in ("scaled", "unscaled", "entry"):
            if not wanted:
                wanted = {one for one, phases in state.items() if any(p.kind == kind for p in phases)}
        return self._unscale(wanted, state, None, call)

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
            if done and not self._is_of_each(place):
                self._hoist(one, place, done)
            unscaled = Phase("unscaled", places=frozenset({place.statement}))
            state[one] = frozenset(unscaled._replace(over=p.over, stale=p.stale) if p in waiting else p for p in phases)
        return state

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
            name = self.optimizers.name(one, number, tuple(self.path[:index]))
            if name is None:
                continue
            statement = self.path[index].statement
            for number_of_refused in statements:
                outer = self.path[number_of_refused].statement
                if outer not in self.refused:
                    continue
                accumulates = outer not in self.refused_for_cleared
                if accumulates and reader is not None and self._can_stay_scaled(reader):
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

    def _can_stay_scaled(self, reader: cst.Call) -> bool:
        """Whether what a call computes of scaled gradients is that of unscaled ones times the scale."""
        callee = self.facts.flows.callee(reader)
        return is_plain_clip(reader, self.file) or is_norm(reader, callee[0] if callee is not None else None)

    # One ``unscale_`` for several readers.

    def _hoist(self, one: Variable, place: Unscale, done: list[Phase]) -> None:
        """Unscale before the statement that holds this place and those where it was done on other paths."""
        for other in {p for phase in done for p in phase.places}:
            if other not in self.unscales:
                continue
            path = self.unscales[other].path
            index = meeting(self.file, path, place.path)
            if other is place.statement:
                index = innermost_loop(path)
            self.forced.setdefault(path[index].statement, set()).add(one)

    def _is_of_each(self, place: Unscale) -> bool:
        """Whether the loop around a place goes over optimizers, each of which is unscaled in a round of its own."""
        loop = place.path[innermost_loop(place.path)].statement
        if not isinstance(loop, cst.For):
            return False
        return place.names.keys() <= {code_of(one) for one in elements(loop.target) or [loop.target]}

    def _hoist_branches(self) -> None:
        """Unscale before an ``if`` instead of in several of its branches, where gradients are scaled before it."""
        places = list(self.unscales.values())
        for first in places:
            for second in places:
                if first is second:
                    continue
                common = shared_length(first.path, second.path) - 1
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
LEFT_OUT = "the step is left out after unscale_(): call __scaler__.update() before this line"
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
