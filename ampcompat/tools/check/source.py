"""One parsed file with what symbols and rules ask about it: parents, scopes, apex names, calls."""

from __future__ import annotations

import ast
import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar

from ampcompat._extensions import EXTENSIONS, NOT_FOUND
from ampcompat.tools.check.bindings import NATIVE, Bindings, Function, dotted, parameters
from ampcompat.tools.check.findings import Finding

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SCALE_LOSS = ("apex.amp.scale_loss", "apex.amp.handle.scale_loss")
#: ``syncbn`` is left out: texts about other packages have it.
COMPILED = (*EXTENSIONS, *(name for name in NOT_FOUND if name != "syncbn"))
#: What a text that uses apex has in it: a name of it, or an ``ApexScaler``.
MENTIONS = ("apex", "Apex", "ampcompat", NATIVE, *COMPILED)
Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)
#: ``try``, and from Python 3.11 on the one with ``except*``.
_TRY_STAR: type[ast.AST] = getattr(ast, "TryStar", ast.Try)
TRIES: tuple[type[ast.AST], ...] = (ast.Try, _TRY_STAR)
#: Kinds of nodes that stand in blocks, and nodes of which one object stands for many.
STATEMENTS = (ast.stmt, ast.excepthandler)
SHARED = (ast.expr_context, ast.boolop, ast.operator, ast.unaryop, ast.cmpop)
#: What a literal may be computed with; on floats, so that no power takes long.
ARITHMETIC: dict[type[ast.operator], Callable[[float, float], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
}
FLOATS = ("float", "np.float32", "numpy.float32", "np.float64", "numpy.float64")
#: What parsing hostile text raises: bad syntax, null bytes, nesting too deep for the parser or for us.
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
P = ParamSpec("P")
R = TypeVar("R")


def once(function: Callable[Concatenate[Source, P], R]) -> Callable[Concatenate[Source, P], R]:
    """Work out ``function`` of a source, and of hashable arguments, the first time that it is asked for."""

    @functools.wraps(function)
    def kept(source: Source, /, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (function, *args)
        if key not in source.known:
            source.known[key] = function(source, *args, **kwargs)
        found: R = source.known[key]
        return found

    return kept


def mentions_apex(code: str) -> bool:
    """Whether a text names apex at all; one that does not has no apex symbol."""
    return any(word in code for word in MENTIONS)


def parse(code: str) -> ast.Module:
    """The tree of ``code``; nothing is executed.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as :func:`ast.parse`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(code)


class Place(NamedTuple):
    """Where a statement stands: in which list of its parent (``"body"``, ``"orelse"``, ...), and as which of it."""

    field: str
    block: list[ast.stmt]
    position: int


class Source:
    """A file under check, walked once. What else is asked of it is worked out when somebody asks.

    Attributes:
        path: Path for the report.
        code: Its text.
        tree: The parsed file.
        known: What :func:`once` keeps.
        nodes: All nodes but operators and contexts, breadth first.
        parents: Parent of every node.
    """

    def __init__(self, path: str, code: str) -> None:
        self.path = path
        self.code = code
        self.tree = parse(code)
        self.known: dict[Hashable, Any] = {}
        self.nodes: list[ast.AST] = [self.tree]
        self.parents: dict[ast.AST, ast.AST] = {}
        self._scopes: dict[ast.AST, ast.AST] = {self.tree: self.tree}
        self._kinds: dict[type[ast.AST], list[ast.AST]] = {}
        self._places: dict[ast.AST, Place] = {}
        for node in self.nodes:  # grows on the way: breadth first, without recursion
            self._kinds.setdefault(node.__class__, []).append(node)
            self._add_children(node)

    def _add_children(self, node: ast.AST) -> None:
        scope = node if isinstance(node, SCOPES) else self._scopes[node]
        for field, value in ast.iter_fields(node):
            block = value if isinstance(value, list) else [value]
            for position, child in enumerate(block):
                if not isinstance(child, ast.AST) or isinstance(child, SHARED):
                    continue
                self.nodes.append(child)
                self.parents[child] = node
                self._scopes[child] = scope
                if isinstance(child, STATEMENTS):
                    self._places[child] = Place(field, block, position)

    def kind(self, *kinds: type[Node]) -> Iterator[Node]:
        """The nodes of some kinds, one kind after the other."""
        for kind in kinds:
            yield from self._kinds.get(kind, ())  # type: ignore[misc]

    @functools.cached_property
    def calls(self) -> list[ast.Call]:
        """All calls."""
        return list(self.kind(ast.Call))

    def calls_named(self, *names: str) -> Iterator[ast.Call]:
        """The calls of what has one of ``names`` as its last name (see :func:`called`), one name after the other."""
        for name in names:
            yield from self._calls_by_name.get(name, ())

    @functools.cached_property
    def _calls_by_name(self) -> dict[str, list[ast.Call]]:
        found: dict[str, list[ast.Call]] = {}
        for call in self.calls:
            found.setdefault(called(call), []).append(call)
        return found

    @functools.cached_property
    def bindings(self) -> Bindings:
        """The file's apex names."""
        return Bindings(self.nodes)

    @functools.cached_property
    def assigned(self) -> dict[str, list[ast.expr]]:
        """What assignments give each name and each ``a.b`` of the file, in the order of lines."""
        found: dict[str, list[ast.expr]] = {}
        for node in sorted(self.kind(ast.Assign), key=lambda node: node.lineno):
            for target in node.targets:
                for name, value in _single_assignments(target, node.value):
                    if dotted(name):
                        found.setdefault(dotted(name), []).append(value)
        return found

    def value_above(self, name: ast.Name) -> ast.expr | None:
        """What the last assignment above gives ``name`` in its function; None if there is none."""
        for value in reversed(self.assigned.get(name.id, [])):
            if self.scope(value) is self.scope(name) and (value.end_lineno or 0) < name.lineno:
                return value
        return None

    def function_of(self, call: ast.Call) -> Definition | None:
        """The function of the same file that a call runs: ``clip(...)``, or ``self.clip()`` of the class around it."""
        owner: ast.AST | None = self.tree
        if isinstance(call.func, ast.Attribute):
            owner = self.class_around(call) if dotted(call.func.value) == "self" else None
        return self._functions.get((owner, called(call)))

    @functools.cached_property
    def _functions(self) -> dict[tuple[ast.AST | None, str], Definition]:
        functions: Iterator[Definition] = self.kind(ast.FunctionDef, ast.AsyncFunctionDef)
        return {(self.parents[function], function.name): function for function in functions}

    def class_around(self, node: ast.AST) -> ast.ClassDef | None:
        """The innermost class that a node stands in; None for none."""
        return next((part for part in self.ancestors(node) if isinstance(part, ast.ClassDef)), None)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Parents of ``node``, nearest first."""
        parents = self.parents
        while node in parents:
            node = parents[node]
            yield node

    def around(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """The statement of ``node`` with its parent, that parent with its own, and so on."""
        statement = self.statement(node)
        return itertools.pairwise([statement, *self.ancestors(statement)])

    def scope(self, node: ast.AST) -> ast.AST:
        """The innermost function that holds ``node``, or the module."""
        return self._scopes.get(node, self.tree)

    def place(self, node: ast.AST) -> Place | None:
        """Where a statement, or a handler, stands; None for an expression."""
        return self._places.get(node)

    def field(self, node: ast.AST) -> str:
        """The list of its parent that a statement or handler stands in; "" for an expression."""
        place = self.place(node)
        return "" if place is None else place.field

    def statement(self, node: ast.AST) -> ast.AST:
        """The innermost statement that ``node`` is a part of, or is."""
        while node not in self._places and node in self.parents:
            node = self.parents[node]
        return node

    def apex(self, node: ast.AST) -> str | None:
        """The apex symbol that an expression names, or None; parameters shadow imports, unless they are given them."""
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or root.id not in self.bindings.heads:
            return None
        name = dotted(node)
        bound = self.bindings.bound(name)
        if bound is None:
            return None
        function = None if "." in bound else self._function_with(bound, node)
        if function is not None and self._is_shadowed(bound, function):
            return None
        return self.bindings.resolve(name)

    def is_parameter(self, name: str, node: ast.AST) -> bool:
        """Whether ``name`` means a parameter of a function around ``node``."""
        return self._function_with(name, node) is not None

    def _function_with(self, name: str, node: ast.AST) -> Function | None:
        """The innermost function around ``node`` with a parameter ``name``."""
        scope = self.scope(node)
        while isinstance(scope, SCOPES):
            if name in parameters(scope):
                return scope
            scope = self.scope(scope)
        return None

    @once
    def _is_shadowed(self, name: str, function: Function) -> bool:
        """Whether a parameter means something else than the import of that name, which no call passes for it."""
        for call in self.calls_named(getattr(function, "name", "")):
            given = (*call.args, *(keyword.value for keyword in call.keywords))
            if any(dotted(value) == name and not self.is_parameter(name, value) for value in given):
                return False
        return True

    def calls_to(self, *symbols: str) -> list[ast.Call]:
        """Calls of apex symbols, e.g. ``calls_to("apex.amp.initialize")``."""
        return [call for call, symbol in self._apex_calls if symbol in symbols]

    @functools.cached_property
    def _apex_calls(self) -> list[tuple[ast.Call, str]]:
        if not mentions_apex(self.code):
            return []
        return [(call, symbol) for call in self.calls if (symbol := self.apex(call.func)) is not None]

    @once
    def within(self, node: ast.AST) -> list[ast.AST]:
        """The nodes below a statement, itself included."""
        nodes = [node]
        for part in nodes:  # grows on the way
            nodes += children(part)
        return nodes

    def scaled_blocks(self) -> list[ast.With | ast.AsyncWith]:
        """``with amp.scale_loss(...)`` statements."""
        calls = set(map(id, self.calls_to(*SCALE_LOSS)))
        if not calls:
            return []
        blocks: Iterator[ast.With | ast.AsyncWith] = self.kind(ast.With, ast.AsyncWith)
        return [block for block in blocks if any(id(i.context_expr) in calls for i in block.items)]

    def imports(self, package: str) -> bool:
        """Whether the file imports ``package`` or a part of it."""
        return any(name.partition(".")[0] == package for _, name in self._imported)

    def full_name(self, node: ast.AST) -> str:
        """The name of an imported thing in full, ``torch.nn.functional.pad`` for ``F.pad``; "" for anything else."""
        head, dot, rest = dotted(node).partition(".")
        module = self._modules.get(head)
        return f"{module}{dot}{rest}" if module else ""

    @functools.cached_property
    def _modules(self) -> dict[str, str]:
        return dict(self._imported)

    @functools.cached_property
    def _imported(self) -> list[tuple[str, str]]:
        """Names that imports bind, and what each is in full."""
        found: list[tuple[str, str]] = []
        for node in self.kind(ast.Import):
            for alias in node.names:
                package = alias.name.partition(".")[0]
                found.append((alias.asname, alias.name) if alias.asname else (package, package))
        for statement in self.kind(ast.ImportFrom):
            module = "." * statement.level + (statement.module or "")
            found += [(alias.asname or alias.name, f"{module}.{alias.name}") for alias in statement.names]
        return found

    def finding(self, node: ast.AST, kind: str, name: str, level: str, note: str = "") -> Finding:
        """A finding at ``node``."""
        line, column = getattr(node, "lineno", 0), getattr(node, "col_offset", -1) + 1
        return Finding(self.path, line, column, kind, name, level, note)


def children(node: ast.AST) -> list[ast.AST]:
    """The nodes right below ``node``, without operators and contexts."""
    return [child for child in ast.iter_child_nodes(node) if not isinstance(child, SHARED)]


def _single_assignments(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What an assignment gives each target: ``a, b = x, y`` is two."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        yield from zip(target.elts, value.elts, strict=False)
    else:
        yield target, value


def argument(call: ast.Call, position: int, keyword: str) -> ast.expr | None:
    """The argument given by position or keyword, or None."""
    for given in call.keywords:
        if given.arg == keyword:
            return given.value
    return call.args[position] if len(call.args) > position else None


def listed(given: ast.expr | None) -> list[ast.expr]:
    """The items of an argument that is one or a list or tuple of several; none where it is not given."""
    if isinstance(given, ast.List | ast.Tuple):
        return given.elts
    return [] if given is None else [given]


def number(node: ast.AST | None, depth: int = 4) -> float | None:
    """The value of a numeric literal, or of literals that are computed with, as in ``-2**32 + 1``; else None.

    ``float("-1e9")`` is one, too.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        try:
            return float(node.value)
        except OverflowError:
            return float("inf")
    if depth and isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = number(node.operand, depth - 1)
        return -value if value is not None and isinstance(node.op, ast.USub) else value
    if depth and isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = number(node.left, depth - 1), number(node.right, depth - 1)
        return None if left is None or right is None else _computed(node.op, left, right)
    if depth and isinstance(node, ast.Call) and dotted(node.func) in FLOATS and len(node.args) == 1:
        return _as_float(node.args[0], depth - 1)
    return None


def _as_float(node: ast.expr, depth: int) -> float | None:
    """What ``float`` makes of a literal, or of a text; None where that is not known."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return number(node, depth)
    try:
        return float(node.value)
    except ValueError:
        return None


def _computed(op: ast.operator, left: float, right: float) -> float | None:
    try:
        result = ARITHMETIC[type(op)](left, right)
    except ArithmeticError:
        return None
    return result if isinstance(result, float) else None  # a root of a negative number is complex


def called(call: ast.Call) -> str:
    """The last name of what is called: ``clip_grad_norm_`` for ``torch.nn.utils.clip_grad_norm_(...)``."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""
