"""One parsed file, and the questions that every rule asks of it."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

import libcst as cst
from libcst.metadata import (
    BuiltinScope,
    MetadataWrapper,
    Scope,
    ScopeProvider,
)

from ampcompat._extensions import EXTENSIONS
from ampcompat.tools.check.bindings import apex_name
from ampcompat.tools.check.symbols import MODULES, SYMBOLS
from ampcompat.tools.migrate.text import code_of

Function = cst.FunctionDef
Node = TypeVar("Node", bound=cst.CSTNode)
#: A variable: the scope that binds a name; attributes and literal keys count as one variable each, whatever holds them.
Variable = tuple[object, str]

PACKAGES = ("apex", "ampcompat", *EXTENSIONS)


class File:
    """A source file with libcst's scopes.

    Attributes:
        module: The tree.
        nodes: Its nodes, parents first, in the order of the text.
        parents: The parent of each.
    """

    def __init__(self, module: cst.Module) -> None:
        self.module = module
        self.nodes: list[cst.CSTNode] = []
        self.parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self._index: dict[cst.CSTNode, int] = {}
        self._by_type: defaultdict[type[cst.CSTNode], list[cst.CSTNode]] = defaultdict(list)
        stack: list[cst.CSTNode] = [module]
        while stack:
            node = stack.pop()
            self._index[node] = len(self.nodes)
            self.nodes.append(node)
            self._by_type[type(node)].append(node)
            inner = children(node)
            for child in inner:
                self.parents[child] = node
            stack.extend(reversed(inner))
        self.stars = self._star_imports()

    @functools.cached_property
    def scopes(self) -> Mapping[cst.CSTNode, Scope | None]:
        """The scope of each node."""
        return MetadataWrapper(self.module, unsafe_skip_copy=True).resolve(ScopeProvider)

    def order(self, node: cst.CSTNode) -> int:
        """The place of a node in the order of the text."""
        return self._index[node]

    def of_type(self, kind: type[Node]) -> Iterator[Node]:
        """The nodes of exactly one type, in the order of the text."""
        for node in self._by_type[kind]:
            if isinstance(node, kind):
                yield node

    def scope(self, node: cst.CSTNode) -> Scope | None:
        """The scope that a node is evaluated in."""
        found: Scope | None = self.scopes.get(node)
        return found

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """What a node stands in, from the inside."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def function(self, node: cst.CSTNode) -> Function | None:
        """The function that a node is run by; None at module level."""
        child = node
        for parent in self.ancestors(node):
            if isinstance(parent, Function) and child is parent.body:
                return parent
            child = parent
        return None

    def class_of(self, function: Function | None) -> cst.ClassDef | None:
        """The class that a function is a method of, if it is one; functions inside of methods count."""
        if function is None:
            return None
        for parent in self.ancestors(function):
            if isinstance(parent, cst.ClassDef):
                return parent
        return None

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """The smallest statement that holds a node: a small statement, or a compound one by its header."""
        for candidate in (node, *self.ancestors(node)):
            if isinstance(candidate, cst.BaseSmallStatement | cst.BaseCompoundStatement):
                return candidate
        return node

    def line_of(self, node: cst.CSTNode) -> cst.CSTNode:
        """The logical line, or the compound statement, that holds a node."""
        for candidate in (node, *self.ancestors(node)):
            if isinstance(candidate, cst.BaseStatement):
                return candidate
        return self.module

    def variable(self, node: cst.CSTNode) -> Variable | None:
        """The variable that an expression reads or writes; None for other expressions."""
        if isinstance(node, cst.Name):
            return self._named(node)
        if isinstance(node, cst.Attribute):
            return ("attribute", node.attr.value)
        if isinstance(node, cst.StarredElement):
            return self.variable(node.value)
        if isinstance(node, cst.Subscript):
            key = literal_key(node)
            return self.variable(node.value) if key is None else ("key", key)
        return None

    def _named(self, node: cst.Name) -> Variable | None:
        scope = self.scope(node)
        if scope is None:
            return (None, node.value)
        for assignment in scope[node.value]:
            # None, True and the like hold no objects that go from one variable to another.
            return None if isinstance(assignment.scope, BuiltinScope) else (assignment.scope, node.value)
        return (scope.globals, node.value)

    def symbol(self, node: cst.CSTNode) -> str | None:
        """The name in apex that an expression means by the imports of the file, ``apex.amp.initialize``."""
        if not isinstance(node, cst.Name | cst.Attribute):
            return None
        root = node
        while isinstance(root, cst.Attribute):
            if not isinstance(root.value, cst.Name | cst.Attribute):
                return None
            root = root.value
        scope = self.scope(root)
        if scope is None:
            return None
        for name in sorted(q.name for q in scope.get_qualified_names_for(node)):
            if name.partition(".")[0] in PACKAGES and self._is_imported(scope, root.value):
                return apex_name(name)
        if isinstance(node, cst.Name) and node.value in self.stars and not scope[node.value]:
            return self.stars[node.value]
        return None

    def qualified_name(self, node: cst.CSTNode) -> str:
        """The name of an expression by the imports of the file, ``torch.optim.SGD``; ``""`` where there is none."""
        scope = self.scope(node)
        names = sorted(q.name for q in scope.get_qualified_names_for(node)) if scope is not None else []
        return names[0] if names else ""

    @staticmethod
    def _is_imported(scope: Scope, name: str) -> bool:
        return any(hasattr(a, "node") and isinstance(a.node, cst.Import | cst.ImportFrom) for a in scope[name])

    def _star_imports(self) -> dict[str, str]:
        """What ``from apex.amp import *`` and the like bind."""
        found: dict[str, str] = {}
        for node in self.of_type(cst.ImportFrom):
            if isinstance(node.names, cst.ImportStar) and node.module is not None and not node.relative:
                found.update({name.rpartition(".")[2]: name for name in _offered(node)})
        return found

    def reads_star(self, node: cst.ImportFrom) -> bool:
        """Whether the file reads a name that ``from apex.x import *`` binds."""
        offered = _offered(node)
        return any(self.symbol(name) in offered for name in self.of_type(cst.Name))


