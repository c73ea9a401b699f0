"""The models that a class gives to ``amp.initialize``, by the names that all its methods have for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.branches import contradict
from ampcompat.tools.check.calls import class_around
from ampcompat.tools.check.settings import initializations
from ampcompat.tools.check.source import Source, argument, once
from ampcompat.tools.check.traps.blocks import clips

#: Methods of a model that return it.
RETURN_MODEL = ("cuda", "cpu", "to", "float", "train", "eval")


def is_initialized_by_class(source: Source, node: ast.AST, model: str) -> bool:
    """Whether ``node`` is code of a method, for runs in which its class has given ``model`` to ``amp.initialize``.

    Methods with a plain backward pass do not count, which may have an optimizer of their own, nor do classes that clip
    master parameters somewhere.
    """
    around = class_around(source, node)
    method = source.scope(node)
    if around is None:
        return False
    if any(source.scope(call) is method and not call.args for call in source.calls_named("backward")):
        return False
    if around in _classes_that_clip_masters(source):
        return False
    for call in initializations(source):
        is_known = any(f"{model}.".startswith(f"{name}.") for name in _attributes(source, call))
        if class_around(source, call) is around and is_known and not contradict(source, call, node):
            return True
    return False


@once
def _classes_that_clip_masters(source: Source) -> set[ast.ClassDef | None]:
    """The classes with a clip of ``amp.master_params(optimizer)``."""
    masters = source.calls_to("apex.amp.master_params")
    return {
        class_around(source, clip) for clip in clips(source) if any(call in source.within(clip) for call in masters)
    }


@once
def _attributes(source: Source, call: ast.Call) -> set[str]:
    """Attributes of ``self`` that hold what a call of ``initialize`` is given as models, or a wrapping of that."""
    names = set(models_of(source, call))
    for statement in sorted(source.kind(ast.Assign), key=lambda statement: statement.lineno):
        value = statement.value
        wrapped = value.args[0] if isinstance(value, ast.Call) and value.args else value
        if source.scope(statement) is source.scope(call) and dotted(wrapped) in names:
            names.update(filter(None, map(dotted, statement.targets)))
    return {name for name in names if name.startswith("self.")}


def models_of(source: Source, call: ast.Call) -> Iterator[str]:
    """The names of the models that a call of ``initialize`` is given, and of those that it returns."""
    statement = source.statement(call)
    returned = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if isinstance(returned, ast.Tuple) and argument(call, 1, "optimizers") is not None:
        returned = returned.elts[0]
    for models in (argument(call, 0, "models"), returned):
        listed = models.elts if isinstance(models, ast.List | ast.Tuple) else [models]
        yield from filter(None, map(dotted, listed))
