"""One parsed file, and the questions that every rule asks of it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import libcst as cst
from libcst.metadata import BuiltinScope, QualifiedNameSource, Scope

from ampcompat._extensions import EXTENSIONS
from ampcompat.tools.check.bindings import apex_name
from ampcompat.tools.check.symbols import MODULES, SYMBOLS
from ampcompat.tools.migrate.native.nodes import children, literal_key
from ampcompat.tools.migrate.native.scopes import scopes_of
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
        self._functions: dict[cst.CSTNode, Function | None] = {module: None}
        self._by_type: defaultdict[type[cst.CSTNode], list[cst.CSTNode]] = defaultdict(list)
        stack: list[cst.CSTNode] = [module]
        while stack:
            node = stack.pop()
            self._index[node] = len(self.nodes)
            self.nodes.append(node)
            self._by_type[type(node)].append(node)
            inner = children(node)
            function = self._functions[node]
            for child in inner:
                self.parents[child] = node
                self._functions[child] = function
            if type(node) is Function:
                self._functions[node.body] = node
            stack.extend(reversed(inner))
        self.stars = self._star_imports()

    @functools.cached_property
    def scopes(self) -> Mapping[cst.CSTNode, Scope | None]:
        """The scope of each node."""
        return scopes_of(self.module)

    def order(self, node: cst.CSTNode) -> int:
        """The place of a node in the order of the text."""
        return self._index[node]

    def of_type(self, kind: type[Node]) -> Iterator[Node]:
        """The nodes of exactly one type, in the order of the text."""
        found: Iterable[Any] = self._by_type[kind]
        yield from found

    def of_types(self, *kinds: type[cst.CSTNode]) -> list[cst.CSTNode]:
        """The nodes of exactly these types, in the order of the text."""
        return sorted((node for kind in kinds for node in self._by_type[kind]), key=self.order)

    def names(self) -> Iterator[cst.Name | cst.Attribute]:
        """Names and attributes, in the order of the text."""
        found: Iterable[Any] = self.of_types(cst.Name, cst.Attribute)
        yield from found

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
        return self._functions.get(node)

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
        known = scope.get_qualified_names_for(node) if scope is not None else ()
        names = sorted(one.name for one in known if one.source is QualifiedNameSource.IMPORT)
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

    def imported_names(self) -> set[str]:
        """Names that the imports of these packages bind, in whatever scope."""
        found = set(self.stars)
        statements: list[cst.Import | cst.ImportFrom] = [*self.of_type(cst.Import), *self.of_type(cst.ImportFrom)]
        for node in statements:
            module = node.module if isinstance(node, cst.ImportFrom) else None
            for alias in node.names if not isinstance(node.names, cst.ImportStar) else ():
                origin = code_of(module if module is not None else alias.name)
                bound = code_of(alias.asname.name if alias.asname is not None else alias.name)
                if origin.partition(".")[0] in PACKAGES:
                    found.add(bound.partition(".")[0])
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


class Dropping(Pruned):
    """One that removes statements: a block that loses all of them holds ``pass``."""

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> cst.BaseSuite:
        if original_node.body and not updated_node.body:
            return updated_node.with_changes(body=[cst.SimpleStatementLine([cst.Pass()])])
        return updated_node
