"""What a file does with amp: its calls by name, the models and optimizers that are under amp."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import libcst as cst

from ampcompat.tools.check.bindings import apex_name
from ampcompat.tools.migrate.native.file import File, Variable
from ampcompat.tools.migrate.native.flows import Flows
from ampcompat.tools.migrate.native.nodes import argument, elements, last_name
from ampcompat.tools.migrate.text import code_of

INITIALIZE = "apex.amp.initialize"
SCALE_LOSS = ("apex.amp.scale_loss", "apex.amp.handle.scale_loss")
MASTER_PARAMS = ("apex.amp.master_params", "apex.amp._amp_state.master_params")
#: Objects whose ``step`` is not an optimizer's.
OTHER_STEPS = re.compile(
    r"sched|^lr_|_lr$|warmup|prof|env|ema|swa|timer|meter|tracker|bar$|callback|simulat", re.IGNORECASE
)
#: Names that optimizers have.
OPTIMIZER = re.compile(r"opt(im|$|_|[A-Z0-9])|solver|adam|sgd", re.IGNORECASE)


@dataclass
class Initialize:
    """One call of ``amp.initialize``.

    Attributes:
        call: The call.
        models: What it gets as models.
        optimizers: What it gets as optimizers; None where there are none.
        target: What its result is assigned to; None where it is returned or dropped.
    """

    call: cst.Call
    models: cst.BaseExpression
    optimizers: cst.BaseExpression | None
    target: cst.BaseExpression | None = None


class Facts:
    """Everything that the rules need to know of one file."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.flows = Flows(file)
        self.aliases: dict[Variable, str] = {}
        self._named: set[Variable] = set()
        self._symbols: dict[cst.CSTNode, str | None] = {}
        self._imports()
        self._aliases()
        self._symbols.clear()
        # The variables that apex flows into: no others need to be asked.
        self._named = self.flows.targets(self.aliases)
        self.initialized = [made for call in file.of_type(cst.Call) for made in self._initialize(call)]
        self.scaled = [call for call in file.of_type(cst.Call) if self.symbol(call.func) in SCALE_LOSS]
        #: Variables that amp is given as optimizers.
        self.given: set[Variable] = set()
        self.optimizers = self._managed([o for i in self.initialized for o in (i.optimizers, _second(i))], "optimizer")
        self.models = self._managed([m for i in self.initialized for m in (i.models, _first(i))], "model")
        self.results = self._results()
        self.containers = self._containers()
        #: Variables that a loop binds, with their loops.
        self.loops: defaultdict[Variable | None, list[cst.CSTNode]] = defaultdict(list)
        loops: list[cst.For | cst.CompFor] = [*file.of_type(cst.For), *file.of_type(cst.CompFor)]
        for loop in loops:
            for target in elements(loop.target) or [loop.target]:
                self.loops[file.variable(target)].append(loop)
        self._roots: dict[Variable, frozenset[Variable]] = {}
        self._numbers: dict[Variable | None, int] = {}
        for node in file.of_types(cst.Name, cst.Attribute, cst.Subscript):
            self._numbers.setdefault(file.variable(node), len(self._numbers))
        self.model_of = self._models_of_optimizers()

    # Names.

    def _imports(self) -> None:
        statements: list[cst.Import | cst.ImportFrom] = [*self.file.of_type(cst.Import)]
        statements += [one for one in self.file.of_type(cst.ImportFrom) if not one.relative]
        for statement in statements:
            if isinstance(statement.names, cst.ImportStar):
                continue
            from_module = statement.module if isinstance(statement, cst.ImportFrom) else None
            module = f"{code_of(from_module)}." if from_module is not None else ""
            for alias in statement.names:
                name = module + code_of(alias.name)
                bound = alias.asname.name if alias.asname is not None else alias.name
                symbol = apex_name(name)
                if symbol is not None and isinstance(bound, cst.Name):
                    self.aliases[self.file.scope(statement), bound.value] = symbol

    def _aliases(self) -> None:
        """``init = amp.initialize``."""
        for node in self.file.of_type(cst.Assign):
            symbol = self.file.symbol(node.value)
            for target in node.targets:
                variable = self.file.variable(target.target)
                if symbol is not None and variable is not None:
                    self.aliases[variable] = symbol

    def symbol(self, node: cst.CSTNode) -> str | None:
        """The name in apex that an expression means, through variables, parameters and attributes of the file."""
        if node not in self._symbols:
            self._symbols[node] = self._symbol(node)
        return self._symbols[node]

    def _symbol(self, node: cst.CSTNode) -> str | None:
        found = self.file.symbol(node)
        if found is not None:
            return found
        if not isinstance(node, cst.Name | cst.Attribute):
            return None
        if isinstance(node, cst.Attribute):
            base = self.symbol(node.value)
            if base is not None:
                return f"{base}.{node.attr.value}"
        variable = self.file.variable(node)
        if variable is None or variable not in self._named:
            return None
        for source in self.flows.sources([variable]):
            if source in self.aliases:
                return self.aliases[source]
        return None

    def _initialize(self, call: cst.Call) -> Iterable[Initialize]:
        if self.symbol(call.func) != INITIALIZE:
            return
        models = argument(call, 0, "models")
        optimizers = argument(call, 1, "optimizers")
        if isinstance(optimizers, cst.Name) and optimizers.value == "None":
            optimizers = None
        parent = self.file.parents[call]
        target = parent.targets[0].target if isinstance(parent, cst.Assign) else None
        if models is not None:
            yield Initialize(call, models, optimizers, target)

    def optimizer_of(self, call: cst.Call) -> cst.BaseExpression | None:
        """The optimizers that a ``scale_loss`` is given."""
        return argument(call, 1, "optimizers")

    # Objects.

    def _managed(self, given: list[cst.BaseExpression | None], what: str) -> set[Variable]:
        seeds = [v for node in given for v in self.variables(node)]
        if what == "optimizer":
            for call in self.scaled:
                seeds += self.variables(self.optimizer_of(call))
            self.given = set(seeds)
        return self.flows.targets(self.flows.sources(seeds))

    def variables(self, node: cst.BaseExpression | None) -> list[Variable]:
        """The variables whose objects an expression is, or holds, or goes through."""
        if node is None:
            return []
        inner = elements(node)
        if inner is not None:
            return [v for one in inner for v in self.variables(one)]
        if isinstance(node, cst.ListComp | cst.GeneratorExp):
            return self.variables(node.elt)
        if isinstance(node, cst.Call):
            name = last_name(node.func)
            if name in ("values", "items") and isinstance(node.func, cst.Attribute):
                return self.variables(node.func.value)
            if name in ("list", "reversed", "enumerate", "zip", "tuple"):
                return [v for arg in node.args for v in self.variables(arg.value)]
            return []
        variable = self.file.variable(node)
        return [] if variable is None else [variable]

    def is_optimizer(self, node: cst.CSTNode) -> bool:
        """Whether an expression may be an optimizer that is under amp."""
        variable = self.file.variable(node)
        return variable is not None and self.holds_optimizer(variable) and not self.in_optimizer(node)

    def holds_optimizer(self, variable: Variable) -> bool:
        """Whether a variable may hold an optimizer that is under amp."""
        if variable not in self.optimizers:
            return False
        # A scheduler may get the values of an optimizer where both are in one list.
        return variable in self.given or not OTHER_STEPS.search(variable[1])

    def in_optimizer(self, node: cst.CSTNode) -> bool:
        """Whether a node stands in a class that is an optimizer."""
        return any(parent in self.flows.optimizer_classes for parent in self.file.ancestors(node))

    def optimizer_names(self) -> tuple[str, ...]:
        """The last parts of the names of optimizers under amp."""
        names = {str(name) for scope, name in self.optimizers if scope != "key" and str(name).isidentifier()}
        return tuple(sorted(name for name in names if OPTIMIZER.search(name)))

    def is_model(self, node: cst.CSTNode) -> bool:
        """Whether an expression may be a model that is under amp."""
        return self.file.variable(node) in self.models

    def roots(self, variable: Variable) -> frozenset[Variable]:
        """The optimizers that a variable may hold, each by the variable that it came from."""
        if variable not in self._roots:
            sources = self.flows.sources([variable]) & self.optimizers
            found = {self._first_of(source) for source in sources if self._is_origin(source, sources)}
            self._roots[variable] = frozenset(found or {variable})
        return self._roots[variable]

    def _is_origin(self, variable: Variable, among: set[Variable]) -> bool:
        """Whether nothing but the variable itself, round a circle, leads to it."""
        before = self.flows.sources([variable]) & among
        return all(variable in self.flows.sources([one]) for one in before)

    def ordered(self, variables: Iterable[Variable]) -> list[Variable]:
        """Variables in the order in which the text names them first: that of sets is another in each run."""
        return sorted(variables, key=lambda one: (self._numbers.get(one, len(self._numbers)), str(one[1])))

    def _first_of(self, variable: Variable) -> Variable:
        """One variable for all that lead to each other, the same in each run."""
        circle = self.flows.sources([variable]) & self.optimizers
        return self.ordered(circle)[0]

    def _containers(self) -> set[Variable | None]:
        """Variables that hold several objects: made by a display, gone through, or asked for an element."""
        found: set[Variable | None] = set()
        for node in self.file.of_types(cst.For, cst.CompFor, cst.Subscript, cst.Assign):
            if isinstance(node, cst.For | cst.CompFor):
                found.add(self.file.variable(node.iter))
            elif isinstance(node, cst.Subscript):
                found.add(self.file.variable(node.value))
            elif isinstance(node, cst.Assign) and isinstance(
                node.value, cst.List | cst.Tuple | cst.ListComp | cst.Dict
            ):
                found |= {self.file.variable(target.target) for target in node.targets}
        return found - {None}

    def _results(self) -> set[Variable]:
        """Variables that hold what a model under amp returned."""
        found: list[Variable] = []
        for node in self.file.of_type(cst.Assign):
            value = node.value
            if isinstance(value, cst.Call) and self.is_model(value.func):
                for target in node.targets:
                    found += self.variables(target.target)
        return self.flows.targets(found)

    def _models_of_optimizers(self) -> dict[Variable, str]:
        """The text of the model that an optimizer was made of: ``SGD(model.parameters(), ...)``."""
        found: dict[Variable, str] = {}
        for node in self.file.of_type(cst.Assign):
            value = node.value
            if not isinstance(value, cst.Call) or not value.args:
                continue
            params = value.args[0].value
            if not isinstance(params, cst.Call) or params.args or last_name(params.func) != "parameters":
                continue
            for target in node.targets:
                variable = self.file.variable(target.target)
                if variable in self.optimizers and variable is not None and isinstance(params.func, cst.Attribute):
                    found[variable] = code_of(params.func.value)
        return found


def _first(made: Initialize) -> cst.BaseExpression | None:
    """What the models are bound to."""
    targets = elements(made.target)
    if made.optimizers is None or targets is None or len(targets) != 2:
        return made.target
    return targets[0]


def _second(made: Initialize) -> cst.BaseExpression | None:
    """What the optimizers are bound to."""
    targets = elements(made.target)
    if made.optimizers is None or targets is None or len(targets) != 2:
        return None
    return targets[1]
