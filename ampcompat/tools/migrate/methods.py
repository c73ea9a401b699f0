"""Losses that come from a method of a model other than forward, which alone ``native_amp`` puts under autocast."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.source import Source, argument

#: Methods in a loss that compute no output: penalties on weights read parameters.
HARMLESS = ("forward", "parameters", "named_parameters", "buffers", "modules", "children")


def note_losses_of_methods(source: Source) -> Iterator[str]:
    """Note each ``loss = model.loss(x)``: ``initialize`` is given the model, and ``scale_loss`` the loss."""
    models = set(_models(source))
    losses = {name for expression in _scaled(source) for name in _names(expression)}
    expressions = [
        node.value
        for node in source.kind(ast.Assign)
        if any(name in losses for target in node.targets for name in _names(target))
    ]
    calls = {call for expression in (*expressions, *_scaled(source)) for call in _calls(expression)}
    running = _methods_that_run_forward(source)
    for call in sorted(calls, key=lambda call: call.lineno):
        model, _, method = dotted(call.func).rpartition(".")
        if model.removesuffix(".module") not in models or method in HARMLESS or method in running:
            continue
        yield (
            f"line {call.lineno}: {model}.{method}(...) runs in float32 unless it calls the model itself, since only "
            "the forward of a model is under autocast; call it under torch.autocast and use .float() of what it returns"
        )


def _methods_that_run_forward(source: Source) -> set[str]:
    """The methods that call ``self(...)`` or ``self.forward(...)``, or another method that does."""
    called: dict[str, set[str]] = {}
    for method in source.kind(ast.FunctionDef):
        names = called.setdefault(method.name, set())
        names |= {dotted(call.func) for call in ast.walk(method) if isinstance(call, ast.Call)}
    running = {"self", "self.forward"}
    while True:
        found = {f"self.{name}" for name, names in called.items() if names & running}
        if found <= running:
            return {name.removeprefix("self.") for name in running}
        running |= found


def _models(source: Source) -> Iterator[str]:
    """The names of models that are given to ``amp.initialize``, and of what it returns."""
    for call in source.calls_to("apex.amp.initialize"):
        given = argument(call, 0, "models")
        statement = source.statement(call)
        returned = statement.targets[0] if isinstance(statement, ast.Assign) else None
        has_optimizers = argument(call, 1, "optimizers") is not None
        if has_optimizers and isinstance(returned, ast.Tuple):
            returned = returned.elts[0]
        for expression in (given, returned):
            if expression is not None:
                yield from _names(expression)


def _scaled(source: Source) -> Iterator[ast.expr]:
    """The losses that ``amp.scale_loss`` is given."""
    for call in source.calls_to("apex.amp.scale_loss", "apex.amp.handle.scale_loss"):
        loss = argument(call, 0, "loss")
        if loss is not None:
            yield loss


def _names(expression: ast.expr) -> Iterator[str]:
    """The names in an expression: ``self.loss``, and not ``self``."""
    name = dotted(expression)
    if name:
        yield name
        return
    for part in ast.iter_child_nodes(expression):
        if isinstance(part, ast.expr):
            yield from _names(part)


def _calls(expression: ast.expr) -> Iterator[ast.Call]:
    for node in ast.walk(expression):
        if isinstance(node, ast.Call):
            yield node
