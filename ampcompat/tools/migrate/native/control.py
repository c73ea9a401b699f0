"""Following the paths of a function: through branches, loops, ``try``, and to its ends; where two paths meet."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import libcst as cst

from ampcompat.tools.migrate.native.file import File, Function, Variable
from ampcompat.tools.migrate.native.nodes import descendants, elements
from ampcompat.tools.migrate.native.phases import State, join
from ampcompat.tools.migrate.text import code_of


class At(NamedTuple):
    """A statement on a path: the call of a function that led there, and the statement."""

    frame: int
    statement: cst.CSTNode


Path = tuple[At, ...]


def meeting(file: File, one: Path, other: Path) -> int:
    """The place in ``one`` of the statement that stands in the same block as the other path's, or holds both."""
    common = shared_length(one, other)
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


def innermost_loop(path: Path) -> int:
    """The place of the loop that a statement stands in; its own place where there is none."""
    for index in range(len(path) - 2, -1, -1):
        if isinstance(path[index].statement, cst.For | cst.While):
            return index
    return len(path) - 1


def start_of_function(path: Path) -> int:
    """The place of the first statement in the function that a path ends in."""
    return next(index for index, at in enumerate(path) if at.frame == path[-1].frame)


def shared_length(one: Path, other: Path) -> int:
    """How many statements two paths share from the beginning."""
    count = 0
    for first, second in zip(one, other, strict=False):
        if first.statement is not second.statement:
            break
        count += 1
    return count


#: As many tests are told apart in a loop.
MOST_TESTS = 3


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


