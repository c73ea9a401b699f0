"""Hold the subject of a proof: the new source, and the objects that it manages."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from ampcompat.check.source import Source, called, text
from ampcompat.migrate.casts import Casts
from ampcompat.migrate.objects import Labels, Objects


@dataclass(frozen=True)
class Managed:
    """Describe what a translation put under amp.

    Attributes:
        models: Source text of each model, where the scaler is made.
        optimizers: Source text of each optimizer there.
        scaler: Source text of the scaler, or of the list of them.
        inserted: Names that the translation wrote: the scaler, the device, the switch.
        scaled: For each scaled loss, in the order of the file, the optimizers whose gradients it makes.
        scaled_names: The source text of these optimizers.
        scaler_of: The scaler of each optimizer.
        everywhere: Whether networks beside the models were cast too (O1).
    """

    models: tuple[str, ...]
    optimizers: tuple[str, ...]
    scaler: str
    inserted: tuple[str, ...]
    scaled: tuple[Labels, ...]
    scaled_names: tuple[str, ...]
    scaler_of: dict[int, str]
    everywhere: bool


@dataclass(frozen=True)
class Subject:
    """The new source with its analyses."""

    source: Source
    managed: Managed
    objects: Objects
    casts: Casts

    def is_scaler(self, node: ast.AST) -> bool:
        """Whether an expression is a scaler that the translation made."""
        while isinstance(node, ast.Subscript):
            node = node.value
        name = text(node)
        # `for scaler in scalers`: the variable of the translation's own loops.
        return name == self.managed.scaler or (self.managed.scaler.endswith("scalers") and name == "scaler")

    def on_scaler(self, call: ast.AST, method: str) -> bool:
        """Whether a node is a call of that method of a scaler."""
        return (
            isinstance(call, ast.Call) and called(call) == method and self.is_scaler(getattr(call.func, "value", call))
        )
