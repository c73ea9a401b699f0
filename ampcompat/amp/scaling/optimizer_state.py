"""What amp keeps with one optimizer, as ``optimizer._amp_stash``, and which optimizers and calls there are.

apex kept the same there (``apex/amp/_process_optimizer.py: AmpOptimizerState``). Scripts test for apex's attributes:
``ampcompat.amp._process_optimizer.AmpOptimizerState`` adds them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ampcompat import _torch
from ampcompat._state import Part, state
from ampcompat._types import Optimizer
from ampcompat.amp.half.masters import Master
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.session import Session, call_state


# -- the tensors of optimizers -----------------------------------------------------------------------------------------
@dataclass(eq=False, slots=True)
class Leaves:
    """What one or several optimizers train, as the model holds it: each tensor once.

    Attributes:
        masters: Masters of the half tensors.
        masterless: The tensors without a master, which optimizers step themselves.
    """

    masters: list[Master] = field(default_factory=list)
    masterless: list[torch.Tensor] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        """The model's tensors."""
        return [*[master.half for master in self.masters], *self.masterless]

    def ids(self) -> set[int]:
        """The ids of the model's tensors."""
        return set(map(id, self.tensors()))

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that a step uses: of masters, and of tensors without one."""
        stepped = [*[master.value for master in self.masters], *self.masterless]
        return [tensor.grad for tensor in stepped if tensor.grad is not None]


# -- an optimizer ------------------------------------------------------------------------------------------------------
#: A scaler, and the host copy of its flag and of the scale to print.
FlagCopy = tuple[LossScaler, _torch.HostCopy]


@dataclass(eq=False)
class OptimizerState:
    """What amp keeps with one optimizer.

    Attributes:
        session: The call of ``initialize`` that owns it.
        groups: The params of each group, as last looked up.
        leaves: Masters of these params, and params without a master.
        shared: Ids of the leaves that another optimizer holds, too.
        overflows: Whether blocks since the last step overflowed, each with the scaler of its loss: the next step is
            skipped if any is set, whatever the script clears before it.
        unreduced: The scalers of blocks since the last reduction, where gradients are those of this process alone.
        skipped: Whether the last step was skipped; None before the first step, and where the device decided.
        undecided_steps: The flags of each step that only the device knows the outcome of, on their way to the host;
            the oldest first.
        device_skipped: Whether the latest of these whose outcome is known was skipped; None before the first.
        put_aside: Gradients that ``_prepare_amp_backward`` has put aside.
        known_step: The optimizer's own ``step`` attribute, as last looked up.
        in_replaced_step: Whether a script's replacement of ``step`` runs; amp's wrapper is around it.
    """

    session: Session
    groups: list[list[torch.Tensor]] = field(default_factory=list)
    leaves: Leaves = field(default_factory=Leaves)
    shared: Set[int] = frozenset()
    overflows: list[tuple[LossScaler, torch.Tensor]] = field(default_factory=list)
    unreduced: list[LossScaler] = field(default_factory=list)
    skipped: bool | None = None
    undecided_steps: list[list[FlagCopy]] = field(default_factory=list)
    device_skipped: bool | None = None
    put_aside: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    known_step: object = None
    in_replaced_step: bool = False

    def note_overflow(self, scaler: LossScaler, flag: torch.Tensor) -> None:
        """Note what a block has found: the next step is skipped if ``flag`` is set."""
        if not any(known is flag for _, known in self.overflows):  # passes that are put off share one flag
            self.overflows.append((scaler, flag))

    def drop_used_gradients(self) -> None:
        """Drop the gradients of masters after a step, and the flags.

        Gradients of tensors without a master stay until they are cleared, as in plain torch; so do those of masters
        that another optimizer shares.
        """
        self.overflows = []
        for master in self.leaves.masters:
            if id(master.half) not in self.shared:
                # As :meth:`Master.drop_gradient`, for thousands of masters at each step.
                master.grad_shown = False
                master.value.grad = None


class AmpOptimizer(Optimizer, Protocol):
    """An optimizer under amp."""

    _amp_stash: OptimizerState
    _amp_follow_step: Callable[[], None]


# -- all of them -------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class OptimizerIndex(Part):
    """Optimizers that calls of ``initialize`` were given, as long as they are alive.

    Attributes:
        live: Optimizers under amp; :meth:`listed` reads them at a third of the cost of iterating.
        disabled: Optimizers given to ``initialize(enabled=False)``.
        may_hold_dropped: Whether optimizers that a script has dropped may still be in ``live``: their methods are bound
            to them, so that only the garbage collector frees them. True from a call of ``initialize`` until it has run.
    """

    live: weakref.WeakKeyDictionary[AmpOptimizer, None] = field(default_factory=weakref.WeakKeyDictionary)
    disabled: weakref.WeakKeyDictionary[AmpOptimizer, None] = field(default_factory=weakref.WeakKeyDictionary)
    may_hold_dropped: bool = False

    def listed(self) -> list[AmpOptimizer]:
        """Those under amp, in the order of their ``initialize`` calls."""
        optimizers = [reference() for reference in self.live.keyrefs()]
        return [optimizer for optimizer in optimizers if optimizer is not None]


optimizer_index = state.add(OptimizerIndex())


def optimizer_under_amp(optimizer: Any) -> Any:
    """The initialized optimizer in ``optimizer``, a LARC that was built around one; else ``optimizer`` itself.

    An object that forwards to an optimizer has the methods that amp has put on it: they are bound to the optimizer.
    """
    method = getattr(optimizer, "_amp_prepare_masters", None)
    if method is not None:
        return method.__self__
    inner = getattr(optimizer, "optim", None)
    if inner is None:
        return optimizer
    is_initialized = hasattr(inner, "_amp_stash") or inner in optimizer_index.disabled
    return inner if is_initialized else optimizer


# -- all calls of initialize -------------------------------------------------------------------------------------------
def calls_in_use() -> list[Session]:
    """The calls of ``initialize`` whose optimizers are alive, the later first; the latest call if there are none.

    ``amp._amp_state.loss_scalers`` are the first one's. A call without optimizers (for an averaged model) has
    scalers that no loss uses.
    """
    calls = [optimizer._amp_stash.session for optimizer in reversed(optimizer_index.listed())]
    if not calls and call_state.latest is not None:
        calls = [call_state.latest]
    return list(dict.fromkeys(calls))


def scalers_shown() -> list[LossScaler]:
    """What ``amp._amp_state.loss_scalers`` is after a call of ``initialize``."""
    return calls_in_use()[0].scalers
