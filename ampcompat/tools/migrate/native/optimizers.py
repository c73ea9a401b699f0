"""Which optimizers an expression means, and by which expression a function can name one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import libcst as cst
from libcst.metadata import GlobalScope

from ampcompat.tools.migrate.native.control import Frame, Path
from ampcompat.tools.migrate.native.facts import Facts
from ampcompat.tools.migrate.native.file import Function, Variable
from ampcompat.tools.migrate.text import code_of


class Optimizers:
    """The optimizers under amp of a file, as the functions that the walk is in see them.

    Attributes:
        frames: Those functions, from the outside.
        uses: Expressions of each function that are optimizers under amp.
        all: All optimizers.
    """

    def __init__(self, facts: Facts, frames: list[Frame]) -> None:
        self.facts = facts
        self.file = facts.file
        self.frames = frames
        self.uses = self._uses()
        self.all = facts.ordered(self._roots_of_all())

    def meant_by(self, node: cst.BaseExpression | None) -> frozenset[Variable]:
        """The optimizers that an expression may be, here."""
        if node is None or self.facts.in_optimizer(node):
            return frozenset()
        variables = filter(self.facts.holds_optimizer, self.facts.variables(node))
        return frozenset().union(*map(self._held_by, variables))

    def _held_by(self, variable: Variable) -> frozenset[Variable]:
        """The optimizers that a variable may hold: what a call gave it as a parameter, or all that flow into it."""
        for frame in reversed(self.frames):
            if variable in frame.held:
                return frame.held[variable]
        return self.facts.roots(variable)

    def of_model(self, base: cst.BaseExpression) -> set[Variable]:
        """The optimizers that were made of the parameters of a model."""
        text = code_of(base)
        if text not in self.facts.model_of.values():
            return set()
        return {root for v, model in self.facts.model_of.items() if model == text for root in self.facts.roots(v)}

    def name(self, one: Variable, number: int, path: Path) -> str | None:
        """An expression for an optimizer, where a path has led to.

        Args:
            one: The optimizer.
            number: Which of the functions that the walk is in is to name it.
            path: The statements around the place.
        """
        around = {at.statement for at in path}
        frame = self.frames[number]
        inner = self.frames[number + 1 :]
        del self.frames[number + 1 :]
        found = None
        for node in [*self.uses.get(frame.function, ()), *self._visible(frame.function)]:
            if self.file.variable(node) in self.facts.containers and not isinstance(node, cst.Subscript):
                continue
            loops = self.facts.loops.get(self.file.variable(node), [])
            if loops and not around.intersection(loops):
                continue
            if self.meant_by(node) == {one} and isinstance(node, cst.Name | cst.Attribute | cst.Subscript):
                found = code_of(node)
                break
        self.frames.extend(inner)
        return found

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

    def _roots_of_all(self) -> frozenset[Variable]:
        found: set[Variable] = set()
        for names in self.uses.values():
            for node in names:
                variable = self.file.variable(node)
                if variable is not None:
                    found |= self.facts.roots(variable)
        return frozenset(found)
