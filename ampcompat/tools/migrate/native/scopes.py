"""The scopes of a tree, by libcst's own visitors in a tenth of the time that a ``MetadataWrapper`` takes for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import libcst as cst
from libcst.metadata import ExpressionContext, Scope
from libcst.metadata.expression_context_provider import ExpressionContextVisitor
from libcst.metadata.scope_provider import ScopeVisitor

from ampcompat.tools.migrate.native.nodes import children


def scopes_of(module: cst.Module) -> Mapping[cst.CSTNode, Scope | None]:
    """The scope that each node of a module is evaluated in."""
    provider: Any = _Provider()
    module.visit(_Contexts(provider, ExpressionContext.LOAD))
    provider.contexts = provider.found
    provider.found = {}
    visitor = _Scopes(provider)
    module.visit(visitor)
    visitor.infer_accesses()
    scopes: Mapping[cst.CSTNode, Scope | None] = provider.found
    return scopes


class _Provider:
    """What the two visitors keep their results in."""

    def __init__(self) -> None:
        self.found: dict[cst.CSTNode, Any] = {}
        self.contexts: dict[cst.CSTNode, ExpressionContext] = {}

    def set_metadata(self, node: cst.CSTNode, value: object) -> None:
        self.found[node] = value

    def get_metadata(self, key: object, node: cst.CSTNode, default: object = None) -> object:
        return self.contexts.get(node, default)


class _ReadOnly(cst.CSTVisitor):
    """Goes through code alone, and builds no new nodes on its way, as each ``visit`` of libcst does."""

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Visit what a node consists of; False keeps libcst from doing it again."""
        if super().on_visit(node):
            for child in children(node):
                child.visit(self)
        return False


class _Contexts(_ReadOnly, ExpressionContextVisitor):
    """Whether a name is read, written or deleted."""


class _Scopes(_ReadOnly, ScopeVisitor):
    """Scopes, and what is assigned in each."""
