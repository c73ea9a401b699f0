"""Which optimizers are under amp."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from ampcompat._state import Part, state
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer


@dataclass(eq=False)
class OptimizerIndex(Part):
    """Optimizers that calls of ``initialize`` were given, as long as they are alive.

    Attributes:
        live: Optimizers under amp; :meth:`listed` reads them at a third of the cost of iterating.
        disabled: Optimizers given to ``initialize(enabled=False)``.
        may_hold_dropped: Whether optimizers that a script has dropped may still be in ``live``: their methods are bound
            to them, so that only the garbage collector frees them. True from a call of ``initialize`` until it has run.
        gone: Ids of the leaves of optimizers that were collected since the last block ended: gradients of these leaves
            are unscaled.
    """

    live: weakref.WeakKeyDictionary[AmpOptimizer, None] = field(default_factory=weakref.WeakKeyDictionary)
    disabled: weakref.WeakKeyDictionary[AmpOptimizer, None] = field(default_factory=weakref.WeakKeyDictionary)
    may_hold_dropped: bool = False
    gone: set[int] = field(default_factory=set)

    def listed(self) -> list[AmpOptimizer]:
        """Those under amp, in the order of their ``initialize`` calls."""
        optimizers = [reference() for reference in self.live.keyrefs()]
        return [optimizer for optimizer in optimizers if optimizer is not None]


optimizer_index = state.add(OptimizerIndex())
