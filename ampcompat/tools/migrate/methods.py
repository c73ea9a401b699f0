"""Calls of a model's methods other than forward, which alone ``native_amp`` puts under autocast."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.settings import initializations
from ampcompat.tools.check.source import UNPARSABLE, Source, argument
from ampcompat.tools.check.values import options
from ampcompat.tools.migrate.edits import Edits
from ampcompat.tools.migrate.mentions import last_name

#: Methods that compute no output: those of ``torch.nn.Module``, and those that are named for parameters or states.
HARMLESS = re.compile(
    r"forward|add_module|apply|bfloat16|buffers|children|cpu|cuda|double|eval|float|get_buffer|get_submodule|half|modules|"
    r"named_\w+|(register|remove)_\w+|requires_grad_|share_memory|to|train|type|zero_grad|(load|save)(_\w+)?|\w*(param|state)\w*"
)
#: Methods that models have, and other attributes of a trainer do not.
OF_MODELS = ("parameters", "named_parameters", "train", "eval")
HALF = ("torch.half", "torch.float16", "torch.HalfTensor", "torch.cuda.HalfTensor")


class Program(NamedTuple):
    """What a file is told of the others that are migrated with it."""

    models: dict[str, frozenset[str]]  # that a class gives ``initialize``, as ``self.gen``, by the name of the class
    modules: frozenset[str]  # the names that imports find in it

    def may_inherit(self, code: str) -> bool:
        """Whether a text may have a class that is made from one of these: it imports one, or names one as a base."""
        lines = re.findall(r"^\s*(?:class\s+\w+\s*\(|from\s+\S+\s+import)(.*)", code, re.MULTILINE)
        return any(name in self.models for line in lines for name in re.findall(r"\w+", line))


def program_of(codes: Mapping[Path, str]) -> Program:
    """What the files of a program have to know of each other, given their texts."""
    models: dict[str, frozenset[str]] = {}
    for code in codes.values():
        if "initialize" not in code or "apex" not in code:
            continue
        with contextlib.suppress(*UNPARSABLE):
            for name, found in _models_by_class(Source("", code)).items():
                models[name] = models.get(name, frozenset()) | found
    packages = {path.parent.name for path in codes if path.name == "__init__.py"}
    return Program(models, frozenset(packages | {path.stem for path in codes}))


def _models_by_class(source: Source) -> dict[str, frozenset[str]]:
    """The attributes of each class that calls ``initialize`` that are models: they have parameters, or are trained.

    Not those that the script makes half itself.
    """
    found = {}
    given = {name for name in _models(source) if name.startswith("self.")}
    initializing = set(source.calls_to("apex.amp.initialize"))
    half = list(_targets_of_half(source))
    for node in source.kind(ast.ClassDef):
        inside = set(ast.walk(node))
        if not inside & initializing:
            continue
        called = [dotted(call.func).rpartition(".") for call in source.calls if call in inside]
        made_half = {owner for owner, _, method in called if method == "half"}
        made_half |= {name for name, target in half if target in inside}
        trained = {owner for owner, _, method in called if method in OF_MODELS and owner.startswith("self.")}
        # As in self.net.module.train(); self.module is a model itself.
        models = given | {owner if owner == "self.module" else owner.removesuffix(".module") for owner in trained}
        found[node.name] = frozenset(models - made_half)
    return found


def look_at_methods(edits: Edits, program: Program) -> None:
    """Note each ``loss = model.loss(x)``, and at O2 and O3 each ``y = model.infer(x)``; mark ``model.infer(x.half())``.

    ``initialize`` is given the model, ``scale_loss`` the loss. The script had ``infer`` run in half precision.

    Args:
        edits: Of the file.
        program: Its classes, from which those of this file may inherit models. Their losses stand in other files.
    """
    source = edits.source
    models = {*_models(source), *(name for names in _models_by_class(source).values() for name in names)}
    inherited = {name for names in _inherited(source, program) for name in names} - models
    models |= inherited
    harmless = _methods_that_run_forward(source)
    in_losses = set(_calls_in_losses(source))
    halves = _half_names(source)
    had_half_weights = _may_have_half_weights(source)
    for call in sorted(source.calls, key=lambda call: call.lineno):
        model, _, method = dotted(call.func).rpartition(".")
        if not {model, model.removesuffix(".module")} & models or method in harmless or HARMLESS.fullmatch(method):
            continue
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if any(_is_half(source, value, halves) for value in given):
            edits.mark(
                call,
                f"{model}.{method}(...) is given half precision, and weights are float32: call it under "
                "torch.autocast, or without the cast",
            )
        elif call in in_losses or ((had_half_weights or model in inherited) and given and _is_read(source, call)):
            edits.note(
                call,
                f"{model}.{method}(...) runs in float32 unless it calls the model itself, since only the forward of a "
                "model is under autocast; call it under torch.autocast and use .float() of what it returns",
            )


def _inherited(source: Source, program: Program) -> Iterator[frozenset[str]]:
    """The models of the classes that those of a file are made from, as ``Base``, ``base.Base`` or ``Base[int]``."""
    own = {node.name for node in source.kind(ast.ClassDef)}
    for node in source.kind(ast.ClassDef):
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            imported = source.full_name(base)
            name = imported.rpartition(".")[2] or last_name(base)
            package = imported.partition(".")[0]  # "" for a relative import, too
            is_of_others = package in ("", *program.modules) if imported else name not in own
            if is_of_others and name in program.models:
                yield program.models[name]


def _calls_in_losses(source: Source) -> Iterator[ast.Call]:
    """The calls in what ``scale_loss`` is given, and in what is assigned to names in that."""
    losses = {name for expression in _scaled(source) for name in _names(expression)}
    for node in source.kind(ast.Assign):
        if any(name in losses for target in node.targets for name in _names(target)):
            yield from _calls(node.value)
    for expression in _scaled(source):
        yield from _calls(expression)


def _may_have_half_weights(source: Source) -> bool:
    """Whether a call of ``initialize`` casts weights, at the level that is usual or at one that is possible."""
    for call in initializations(source).values():
        found = call.looked_up(options(source))
        levels = [found.usual_level] if found.usual_level is not None else found.levels()
        if any(found.at(level).weights == "float16" for level in levels):
            return True
    return False


def _half_names(source: Source) -> set[tuple[ast.AST, str]]:
    """Names of half tensors, each with its scope: ``mel = mel.half() if is_fp16 else mel``."""
    return {(source.scope(target), name) for name, target in _targets_of_half(source) if isinstance(target, ast.Name)}


def _targets_of_half(source: Source) -> Iterator[tuple[str, ast.expr]]:
    """What is assigned something that was cast to half, by its name."""
    for node in source.kind(ast.Assign):
        if any(_casts_to_half(call) for call in _calls(node.value)):
            yield from ((dotted(target), target) for target in node.targets)


def _is_half(source: Source, value: ast.expr, halves: set[tuple[ast.AST, str]]) -> bool:
    """Whether an argument is cast to half in its place, or is a name of a half tensor."""
    return (source.scope(value), dotted(value)) in halves or any(_casts_to_half(call) for call in _calls(value))


def _casts_to_half(call: ast.Call) -> bool:
    """Whether a call is ``x.half()``, ``x.to(torch.half)`` or ``x.type(torch.HalfTensor)``."""
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "half":
        return True
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return call.func.attr in ("to", "type") and any(dotted(value) in HALF for value in given)


def _is_read(source: Source, call: ast.Call) -> bool:
    """Whether something is done with what a call returns."""
    return not isinstance(source.parents.get(call), ast.Expr)


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
