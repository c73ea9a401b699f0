"""The rule of a model that is wrapped too early, which a first try on one device does not show."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.conditions import conditions, contradict
from ampcompat.tools.check.initializations import initializing_calls
from ampcompat.tools.check.rules.rule import Hit
from ampcompat.tools.check.source import Source, argument, called, listed

#: Methods of a model that return it.
RETURN_MODEL = ("cuda", "cpu", "to", "float", "train", "eval")


def wrapped_before_initialize(source: Source) -> Iterator[Hit]:
    """``model = DataParallel(model)`` above ``amp.initialize(model, ...)``, which refuses wrapped models."""
    if source.bindings.is_native:  # it takes them
        return
    for call in initializing_calls(source):
        for model in listed(argument(call, 0, "models")):
            value = source.value_above(model) if isinstance(model, ast.Name) else model
            wrapper = _wrapper(source, value)
            if value is None or not wrapper or contradict(source, value, call):
                continue
            note = f"the model is already wrapped in {wrapper}, and is refused; wrap what initialize returns"
            if conditions(source, value) <= conditions(source, call):
                yield Hit(call, note)
            else:
                yield Hit(call, f"in some runs {note}", is_certain=False)


def _wrapper(source: Source, value: ast.expr | None) -> str:
    """The name of the class that wraps a model: ``DataParallel`` of ``nn.DataParallel(model).cuda()``; "" for none."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and called(value) in RETURN_MODEL:
        value = value.func.value
    if not isinstance(value, ast.Call):
        return ""
    name = source.full_name(value.func) or dotted(value.func)
    is_torchs = name.startswith("torch.") and name.endswith(".DataParallel")
    return name.rpartition(".")[2] if is_torchs or name.endswith("DistributedDataParallel") else ""
