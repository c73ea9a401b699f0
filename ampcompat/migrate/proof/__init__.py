"""Prove a translation: what cannot be shown of the new source is marked, so that nothing wrong passes in silence.

The proof reads only the new text and the names of what ``initialize`` managed. Its burden is the other way round than
that of the translation: a ``step`` counts as an optimizer's of amp unless it is shown not to be, a function that is
given the optimizer counts as one that steps it.
"""

from __future__ import annotations

import ast

from ampcompat.check.source import Source, called, text
from ampcompat.migrate.casts import Casts
from ampcompat.migrate.objects import Label, Objects
from ampcompat.migrate.proof.forwards import unwrapped
from ampcompat.migrate.proof.mark import insert
from ampcompat.migrate.proof.names import undefined
from ampcompat.migrate.proof.protocol import Protocol
from ampcompat.migrate.proof.remains import apex_left
from ampcompat.migrate.proof.steps import stray_steps
from ampcompat.migrate.proof.subject import Managed, Subject
from ampcompat.migrate.result import Result

__all__ = ["Managed", "proved"]


def proved(code: str, managed: Managed | None) -> tuple[str, Subject | None]:
    """``code`` with a mark at each place where the proof fails, and what the proof was about.

    Args:
        code: The translated source.
        managed: What the translation put under amp; None where it changed no call.

    Raises:
        SyntaxError, ValueError: The new source does not compile.
    """
    compile(code, "<migrated>", "exec", dont_inherit=True)
    source = Source("", code)
    subject = None
    marks = list(apex_left(source, [note for _, note in Result.of(code).todos]))
    if managed is not None:
        made = _creation(source, managed)
        if made is None:
            marks.append((1, f"{managed.scaler} is not created in this file"))
        else:
            subject = _subject(source, managed, made)
            marks += [*stray_steps(subject), *Protocol(subject).failures(), *unwrapped(subject), *undefined(subject)]
    return insert(code, marks), subject


def _creation(source: Source, managed: Managed) -> ast.AST | None:
    """The statement that makes the scaler."""
    made = [
        node
        for node in source.nodes
        if isinstance(node, ast.Assign)
        and text(node.targets[0]) == managed.scaler
        and any(isinstance(n, ast.Call) and called(n) == "GradScaler" for n in ast.walk(node.value))
    ]
    return max(made, key=lambda node: node.lineno, default=None)


def _subject(source: Source, managed: Managed, made: ast.AST) -> Subject:
    scope = source.scope(made)
    roots = [(scope, name, Label("model", i)) for i, name in enumerate(managed.models)]
    roots += [(scope, name, Label("optimizer", i)) for i, name in enumerate(managed.optimizers)]
    objects = Objects(source, roots)
    return Subject(source, managed, objects, Casts(source, objects, managed.everywhere))
