"""Which expressions of a file mean an object that amp manages: aliases by scope, through calls and containers.

Labels are kept for access paths (``optimizer``, ``self.optimizer``) in the scope that owns the path: a function, a
class for ``self.``, or the module. Containers carry the labels of what they hold. A path that several objects reach
has several labels: the analysis says what an expression may be, never that it is nothing else.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ampcompat.check.bindings import dotted
from ampcompat.check.source import Source, called

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.Lambda)
Function = ast.FunctionDef | ast.AsyncFunctionDef
#: Calls that give their argument, or its elements, back.
PASSES = frozenset(
    {"list", "tuple", "set", "sorted", "reversed", "iter", "next", "enumerate", "zip", "cast", "deepcopy"}
    | {"copy", "chain", "filter"}
)
#: Methods that give back the object that they are called on, or an element of it.
SELF_METHODS = frozenset(
    {"cuda", "cpu", "to", "train", "eval", "half", "float", "double", "bfloat16", "requires_grad_", "type"}
    | {"values", "items", "get", "pop", "copy", "module", "share_memory", "__enter__"}
)
STORING = frozenset({"append", "add", "insert", "extend", "update", "setdefault", "register", "add_module"})
WRAPS_MODEL = re.compile(
    r"parallel|ddp|compile|wrap|fsdp|syncb|sync_batchnorm|engine|ema|averaged|script", re.IGNORECASE
)
WRAPS_OPTIMIZER = re.compile(r"optim|larc|larc_|lars|lookahead|sam$", re.IGNORECASE)
#: Calls by which a function is one that trains.
TRAINING = ("step", "backward", "scale_loss")
ROUNDS = 12


@dataclass(frozen=True, order=True)
class Label:
    """A managed object: its kind (``model``, ``optimizer``) and its place among those given to ``initialize``."""

    kind: str
    index: int


Labels = frozenset[Label]
NONE: Labels = frozenset()


def handed_over(call: ast.Call) -> Iterator[ast.expr]:
    """The arguments of ``call`` that may be or hold a managed object: names, paths, elements and displays."""
    for given in [*call.args, *(keyword.value for keyword in call.keywords)]:
        inner = given.value if isinstance(given, ast.Starred) else given
        if isinstance(inner, ast.Name | ast.Attribute | ast.Subscript | ast.List | ast.Tuple | ast.Dict):
            yield inner


class Objects:
    """The labels of every path of a file.

    Args:
        source: The file.
        roots: Scope and path of each managed object, where it is handed to ``initialize``.
        attributes: Attributes of objects of other files that hold managed ones.
    """

    def __init__(
        self,
        source: Source,
        roots: Sequence[tuple[ast.AST, str, Label]],
        attributes: Mapping[str, Labels] | None = None,
    ) -> None:
        self.source = source
        self.attributes = dict(attributes or {})
        self._index()
        # Filled once no more is found: until then an expression may get further labels.
        self._settled: dict[tuple[ast.AST, ast.AST], Labels] | None = None
        self.known: dict[tuple[ast.AST, str], Labels] = {}
        for scope, path, label in roots:
            self._add(self._owner(scope, path), path, frozenset({label}))
        for _ in range(ROUNDS):
            before = sum(map(len, self.known.values()))
            self._round()
            if sum(map(len, self.known.values())) == before:
                break
        self._settled = {}

    # What the file defines.

    def _index(self) -> None:
        source = self.source
        self.functions: dict[str, list[Function]] = {}
        self.methods: dict[str, list[Function]] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.locals: dict[ast.AST, set[str]] = {}
        self.outer: dict[ast.AST, ast.AST] = {}
        self.returns: dict[ast.AST, list[ast.expr]] = {}
        self.assignments: list[tuple[ast.AST, ast.expr, ast.expr]] = []
        self.instances: dict[tuple[ast.AST, str], ast.ClassDef] = {}
        shared: dict[ast.AST, set[str]] = {}
        self._scopes: dict[ast.AST, ast.AST] = {}
        self._owners: dict[tuple[ast.AST, str], ast.AST] = {}
        self._entered: dict[ast.Call, list[Function]] = {}
        for node in source.nodes:
            if isinstance(node, FUNCTIONS):
                place = self.methods if isinstance(source.parents[node], ast.ClassDef) else self.functions
                place.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, node)
            elif isinstance(node, ast.Global | ast.Nonlocal):
                shared.setdefault(self.scope(node), set()).update(node.names)
            elif isinstance(node, ast.Return) and node.value is not None:
                self.returns.setdefault(self.scope(node), []).append(node.value)
            elif isinstance(node, ast.Assign):
                self.assignments += [(node, target, node.value) for target in node.targets]
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                self.assignments.append((node, node.target, node.value))
            elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
                self.assignments.append((node, node.target, _Element(node.iter)))
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                self.assignments.append((node, node.optional_vars, node.context_expr))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.locals.setdefault(self.scope(node), set()).add(node.id)
            if isinstance(node, SCOPES):
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                given = [a.arg for a in (*every, node.args.vararg, node.args.kwarg) if a is not None]
                self.locals.setdefault(node, set()).update(given)
        for scope, names in shared.items():
            self.locals.get(scope, set()).difference_update(names)
        for _, target, value in self.assignments:
            path = dotted(target)
            made = getattr(value.func, "id", "") if isinstance(value, ast.Call) else ""
            if path is not None and made in self.classes:
                self.instances[self._owner(self.scope(target), path), path] = self.classes[made]

    def scope(self, node: ast.AST) -> ast.AST:
        """The innermost function around ``node``, or the module."""
        found = self._scopes.get(node)
        if found is None:
            parent = self.source.parents.get(node)
            if parent is None:
                found = self.source.tree
            else:
                found = parent if isinstance(parent, SCOPES) else self.scope_of_parent(parent)
            self._scopes[node] = found
        return found

    def scope_of_parent(self, node: ast.AST) -> ast.AST:
        """As :meth:`scope`, without recursion over long chains of parents."""
        for parent in self.source.ancestors(node):
            if isinstance(parent, SCOPES):
                return parent
        return self.source.tree

    def class_of(self, scope: ast.AST) -> ast.ClassDef | None:
        """The class whose method ``scope`` is, or is nested in."""
        for node in (scope, *self.source.ancestors(scope)):
            if isinstance(node, ast.ClassDef):
                return node
        return None

    def bases(self, cls: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """``cls`` and those of its bases and subclasses that the file defines: what may share its attributes."""
        seen: list[ast.ClassDef] = [cls]
        for one in seen:
            yield one
            names = {(dotted(base) or "").rpartition(".")[2] for base in one.bases}
            for other in self.classes.values():
                subclass = one.name in {(dotted(base) or "").rpartition(".")[2] for base in other.bases}
                if other not in seen and (other.name in names or subclass):
                    seen.append(other)

    def _owner(self, scope: ast.AST, path: str) -> ast.AST:
        """The scope that owns a path named in ``scope``."""
        found = self._owners.get((scope, path))
        if found is None:
            found = self._owners[scope, path] = self._found_owner(scope, path)
        return found

    def _found_owner(self, scope: ast.AST, path: str) -> ast.AST:
        head = path.partition(".")[0]
        if head in ("self", "cls") and "." in path:
            cls = self.class_of(scope)
            if cls is not None:
                return cls
        while scope is not self.source.tree:
            if head in self.locals.get(scope, ()):
                return scope
            scope = self.scope(scope)
        return scope

    # Labels.

    def _add(self, owner: ast.AST, path: str, labels: Labels) -> None:
        if labels:
            self.known[owner, path] = self.known.get((owner, path), NONE) | labels
            head, _, attribute = path.rpartition(".")
            if head:
                self.attributes[attribute] = self.attributes.get(attribute, NONE) | labels

    def store(self, target: ast.AST, labels: Labels, scope: ast.AST) -> None:
        """Note that ``target`` is assigned something with ``labels``."""
        while isinstance(target, ast.Subscript | ast.Starred):
            target = target.value
        path = dotted(target)
        if path is not None and labels:
            self._add(self._owner(scope, path), path, labels)

    def of(self, node: ast.AST | None, scope: ast.AST | None = None) -> Labels:
        """Find what ``node`` may be, or may hold."""
        if node is None:
            return NONE
        scope = self.scope(node) if scope is None else scope
        if self._settled is None:
            return self._of(node, scope)
        found = self._settled.get((node, scope))
        if found is None:
            found = self._settled[node, scope] = self._of(node, scope)
        return found

    def _of(self, node: ast.AST, scope: ast.AST) -> Labels:
        if isinstance(node, ast.Name):
            return self.known.get((self._owner(scope, node.id), node.id), NONE)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, scope)
        if isinstance(node, ast.Call):
            return self._call(node, scope)
        if isinstance(node, _Known):
            return node.labels
        if isinstance(node, _Element):
            return self.of(node.container, scope)
        if isinstance(node, ast.Subscript | ast.Starred | ast.Await | ast.NamedExpr):
            return self.of(node.value, scope)
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return self._union(node.elts, scope)
        if isinstance(node, ast.Dict):
            return self._union(node.values, scope)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            return self.of(node.elt, scope)
        if isinstance(node, ast.DictComp):
            return self.of(node.value, scope)
        if isinstance(node, ast.IfExp):
            return self._union((node.body, node.orelse), scope)
        if isinstance(node, ast.BoolOp):
            return self._union(node.values, scope)
        return NONE

    def optimizers(self, node: ast.AST | None) -> Labels:
        """The optimizers among :meth:`of`."""
        return frozenset(label for label in self.of(node) if label.kind == "optimizer")

    def models(self, node: ast.AST | None) -> Labels:
        """The models among :meth:`of`."""
        return frozenset(label for label in self.of(node) if label.kind == "model")

    def _union(self, nodes: Iterable[ast.AST], scope: ast.AST) -> Labels:
        return NONE.union(*(self.of(node, scope) for node in nodes))

    def _attribute(self, node: ast.Attribute, scope: ast.AST) -> Labels:
        path = dotted(node)
        if path is not None:
            owner = self._owner(scope, path)
            owners = list(self.bases(owner)) if isinstance(owner, ast.ClassDef) else [owner]
            found = NONE.union(*(self.known.get((one, path), NONE) for one in owners))
            if found:
                return found
            if isinstance(owner, ast.ClassDef) and path.count(".") == 1:
                return NONE
        base = self.of(node.value, scope)
        if node.attr in ("module", "_orig_mod", "optimizer", "forward", "__call__") and base:
            return base
        # `trainer.optimizer`: some object whose attribute of that name is managed.
        return self.attributes.get(node.attr, NONE) if not base else NONE

    def _call(self, node: ast.Call, scope: ast.AST) -> Labels:
        given = [*node.args, *(k.value for k in node.keywords)]
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "getattr" and len(node.args) > 1:
            named = node.args[1]
            if isinstance(named, ast.Constant) and isinstance(named.value, str):
                made = ast.Attribute(node.args[0], named.value, ast.Load())
                return self._attribute(made, scope)
            return self.of(node.args[0], scope)
        functions = self.called(node)
        if functions:
            return NONE.union(*(self._union(self.returns.get(f, ()), f) for f in functions))
        if isinstance(node.func, ast.Attribute) and name in SELF_METHODS:
            return self.of(node.func.value, scope)
        labels = self._union(given, scope) if given else NONE
        if name in PASSES:
            return labels if name != "deepcopy" else frozenset(x for x in labels if x.kind == "model")
        kinds = {"model": WRAPS_MODEL.search(name), "optimizer": WRAPS_OPTIMIZER.search(name)}
        return frozenset(label for label in labels if kinds[label.kind]) if name not in self.classes else NONE

    def called(self, node: ast.Call) -> list[Function]:
        """The functions of the file that a call may enter; for a class its ``__init__``."""
        found = self._entered.get(node)
        if found is None:
            found = self._entered[node] = self._found_called(node)
        return found

    def trains(self, function: ast.AST) -> bool:
        """Whether a function steps an optimizer, or runs a backward pass."""
        return function in self._training

    @functools.cached_property
    def _training(self) -> set[ast.AST]:
        calls = self.source.calls_within
        return {f for f, made in calls.items() if any(called(call) in TRAINING for call in made)}

    def _found_called(self, node: ast.Call) -> list[Function]:
        func = node.func
        if isinstance(func, ast.Name):
            if func.id in self.classes and func.id not in self.functions:
                return [f for f in self.methods.get("__init__", []) if self.source.parents[f] is self.classes[func.id]]
            return self.functions.get(func.id, [])
        if isinstance(func, ast.Attribute):
            methods = self.methods.get(func.attr, [])
            if isinstance(func.value, ast.Name) and func.value.id in ("self", "cls"):
                cls = self.class_of(self.scope(node))
                related = list(self.bases(cls)) if cls is not None else []
                return [f for f in methods if self.source.parents[f] in related]
            if isinstance(func.value, ast.Call) and getattr(func.value.func, "id", "") == "super":
                return [f for f in methods if self.source.parents[f] is not self.class_of(self.scope(node))]
            cls = self.instance(func.value)
            if cls is not None:
                related = list(self.bases(cls))
                return [f for f in methods if self.source.parents[f] in related]
            # What any object has (`step`, `forward`, `update`) tells no class.
            return methods if len(methods) == 1 and func.attr not in COMMON else []
        return []

    def instance(self, node: ast.AST) -> ast.ClassDef | None:
        """The class of the file that an expression is an instance of, where an assignment tells."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self.classes.get(node.func.id)
        path = dotted(node)
        return self.instances.get((self._owner(self.scope(node), path), path)) if path is not None else None

    def bound(self, node: ast.Call, function: Function) -> Iterator[tuple[str, ast.expr]]:
        """Parameter and argument pairs of a call of ``function``."""
        names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        static = any("staticmethod" in (dotted(d) or "") for d in function.decorator_list)
        if isinstance(self.source.parents[function], ast.ClassDef) and not static:
            names = names[1:]
        for position, given in enumerate(node.args):
            if isinstance(given, ast.Starred):
                break
            if position < len(names):
                yield names[position], given
            elif function.args.vararg is not None:
                yield function.args.vararg.arg, given
        every = {*names, *(a.arg for a in function.args.kwonlyargs)}
        for keyword in node.keywords:
            if keyword.arg in every and keyword.arg is not None:
                yield keyword.arg, keyword.value

    def _round(self) -> None:
        for node, target, value in self.assignments:
            self._assign(target, value, self.scope(node))
        defined: list[Function] = [*self.source.kind(ast.FunctionDef), *self.source.kind(ast.AsyncFunctionDef)]
        for one in defined:
            # A default is worked out where the function is defined.
            for name, default in _defaults(one.args):
                self._add(one, name, self.of(default, self.scope(one)))
        for call in self.source.calls:
            functions = self.called(call)
            for function in functions:
                for name, given in self.bound(call, function):
                    labels = self.of(given)
                    if labels:
                        self._add(function, name, labels)
            if isinstance(call.func, ast.Attribute) and call.func.attr in STORING and not functions:
                stored = NONE.union(*(self.of(given) for given in call.args))
                if stored and not self.of(call.func.value):
                    self.store(call.func.value, stored, self.scope(call))
            if getattr(call.func, "id", "") == "setattr" and len(call.args) == 3:
                named = call.args[1]
                if isinstance(named, ast.Constant) and isinstance(named.value, str):
                    target = ast.Attribute(call.args[0], named.value, ast.Store())
                    self.store(target, self.of(call.args[2]), self.scope(call))

    def _assign(self, target: ast.AST, value: ast.AST, scope: ast.AST) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for position, part in enumerate(target.elts):
                self._assign(part, self._part(value, position, len(target.elts)), scope)
        else:
            self.store(target, self.of(value, scope), scope)

    def _part(self, value: ast.AST, position: int, count: int) -> ast.AST:
        """Find what lands in one place of an unpacking."""
        if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == count:
            return value.elts[position]
        if isinstance(value, _Element) and isinstance(value.container, ast.Call):
            call = value.container
            name = getattr(call.func, "id", "")
            if name == "zip" and len(call.args) == count:
                return _Element(call.args[position])
            if name == "enumerate":
                return _Element(call.args[0]) if position else ast.Constant(0)
            if isinstance(call.func, ast.Attribute) and call.func.attr == "items":
                return _Element(call) if position else ast.Constant(0)
        if isinstance(value, ast.Call):
            returned = [r for f in self.called(value) for r in self.returns.get(f, ())]
            parts = [r.elts[position] for r in returned if isinstance(r, ast.Tuple) and len(r.elts) == count]
            if returned and len(parts) == len(returned):
                return _Known(NONE.union(*map(self.of, parts)))
        return value

    def paths(self, label: Label) -> list[str]:
        """Every path that may be ``label``, in the order in which they were found."""
        return list(dict.fromkeys(path for (_, path), labels in self.known.items() if label in labels))


#: Names of methods that many classes have: one definition in the file does not mean that it is the one called.
COMMON = frozenset(
    {"step", "forward", "backward", "update", "train", "eval", "__init__", "state_dict", "load_state_dict"}
    | {"zero_grad", "parameters", "get", "set", "add", "append", "to", "save", "load", "close", "reset", "log"}
    | {"write", "run", "cuda", "items", "values", "keys"}
)


def _defaults(given: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    """Parameters with what they are where a call gives nothing."""
    names = [*given.posonlyargs, *given.args]
    for parameter, default in zip(names[len(names) - len(given.defaults) :], given.defaults, strict=True):
        yield parameter.arg, default
    for parameter, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        if value is not None:
            yield parameter.arg, value


class _Element(ast.expr):
    """An element of a container."""

    _fields = ("container",)

    def __init__(self, container: ast.expr) -> None:
        super().__init__()
        self.container = container


class _Known(ast.expr):
    """An expression whose labels are known."""

    def __init__(self, labels: Labels) -> None:
        super().__init__()
        self.labels = labels