def _offered(node: cst.ImportFrom) -> set[str]:
    """What a star import of a module of apex binds."""
    module = apex_name(code_of(node.module)) if node.module is not None else None
    return {name for name in SYMBOLS if name.rpartition(".")[0] == module and name not in MODULES}


class Pruned(cst.CSTTransformer):
    """A transformer that goes only where some nodes are: libcst rebuilds all that it visits."""

    def __init__(self, file: File, nodes: Iterable[cst.CSTNode]) -> None:
        self.entered: set[cst.CSTNode] = set()
        for node in nodes:
            while node not in self.entered:
                self.entered.add(node)
                node = file.parents.get(node, file.module)

    def on_visit(self, node: cst.CSTNode) -> bool:
        return node in self.entered and super().on_visit(node)


#: Nodes that are layout alone.
LAYOUT = (
    cst.BaseParenthesizableWhitespace, cst.EmptyLine, cst.TrailingWhitespace, cst.Newline, cst.Comment, cst.Comma,
    cst.Semicolon, cst.Colon, cst.Dot, cst.AssignEqual, cst.LeftParen, cst.RightParen, cst.LeftSquareBracket,
    cst.RightSquareBracket, cst.LeftCurlyBrace, cst.RightCurlyBrace, cst.BaseBinaryOp, cst.BaseBooleanOp,
    cst.BaseUnaryOp, cst.BaseCompOp, cst.BaseAugOp,
)  # fmt: skip


@functools.cache
def _field_names(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    return tuple(one.name for one in dataclasses.fields(kind))


@functools.cache
def _is_code(kind: Hashable) -> bool:
    """Whether objects of a type are nodes, and not layout; asked once for each type, since ``isinstance`` is slow."""
    return isinstance(kind, type) and issubclass(kind, cst.CSTNode) and not issubclass(kind, LAYOUT)


def children(node: cst.CSTNode) -> list[cst.CSTNode]:
    """What a node consists of, without layout; many times faster than ``node.children``."""
    found: list[cst.CSTNode] = []
    for name in _field_names(type(node)):
        value = getattr(node, name)
        values = value if type(value) in (list, tuple) else (value,)
        for one in values:
            kind: Hashable = one.__class__
            if _is_code(kind):
                found.append(one)
    return found


def descendants(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all that is in it."""
    yield node
    for child in children(node):
        yield from descendants(child)


def literal_key(node: cst.Subscript) -> str | None:
    """``g`` for ``optimizers["g"]``."""
    if len(node.slice) != 1 or not isinstance(node.slice[0].slice, cst.Index):
        return None
    value = node.slice[0].slice.value
    return value.raw_value if isinstance(value, cst.SimpleString) else None


def argument(call: cst.Call, position: int, name: str) -> cst.BaseExpression | None:
    """An argument of a call by its place or keyword; None where it is absent."""
    places = [arg for arg in call.args if arg.keyword is None and not arg.star]
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == name:
            return arg.value
    return places[position].value if position < len(places) else None


def elements(node: cst.BaseExpression | None) -> list[cst.BaseExpression] | None:
    """The elements of a list or tuple display; None for other expressions."""
    if isinstance(node, cst.List | cst.Tuple):
        return [element.value for element in node.elements]
    return None


def last_name(node: cst.CSTNode) -> str:
    """``step`` for ``self.optimizer.step``."""
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""