class ControlFlow(ABC):
    """Goes over the statements of a function as they may run, with a state that each of them changes.

    Attributes:
        path: The statements that it is in, from the outside.
        frames: The functions that it is in.
        loops: The loops of the innermost function that it is in.
    """

    def __init__(self) -> None:
        self.path: list[At] = []
        self.frames: list[Frame] = []
        self.loops: list[Loop] = []
        self._decided: dict[str, bool] = {}
        self._steady: dict[cst.CSTNode, list[str]] = {}

    @abstractmethod
    def arrive(self, statement: cst.CSTNode, state: State) -> State:
        """The state in which a statement begins."""

    @abstractmethod
    def events(self, node: cst.CSTNode, state: State) -> State:
        """The state after an expression or a small statement."""

    @abstractmethod
    def block(self, node: cst.With, state: State) -> State | None:
        """The state after a ``with`` statement; None where none goes on behind it."""

    @abstractmethod
    def is_event(self, node: cst.CSTNode) -> bool:
        """Whether a node may change the state."""

    @abstractmethod
    def surely_runs(self, node: cst.For) -> bool:
        """Whether the body of a loop runs at least once."""

    @abstractmethod
    def leave(self, node: cst.CSTNode, state: State) -> State:
        """The state after a ``return``, ``break`` or ``continue``."""

    def follow(self, frame: Frame, body: Iterable[cst.CSTNode], state: State) -> State:
        """The state where a function ends that begins in ``state``."""
        loops, self.loops = self.loops, []
        decided, self._decided = self._decided, {t: v for t, v in self._decided.items() if "." in t}
        self.frames.append(frame)
        left = self.statements(body, state)
        self.frames.pop()
        self.loops = loops
        self._decided = decided
        return join([*frame.returned, *([left] if left is not None else [])]) or dict(state)

    def statements(self, body: Iterable[cst.CSTNode], state: State | None) -> State | None:
        """The state after the statements of a body; None where none goes on behind them."""
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
        result = self._inside(node, self.arrive(node, state))
        self.path.pop()
        return result

    def _inside(self, node: cst.CSTNode, state: State) -> State | None:
        if isinstance(node, cst.If):
            return self._if(node, state)
        if isinstance(node, cst.For | cst.While):
            return self._loop(node, state)
        if isinstance(node, cst.With):
            return self.block(node, state)
        if isinstance(node, cst.Try | cst.TryStar):
            return self._try(node, state)
        if isinstance(node, cst.Match):
            state = self.events(node.subject, state)
            return join([self.statements(case.body.body, dict(state)) for case in node.cases] + [state])
        state = self.events(node, state)
        if isinstance(node, cst.Raise):
            return None
        ends = self._ends_at(node)
        if ends is None:
            return state
        ends.append(self.leave(node, state))
        return None

    def _ends_at(self, node: cst.CSTNode) -> list[State] | None:
        """The states at exits like ``node``; None for a statement that is none."""
        if isinstance(node, cst.Return):
            return self.frames[-1].returned
        if isinstance(node, cst.Break) and self.loops:
            return self.loops[-1].broken
        if isinstance(node, cst.Continue) and self.loops:
            return self.loops[-1].continued
        return None

    def _if(self, node: cst.If, state: State) -> State | None:
        state = self.events(node.test, state)
        decided = self._decided.get(code_of(node.test)) if self._decided else None
        if decided is True:
            return self.statements(node.body.body, state)
        taken = None if decided is False else self.statements(node.body.body, dict(state))
        if isinstance(node.orelse, cst.If):
            return join([taken, self._if(node.orelse, dict(state))])
        if node.orelse is not None:
            return join([taken, self.statements(node.orelse.body.body, dict(state))])
        return join([taken, state])

    def _loop(self, node: cst.For | cst.While, state: State) -> State | None:
        """The loop, once for each outcome of the tests that do not change while it runs."""
        tests = [test for test in self._steady_tests(node) if test not in self._decided][:MOST_TESTS]
        ends = []
        for outcomes in itertools.product((True, False), repeat=len(tests)):
            self._decided.update(zip(tests, outcomes, strict=True))
            ends.append(self._one_loop(node, dict(state)))
        for test in tests:
            self._decided.pop(test)
        return join(ends)

    def _steady_tests(self, node: cst.For | cst.While) -> list[str]:
        """Tests inside of a loop on names that the loop does not assign, around what touches gradients."""
        if node not in self._steady:
            inner = list(descendants(node))
            assigned = {n.value for target in inner for n in _assigned_names(target)}
            found: dict[str, None] = {}
            for branch in inner:
                if not isinstance(branch, cst.If) or not any(self.is_event(n) for n in descendants(branch)):
                    continue
                names = [n for n in descendants(branch.test) if isinstance(n, cst.Name)]
                calls = any(isinstance(n, cst.Call) for n in descendants(branch.test))
                if not calls and not any(n.value in assigned for n in names):
                    found[code_of(branch.test)] = None
            self._steady[node] = list(found)
        return self._steady[node]

    def _one_loop(self, node: cst.For | cst.While, state: State) -> State | None:
        state = self.events(node.iter if isinstance(node, cst.For) else node.test, state)
        endless = isinstance(node, cst.While) and code_of(node.test) in ("True", "1")
        loop = Loop()
        self.loops.append(loop)
        begins: State | None = state
        ends: State | None = None
        for _ in range(3):
            before = begins
            after = self.statements(node.body.body, dict(begins or {}))
            ends = join([after, *loop.continued])
            begins = join([state, ends])
            if begins == before:
                break
        self.loops.pop()
        left = None if endless else begins
        if isinstance(node, cst.For) and self.surely_runs(node):
            # A loop over parameters or optimizers has something to go round for.
            left = ends
        if node.orelse is not None and left is not None:
            left = self.statements(node.orelse.body.body, left)
        return join([left, *loop.broken])

    def _try(self, node: cst.Try | cst.TryStar, state: State) -> State | None:
        left = self.statements(node.body.body, dict(state))
        failed = join([state, left])
        ends = []
        for handler in node.handlers:
            ends.append(self.statements(handler.body.body, dict(failed or state)))
        if node.orelse is not None and left is not None:
            left = self.statements(node.orelse.body.body, left)
        result = join([left, *ends])
        if node.finalbody is None:
            return result
        after = self.statements(node.finalbody.body.body, failed if result is None else result)
        return None if result is None else after


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
