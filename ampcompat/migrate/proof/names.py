"""Each name that a translation inserted is defined where it is used, for that object."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat.check.bindings import dotted
from ampcompat.migrate.objects import FUNCTIONS
from ampcompat.migrate.proof.subject import Subject

BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.Match)


def undefined(subject: Subject) -> Iterator[tuple[int, str]]:
    """Uses of an inserted name that no definition reaches."""
    source, objects = subject.source, subject.objects
    for name in subject.managed.inserted:
        stores: list[tuple[ast.AST, ast.AST]] = []
        loads: list[tuple[ast.AST, ast.AST]] = []
        for node in source.nodes:
            if isinstance(node, ast.Name | ast.Attribute) and dotted(node) == name:
                owner = objects._owner(objects.scope(node), name)
                (stores if isinstance(node.ctx, ast.Store) else loads).append((owner, node))
        for owner, node in loads:
            if not _defined(subject, owner, node, stores):
                yield (
                    getattr(node, "lineno", 1),
                    f"{name} is not shown to be defined here: hand it over, or make it first",
                )


def _defined(subject: Subject, owner: ast.AST, node: ast.AST, stores: list[tuple[ast.AST, ast.AST]]) -> bool:
    objects, source = subject.objects, subject.source
    owners = list(objects.bases(owner)) if isinstance(owner, ast.ClassDef) else [owner]
    mine = [store for where, store in stores if where in owners]
    if not mine:
        return False
    here = objects.scope(node)
    local = [store for store in mine if objects.scope(store) is here]
    if not local or len(local) < len(mine):
        # Made by another function, which has to run first: that is what amp.initialize had to do as well.
        certain = [s for s in mine if not _conditional(source.ancestors(s))]
        return bool(certain)
    before = [store for store in local if store.lineno < getattr(node, "lineno", 0)]  # type: ignore[attr-defined]
    around = set(source.ancestors(node))
    return any(all(not isinstance(a, BRANCHES) or a in around for a in _inside(subject, store)) for store in before)


def _inside(subject: Subject, node: ast.AST) -> Iterator[ast.AST]:
    """The statements around ``node`` within its function."""
    for parent in subject.source.ancestors(node):
        if isinstance(parent, FUNCTIONS):
            return
        yield parent


def _conditional(ancestors: Iterator[ast.AST]) -> bool:
    for parent in ancestors:
        if isinstance(parent, FUNCTIONS):
            return False
        # `if __name__ == "__main__":` runs when the script does.
        if isinstance(parent, BRANCHES) and "__name__" not in ast.unparse(getattr(parent, "test", parent))[:40]:
            return True
    return False
