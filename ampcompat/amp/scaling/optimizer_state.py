"""What amp keeps with one optimizer, as ``optimizer._amp_stash``, and which optimizers and calls there are.

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
from ampcompat.amp.half.masters import Master
from ampcompat.amp.scaling.loss_scale import UncountedPasses
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

    def part(self, ids: set[int]) -> Leaves:
        """The leaves among these whose ids are in ``ids``."""
        return Leaves(
            [master for master in self.masters if id(master.half) in ids],
            [param for param in self.masterless if id(param) in ids],
        )


# -- what is known of gradients ----------------------------------------------------------------------------------------
class Unreduced(NamedTuple):
    """What blocks have left whose gradients are those of this process alone, as in DDP's ``no_sync``.

    Attributes:
        scalers: The scalers of their losses, which have yet to hear of an overflow, when all processes can find it.
        scale: What the gradients that a wrapper keeps to itself are multiplied by (0-dim float32), as ``fully_shard``
            keeps those of ``set_requires_gradient_sync(False)``; None where nothing is scaled.
    """

    scalers: list[LossScaler]
    scale: torch.Tensor | None


class Overflow(NamedTuple):
    """Whether gradients that were unscaled are not finite.

    Attributes:
        scaler: The scaler of their loss.
        flag: 0-dim float32 tensor on a device, not 0 if so.
        for_script: Where their block had ``delay_overflow_check``: the uncounted passes, its own included. Else None.
    """

    scaler: LossScaler
    flag: torch.Tensor
    for_script: UncountedPasses | None

    @property
    def script_decides(self) -> bool:
        """Whether the script itself decides about the step of these gradients: it has called ``update_scale()``."""
        return self.for_script is not None and self.for_script.script_decides


# -- an optimizer ------------------------------------------------------------------------------------------------------
#: A scaler, and the host copy of its flag and of the scale to print; no scaler where the step looked at gradients.
FlagCopy = tuple[LossScaler | None, _torch.HostCopy]


@dataclass(eq=False)
class OptimizerState:
    """What amp keeps with one optimizer.

    ``overflows``, ``overflows_for_script`` and ``checks_gradients`` tell of the gradients that wait for a step,
    ``skipped`` of the last step. In one run with a dynamic scale:

    ====================================  ============  ================  =======
    after                                 overflows     checks_gradients  skipped
    ====================================  ============  ================  =======
    ``initialize``                        none          False             None
    a block, or several                   one flag      False             None
    a step that the host has made         none          False             False
    a block that overflows                one flag      False             False
    the step, skipped by the host         none          True              True
    ``zero_grad``                         none          False             True
    a block                               one flag      False             True
    a step that the device decides about  none          True              None
    a block, without ``zero_grad``        one flag      True              None
    ====================================  ============  ================  =======

    ``checks_gradients`` is also True where another optimizer's block may have overflowed in shared tensors, and where
    tensors have come to the optimizer. The next step then looks at its gradients itself. Where nothing is scaled,
    ``overflows`` and ``checks_gradients`` stay as they begin, and ``skipped`` becomes False with the first step.

    Attributes:
        session: The call of ``initialize`` that owns it.
        groups: The params of each group, as last looked up.
        leaves: Masters of these params, and params without a master.
        shared: Ids of the leaves that another optimizer holds, too.
        overflows: For each scaler, whether a block since the last step overflowed, as one flag: the next step is
            skipped if any is set.
        overflows_for_script: The same of blocks with ``delay_overflow_check``: after the scaler's ``update_scale()``,
            the script decides about the step.
        cleared_overflows: The same of blocks since the last step whose gradients were cleared. A script may have copied
            these, to bring them back (PCGrad): the next step is skipped if it finds inf or NaN, too.
        checks_gradients: Whether the next step looks at its gradients itself, since they may not be finite.
        scalers_to_move: Scalers whose passes ``delay_unscale`` has left uncounted, until the next block without it,
            step or ``amp.master_params``.
        unreduced: What the last blocks have left, if its gradients are those of this process alone.
        skipped: Whether the last step was skipped; None before the first step, and where the device decided.
        undecided_steps: The flags of each step that only the device knows the outcome of, on their way to the host;
            the oldest first.
        device_skipped: Whether the latest of these whose outcome is known was skipped; None before the first.
        saved_by_script: Gradients that ``_prepare_amp_backward`` has saved outside of blocks.
        known_step: The optimizer's own ``step`` attribute, as last looked up.
        in_replaced_step: Whether a script's replacement of ``step`` runs; amp's wrapper is around it.
        when_gone: Tells ``optimizer_index`` what it held when it is collected.
    """

    session: Session
    groups: list[list[torch.Tensor]] = field(default_factory=list)
    leaves: Leaves = field(default_factory=Leaves)
    shared: Set[int] = frozenset()
    overflows: dict[LossScaler, torch.Tensor] = field(default_factory=dict)
    overflows_for_script: dict[LossScaler, Overflow] = field(default_factory=dict)
    cleared_overflows: dict[LossScaler, torch.Tensor] = field(default_factory=dict)
    checks_gradients: bool = False
    scalers_to_move: set[LossScaler] = field(default_factory=set)
    unreduced: Unreduced | None = None
    skipped: bool | None = None
    undecided_steps: list[list[FlagCopy]] = field(default_factory=list)
    device_skipped: bool | None = None
    saved_by_script: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    known_step: object = None
    in_replaced_step: bool = False
    when_gone: weakref.finalize[..., AmpOptimizer] | None = field(default=None, init=False)

    # -- overflows -----------------------------------------------------------------------------------------------------
    def note_overflow(self, overflow: Overflow) -> None:
        """Note what a block has found: the next step is skipped if the flag is set."""
        if overflow.for_script is not None:
            self._note_for_script(overflow)
            return
        _add_flag(self.overflows, overflow.scaler, overflow.flag)

    def _note_for_script(self, overflow: Overflow) -> None:
        """Note a pass that has left the scale alone, in one flag with others since the scaler's last transition."""
        earlier = self.overflows_for_script.get(overflow.scaler)
        if earlier is None or earlier.script_decides:
            self.overflows_for_script[overflow.scaler] = overflow
        elif earlier.for_script is overflow.for_script:
            self.overflows_for_script[overflow.scaler] = overflow._replace(
                flag=torch.maximum(earlier.flag, overflow.flag)
            )
        else:  # the scaler has made its transition since
            self.note_overflow(earlier._replace(for_script=None))
            self.overflows_for_script[overflow.scaler] = overflow

    def skipping_flags(self) -> list[tuple[LossScaler, torch.Tensor]]:
        """The flags of blocks since the last step, any of which skips the next; each with the scaler of its loss."""
        for_script = self.overflows_for_script.values()
        undecided = [(overflow.scaler, overflow.flag) for overflow in for_script if not overflow.script_decides]
        return [*self.overflows.items(), *undecided]

    def forget_overflows(self) -> None:
        """Forget all overflows, those of cleared gradients too: a step has looked at them."""
        self.overflows = {}
        self.overflows_for_script = {}
        self.cleared_overflows = {}
        self.checks_gradients = False

    def note_overflows_cleared(self) -> None:
        """Note that the gradients whose overflows are known were cleared: no step is skipped for these alone."""
        cleared = self.cleared_overflows
        for scaler, flag in self.skipping_flags():
            _add_flag(cleared, scaler, flag)
        self.forget_overflows()
        self.cleared_overflows = cleared

    def forget_gradients(self) -> None:
        """Forget what is known of gradients: ``zero_grad`` has cleared them."""
        self.note_overflows_cleared()
        self.scalers_to_move.clear()
        self.unreduced = None
        self.saved_by_script = {}

    def move_scales(self) -> None:
        """Move the scales that ``delay_unscale`` has left alone. No host sync."""
        for scaler in self.scalers_to_move:
            scaler.move_at_step()

    def drop_used_gradients(self, skipped: bool | None) -> None:
        """Drop the gradients of masters after a step, and the flags; ``skipped``: None where only the device knows.

        Gradients of tensors without a master stay until they are cleared, as in plain torch; so do those of masters
        that another optimizer shares. They may not be finite unless the step was made.
        """
        overflows = self.overflows or self.overflows_for_script or self.cleared_overflows
        may_have_overflowed = self.checks_gradients or bool(overflows)
        self.overflows = {}
        self.overflows_for_script = {}
        self.cleared_overflows = {}
        self.scalers_to_move.clear()
        was_made = skipped is False
        self.checks_gradients = may_have_overflowed and not was_made
        for master in self.leaves.masters:
            if id(master.half) not in self.shared:
                # As :meth:`Master.drop_gradient`, for thousands of masters at each step.
                master.grad_shown = False
                master.value.grad = None


def _add_flag(flags: dict[LossScaler, torch.Tensor], scaler: LossScaler, flag: torch.Tensor) -> None:
    """Combine ``flag`` with the one of ``scaler`` in ``flags``, which is set then if either is."""
    earlier = flags.get(scaler)
    flags[scaler] = flag if earlier is None else torch.maximum(earlier, flag)


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
