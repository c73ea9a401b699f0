"""Where values go inside one file: assignments, calls of its own functions, loops and returns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import libcst as cst

from ampcompat.tools.migrate.native.file import File, Function, Variable
from ampcompat.tools.migrate.native.nodes import elements, last_name, literal_key

#: Methods of models, losses and optimizers: a class of the file that has one is not meant unless its object is known.
COMMON = (
    "step", "backward", "zero_grad", "forward", "train", "eval", "state_dict", "load_state_dict", "parameters",
    "update", "scale", "to", "cuda", "float", "half", "item", "append", "items", "values", "keys", "get", "pop",
    "copy", "add", "format", "join", "write", "close", "log",
)  # fmt: skip
#: Nodes that give a value to something.
BINDING = (
    cst.Assign, cst.AnnAssign, cst.NamedExpr, cst.For, cst.CompFor, cst.Return, cst.Call, cst.Subscript, cst.Param,
)  # fmt: skip
PASSES_ON = ("list", "tuple", "reversed", "iter", "sorted", "cycle", "deepcopy")


class Flows:
    """Edges between the variables of a file, and what its calls run.

    Attributes:
        into: For each variable those whose values it may get.
        out_of: The reverse.
    """

    def __init__(self, file: File) -> None:
        self.file = file
        self.into: defaultdict[Variable, set[Variable]] = defaultdict(set)
        self.out_of: defaultdict[Variable, set[Variable]] = defaultdict(set)
        self.functions: dict[Variable, Function] = {}
        self.classes: dict[Variable, cst.ClassDef] = {}
        self.methods: defaultdict[str, list[tuple[cst.ClassDef, Function]]] = defaultdict(list)
        self.instances: dict[Variable, cst.ClassDef] = {}
        #: Variables that hold ``functools.partial(function, ...)``: the function, and how many parameters are bound.
        self.partials: dict[Variable, tuple[Function, int]] = {}
        self.optimizer_classes: set[cst.ClassDef] = set()
        self._definitions()
        self._objects()
        self._edges()

    # What is defined and which objects are made of it.

    def _definitions(self) -> None:
        for node in self.file.of_type(cst.ClassDef):
            variable = self.file.variable(node.name)
            if variable is not None:
                self.classes[variable] = node
            if self._is_optimizer_class(node):
                self.optimizer_classes.add(node)
                continue
            for statement in node.body.body:
                if isinstance(statement, Function):
                    self.methods[statement.name.value].append((node, statement))
        methods = {id(method) for found in self.methods.values() for _, method in found}
        methods |= {id(method) for owner in self.optimizer_classes for method in owner.body.body}
        for function in self.file.of_type(Function):
            variable = self.file.variable(function.name)
            if variable is not None and id(function) not in methods:
                self.functions[variable] = function

    def _is_optimizer_class(self, node: cst.ClassDef) -> bool:
        """Whether a class is an optimizer: the scaler calls its ``step``, with gradients that are unscaled by then."""
        for base in node.bases:
            if self.classes.get(self.file.variable(base.value) or (None, "")) in self.optimizer_classes:
                return True
            if self.file.qualified_name(base.value).startswith("torch.optim."):
                return True
        return False

    def _objects(self) -> None:
        for node in self.file.of_type(cst.Assign):
            if not isinstance(node.value, cst.Call):
                continue
            made = self.classes.get(self.file.variable(node.value.func) or (None, ""))
            partial = self._partial(node.value)
            for target in node.targets:
                variable = self.file.variable(target.target)
                if made is not None and variable is not None:
                    self.instances[variable] = made
                if partial is not None and variable is not None:
                    self.partials[variable] = partial

    def _partial(self, call: cst.Call) -> tuple[Function, int] | None:
        """The function that ``partial(function, ...)`` calls, and how many of its parameters are bound by place."""
        if last_name(call.func) != "partial" or not call.args:
            return None
        function = self.functions.get(self.file.variable(call.args[0].value) or (None, ""))
        places = [arg for arg in call.args[1:] if arg.keyword is None]
        return None if function is None else (function, len(places))

    def method(self, owner: cst.ClassDef, name: str) -> Function | None:
        """A method of a class or of its bases in this file."""
        seen: list[cst.ClassDef] = []
        waiting = [owner]
        while waiting:
            current = waiting.pop(0)
            if current in seen:
                continue
            seen.append(current)
            for holder, function in self.methods.get(name, ()):
                if holder is current:
                    return function
            for base in current.bases:
                variable = self.file.variable(base.value)
                if variable in self.classes:
                    waiting.append(self.classes[variable])
        return None

    def callee(self, call: cst.Call) -> tuple[Function, int] | None:
        """The function of this file that a call runs, and how many of its first parameters are bound already."""
        func = call.func
        variable = self.file.variable(func)
        if isinstance(func, cst.Name) and variable is not None:
            if variable in self.functions:
                return self.functions[variable], 0
            if variable in self.partials:
                return self.partials[variable]
            if variable in self.classes:
                return _bound(self.method(self.classes[variable], "__init__"))
        if variable in self.instances:
            owner = self.instances[variable]
            return _bound(self.method(owner, "__call__") or self.method(owner, "forward"))
        if not isinstance(func, cst.Attribute):
            return None
        name = func.attr.value
        owner_of_base = self._class_of(func.value, call)
        if owner_of_base is not None:
            return _bound(self.method(owner_of_base, name))
        found = self.methods.get(name, ())
        if len(found) != 1:
            return None
        function = found[0][1]
        # Tensors, modules and optimizers have such methods, too, but none with as many arguments.
        if name in COMMON and (len(call.args) < 2 or len(call.args) != len(function.params.params) - 1):
            return None
        return _bound(function)

    def _class_of(self, base: cst.BaseExpression, call: cst.Call) -> cst.ClassDef | None:
        if isinstance(base, cst.Name) and base.value in ("self", "cls"):
            return self.file.class_of(self.file.function(call))
        if isinstance(base, cst.Call) and last_name(base.func) == "super":
            return self.file.class_of(self.file.function(call))
        return self.instances.get(self.file.variable(base) or (None, ""))

    def bound(self, call: cst.Call, function: Function, already: int) -> Iterator[tuple[cst.Param, cst.BaseExpression]]:
        """The parameters of a function, each with the argument that a call gives it.

        Args:
            call: The call.
            function: What it runs.
            already: How many of the first parameters are bound before the call.
        """
        params = [*function.params.posonly_params, *function.params.params]
        named = {p.name.value: p for p in (*params, *function.params.kwonly_params)}
        places = params[already:]
        index = 0
        for arg in call.args:
            if arg.star:
                continue
            if arg.keyword is not None:
                if arg.keyword.value in named:
                    yield named[arg.keyword.value], arg.value
            elif index < len(places):
                yield places[index], arg.value
                index += 1

    # Edges.

    def _edge(self, source: Variable | None, target: Variable | None) -> None:
        if source is not None and target is not None and source != target:
            self.into[target].add(source)
            self.out_of[source].add(target)

    def _edges(self) -> None:
        file = self.file
        for node in file.of_types(*BINDING):
            if isinstance(node, cst.Assign):
                for target in node.targets:
                    self._bind(target.target, node.value)
            elif isinstance(node, cst.AnnAssign | cst.NamedExpr) and node.value is not None:
                self._bind(node.target, node.value)
            elif isinstance(node, cst.For | cst.CompFor):
                self._loop(node.target, node.iter)
            elif isinstance(node, cst.Return) and node.value is not None:
                self._return(node)
            elif isinstance(node, cst.Call):
                self._call(node)
            elif isinstance(node, cst.Subscript):
                key = literal_key(node)
                if key is not None:
                    self._edge(("key", key), file.variable(node.value))
            elif isinstance(node, cst.Param) and node.default is not None:
                self._bind(node.name, node.default)

    def _bind(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        file = self.file
        targets = elements(target)
        values = elements(value)
        if targets is not None and values is not None and len(targets) == len(values):
            for one, other in zip(targets, values, strict=True):
                self._bind(one, other)
        elif targets is not None:
            for index, one in enumerate(targets):
                for source in self._results(value):
                    self._edge(_position(source, index), file.variable(one))
                for inner in elements(one) or ():
                    self._edge(file.variable(value), file.variable(inner))
        else:
            self._assign(file.variable(target), value)

    def _results(self, value: cst.BaseExpression) -> list[Variable]:
        """The variables whose elements an unpacked value has."""
        if isinstance(value, cst.Call):
            found = self.callee(value)
            return [(found[0], "return")] if found is not None else []
        variable = self.file.variable(value)
        return [variable] if variable is not None else []

    def _assign(self, target: Variable | None, value: cst.BaseExpression) -> None:
        if target is None:
            return
        if isinstance(value, cst.IfExp):
            self._assign(target, value.body)
            self._assign(target, value.orelse)
        elif isinstance(value, cst.BooleanOperation):
            self._assign(target, value.left)
            self._assign(target, value.right)
        elif isinstance(value, cst.Await):
            self._assign(target, value.expression)
        elif isinstance(value, cst.Call):
            self._result(target, value)
        elif isinstance(value, cst.Dict):
            self._entries(target, value)
        elif isinstance(value, cst.List | cst.Tuple | cst.Set):
            for index, element in enumerate(value.elements):
                self._assign(target, element.value)
                self._assign(_position(target, index), element.value)
        elif isinstance(value, cst.ListComp | cst.GeneratorExp):
            self._assign(target, value.elt)
        else:
            self._edge(self.file.variable(value), target)

    def _entries(self, target: Variable, value: cst.Dict) -> None:
        """The values of a dict go to its variable, and those with a literal key to that key."""
        for entry in value.elements:
            if not isinstance(entry, cst.DictElement):
                continue
            self._assign(target, entry.value)
            if isinstance(entry.key, cst.SimpleString):
                key: Variable = ("key", str(entry.key.raw_value))
                self._assign(key, entry.value)
                self._edge(key, target)

    def _result(self, target: Variable, call: cst.Call) -> None:
        found = self.callee(call)
        if found is not None:
            self._edge((found[0], "return"), target)
        elif last_name(call.func) in PASSES_ON and call.args:
            self._assign(target, call.args[0].value)

    def _return(self, node: cst.Return) -> None:
        function = self.file.function(node)
        if function is not None and node.value is not None:
            self._assign((function, "return"), node.value)

    def _loop(self, target: cst.BaseExpression, source: cst.BaseExpression) -> None:
        targets = elements(target)
        if isinstance(source, cst.Call):
            name = last_name(source.func)
            given = [arg.value for arg in source.args]
            if name == "enumerate" and targets is not None and len(targets) == 2 and given:
                self._loop(targets[1], given[0])
            elif name == "zip" and targets is not None and len(targets) == len(given):
                for one, other in zip(targets, given, strict=True):
                    self._loop(one, other)
            elif name in ("values", "items") and isinstance(source.func, cst.Attribute):
                one = targets[-1] if targets else target
                self._edge(self.file.variable(source.func.value), self.file.variable(one))
            elif name in PASSES_ON and given:
                self._loop(target, given[0])
            return
        values = elements(source)
        if values is None:
            for one in targets or [target]:
                self._edge(self.file.variable(source), self.file.variable(one))
            return
        for value in values:
            self._bind(target, value)

    def _call(self, call: cst.Call) -> None:
        found = self.callee(call)
        if found is None:
            if last_name(call.func) in ("append", "extend") and isinstance(call.func, cst.Attribute) and call.args:
                target = self.file.variable(call.func.value)
                self._assign(target, call.args[0].value)
            return
        for parameter, value in self.bound(call, *found):
            self._bind(parameter.name, value)

    # Closures.

    def sources(self, variables: Iterable[Variable]) -> set[Variable]:
        """``variables`` and all whose values they may get."""
        return _closure(variables, self.into)

    def targets(self, variables: Iterable[Variable]) -> set[Variable]:
        """``variables`` and all that may get their values."""
        return _closure(variables, self.out_of)


def _position(variable: Variable, index: int) -> Variable:
    return (("position", variable), str(index))


def _bound(function: Function | None) -> tuple[Function, int] | None:
    """A method, whose first parameter is the object."""
    return None if function is None else (function, 1)


def _closure(start: Iterable[Variable], edges: dict[Variable, set[Variable]]) -> set[Variable]:
    found: set[Variable] = set()
    waiting = list(start)
    while waiting:
        variable = waiting.pop()
        if variable not in found:
            found.add(variable)
            waiting.extend(edges.get(variable, ()))
    return found
