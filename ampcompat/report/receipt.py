"""The receipt itself: an observer of the run that can be shown at any time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ampcompat._state import state
from ampcompat.amp.observers import observers
from ampcompat.report import html, text
from ampcompat.report.facts import collect
from ampcompat.report.history import History
from ampcompat.report.models import Models
from ampcompat.report.trace import OpTrace


class Receipt:
    """What really ran since ``amp.report()``. ``print`` it, or :meth:`write` it to a file.

    Args:
        steps: Optimizer steps whose ops are counted; overflow and scale are followed to the end.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._traced = steps, 0
        self._trace, self._history = OpTrace(), History()
        self._models = Models()
        self._first: int | None = None

    def start(self) -> None:
        """Observe from here on."""
        observers().append(self)
        state.undo.callback(self.stop)
        self._trace.start()

    def stop(self) -> None:
        """Observe no more. What was seen stays."""
        self._trace.stop()
        observers()[:] = [one for one in observers() if one is not self]

    # -- events ----------------------------------------------------------------------------------------------------
    def on_scale_loss(self, loss: Any, scaler: Any, optimizers: Any) -> None:
        """Count blocks."""
        self._history.block(scaler)

    def on_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        """Look at the models before the first op runs in them."""
        if not self._models.parameters:
            self._models.look()

    def on_step(self, optimizer: Any, skipped: bool | None) -> None:
        """Note the scale; stop counting ops after enough steps of the optimizer that stepped first."""
        self._history.step(optimizer, skipped)
        if self._first is None:
            self._first = id(optimizer)
        if self._trace.running:
            self._models.look()
            self._traced += id(optimizer) == self._first
            if self._traced >= self._steps:
                self._trace.stop()

    # -- what was seen -----------------------------------------------------------------------------------------------
    def facts(self) -> dict[str, Any]:
        """Everything as plain data, as in the JSON file. Reads the device."""
        self._models.look()
        return collect(self._trace, self._history, self._models, self._traced)

    def __str__(self) -> str:
        return text.render(self.facts())

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write ``path`` in one piece: a page for ``.html``, data for ``.json``, the table for anything else."""
        facts, target = self.facts(), Path(path)
        if target.suffix == ".json":
            content = json.dumps(facts, indent=1) + "\n"
        elif target.suffix in (".html", ".htm"):
            content = html.render(facts)
        else:
            content = text.render(facts) + "\n"
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        partial.write_text(content, encoding="utf-8")
        partial.replace(target)
