"""What amp keeps with one optimizer, as ``optimizer._amp_stash``, and which optimizers and sessions there are.

apex kept the same there (``apex/amp/_process_optimizer.py: AmpOptimizerState``). Scripts test for apex's attributes:
``ampcompat.amp._process_optimizer.AmpOptimizerState`` adds them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from ampcompat import _torch
from ampcompat._state import Part, state
from ampcompat._types import Optimizer
from ampcompat.amp.scaling.leaves import Leaves
from ampcompat.amp.scaling.older_gradients import OlderGradients
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.session import Session, session_state

# -- an optimizer ------------------------------------------------------------------------------------------------------
#: A scaler, and the overflow flag of its blocks: 0-dim float32 on a device, nonzero after an overflow.
StepFlag = tuple[LossScaler, torch.Tensor]
#: A scaler, and the host copy of its flag and of the scale to print.
FlagCopy = tuple[LossScaler, _torch.HostCopy]


class DelayedOverflow(NamedTuple):
    """The overflow flag of blocks that delay the update of their scale.

    Attributes:
        flag: The flag, as in a :data:`StepFlag`.
        taken_before: ``taken_by_script`` of the scaler of their losses when the flag was noted.
    """

    flag: torch.Tensor
    taken_before: int

    def is_taken_from(self, scaler: LossScaler) -> bool:
        """Whether the script has counted these passes of ``scaler``, and decides about their step."""
        return scaler.taken_by_script != self.taken_before


@dataclass(eq=False)
class OptimizerState:
    """What amp keeps with one optimizer.

    Attributes:
        session: The session that owns it.
        groups: The params of each group, as last looked up.
        leaves: Masters of these params, and params without a master.
        shared: Ids of the leaves that another optimizer holds, too, when groups were last looked up.
        overflows: Whether blocks since the last step overflowed, as one flag for each scaler: the next step is skipped
            if any is set, whatever the script clears before it.
        delayed_overflows: The same for blocks that delay the update of their scale. If the script has called the
            scaler's ``update_scale()`` since, it decides about the step itself.
        unaveraged: The scalers of blocks that have left unaveraged gradients (``no_sync``): they count these passes
            when the gradients are averaged.
        kept_scale: The scale of the unaveraged gradients that ``fully_shard`` keeps to itself between blocks (0-dim
            float32); None where it is 1.
        joins_next: Whether the next block adds its gradients to the ones in ``p.grad`` (``delay_unscale``).
        skipped: Whether the last step was skipped; None before the first step, and where the device decided.
        undecided_steps: The flags of steps whose outcome only the device knows yet, on their way to the host; the
            oldest step first.
        device_skipped: Whether the latest step whose flags have reached the host was skipped; None before the first.
        set_aside_by_script: Gradients that a script's own copy of ``scale_loss`` has set aside: only
            ``_prepare_amp_backward`` and ``_post_amp_backward`` use it.
        known_step: The optimizer's own ``step`` attribute, as last looked up.
        in_replaced_step: Whether a script's replacement of ``step`` runs; amp's wrapper is around it.
    """

    session: Session
    groups: list[list[torch.Tensor]] = field(default_factory=list)
    leaves: Leaves = field(default_factory=Leaves)
    shared: Set[int] = frozenset()
    overflows: dict[LossScaler, torch.Tensor] = field(default_factory=dict)
    delayed_overflows: dict[LossScaler, DelayedOverflow] = field(default_factory=dict)
    unaveraged: list[LossScaler] = field(default_factory=list)
    kept_scale: torch.Tensor | None = None
    joins_next: bool = False
    skipped: bool | None = None
    undecided_steps: list[list[FlagCopy]] = field(default_factory=list)
    device_skipped: bool | None = None
    set_aside_by_script: OlderGradients = field(default_factory=OlderGradients)
    known_step: object = None
    in_replaced_step: bool = False

    # -- overflows -----------------------------------------------------------------------------------------------------
    def note_overflow(self, scaler: LossScaler, flag: torch.Tensor) -> None:
        """Note what a block has found: the next step is skipped if ``flag`` is set."""
        earlier = self.overflows.get(scaler)
        if earlier is not None:
            flag = torch.maximum(earlier, flag)
        delayed = self.delayed_overflows.pop(scaler, None)
        # The scaler has counted delayed passes with the block's.
        if delayed is not None and not delayed.is_taken_from(scaler):
            flag = torch.maximum(delayed.flag, flag)
        self.overflows[scaler] = flag

    def note_delayed_overflow(self, scaler: LossScaler, flag: torch.Tensor) -> None:
        """Note the overflow flag of a block that delays its scale update.

        The next step is skipped if ``flag`` is set, unless the script counts the pass itself.
        """
        earlier = self.delayed_overflows.get(scaler)
        if earlier is not None and not earlier.is_taken_from(scaler):
            flag = torch.maximum(earlier.flag, flag)
        self.delayed_overflows[scaler] = DelayedOverflow(flag, scaler.taken_by_script)

    def flags(self) -> list[StepFlag]:
        """The flags any of which skips the next step."""
        flags = list(self.overflows.items())
        for scaler, delayed in self.delayed_overflows.items():
            if not delayed.is_taken_from(scaler):
                flags.append((scaler, delayed.flag))
        return flags

    def forget_flags(self) -> None:
        """Forget all flags: a step has looked at them."""
        self.overflows = {}
        self.delayed_overflows = {}

    # -- gradients -----------------------------------------------------------------------------------------------------
    def note_unaveraged(self, scaler: LossScaler, scale: torch.Tensor | None) -> None:
        """Note that a block with ``scaler``, at ``scale``, has left unaveraged gradients."""
        self.unaveraged = list(dict.fromkeys([*self.unaveraged, scaler]))
        self.kept_scale = scale

    def clear_used_gradients(self) -> None:
        """Clear the gradients of masters after a step, made or skipped.

        Gradients of tensors without a master stay until they are cleared, as in plain torch; so do those of masters
        that another optimizer shares.
        """
        self.joins_next = False
        for master in self.leaves.masters:
            if id(master.half) not in self.shared:
                # As :meth:`Master.clear_gradient`, for thousands of masters at each step.
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


# -- all sessions ------------------------------------------------------------------------------------------------------
def sessions_in_use() -> list[Session]:
    """The sessions whose optimizers are alive, the later first; the latest one if there are none.

    ``amp._amp_state.loss_scalers`` are the first one's. A session without optimizers (for an averaged model) has
    scalers that no loss uses.
    """
    sessions = [optimizer._amp_stash.session for optimizer in reversed(optimizer_index.listed())]
    if not sessions and session_state.latest is not None:
        sessions = [session_state.latest]
    return list(dict.fromkeys(sessions))


def scalers_shown() -> list[LossScaler]:
    """What ``amp._amp_state.loss_scalers`` is after a call of ``initialize``."""
    return sessions_in_use()[0].scalers
