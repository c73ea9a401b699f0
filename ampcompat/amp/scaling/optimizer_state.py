"""What amp keeps with one optimizer, as ``optimizer._amp_stash``, and which tensors the optimizer holds.

apex kept the same there (``apex/amp/_process_optimizer.py: AmpOptimizerState``). Scripts test for apex's attributes:
``ampcompat.amp._process_optimizer.AmpOptimizerState`` adds them.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Set
from dataclasses import dataclass, field

import torch

from ampcompat import _torch
from ampcompat._types import Optimizer
from ampcompat.amp.scaling.exchange import match_state, put_masters_into
from ampcompat.amp.scaling.gradients import Leaves, Overflow, Unreduced, open_block_of
from ampcompat.amp.scaling.mistakes import warn_of
from ampcompat.amp.scaling.optimizer_index import optimizer_index
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.session import Session, call_state

#: A scaler, and the host copy of its flag and of the scale to print; no scaler where the step looked at gradients.
FlagCopy = tuple[LossScaler | None, _torch.HostCopy]


@dataclass(eq=False)
class OptimizerState:
    """What amp keeps with one optimizer.

    ``overflows``, ``delayed_overflows`` and ``checks_gradients`` tell of the gradients that wait for a step,
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
        delayed_overflows: The same of blocks that have left their scale alone: after the scaler's ``update_scale()``,
            the script decides about the step.
        checks_gradients: Whether the next step looks at its gradients itself, since they may not be finite.
        delayed_scalers: Scalers whose transitions ``delay_unscale`` has left to the next block without it, step or
            ``amp.master_params``.
        unreduced: What the last blocks have left, if its gradients are those of this process alone.
        skipped: Whether the last step was skipped; None before the first step, and where the device decided.
        undecided_steps: The flags of each step that only the device knows the outcome of, on their way to the host;
            the oldest first.
        device_skipped: Whether the latest of these whose outcome is known was skipped; None before the first.
        saved_by_script: Gradients that ``_prepare_amp_backward`` has saved outside of blocks.
        known_step: The optimizer's own ``step`` attribute, as last looked up.
        is_stepping: Whether a script's replacement of ``step`` runs; amp's wrapper is around it.
        when_gone: Tells ``optimizer_index`` what it held when it is collected.
    """

    session: Session
    groups: list[list[torch.Tensor]] = field(default_factory=list)
    leaves: Leaves = field(default_factory=Leaves)
    shared: Set[int] = frozenset()
    overflows: dict[LossScaler, torch.Tensor] = field(default_factory=dict)
    delayed_overflows: dict[LossScaler, Overflow] = field(default_factory=dict)
    checks_gradients: bool = False
    delayed_scalers: set[LossScaler] = field(default_factory=set)
    unreduced: Unreduced | None = None
    skipped: bool | None = None
    undecided_steps: list[list[FlagCopy]] = field(default_factory=list)
    device_skipped: bool | None = None
    saved_by_script: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    known_step: object = None
    is_stepping: bool = False
    when_gone: weakref.finalize[..., Optimizer] | None = field(default=None, init=False)

    @property
    def in_block(self) -> bool:
        """Whether a block is open that gives gradients to tensors of this optimizer."""
        return open_block_of(self.leaves) is not None

    # -- overflows -----------------------------------------------------------------------------------------------------
    def note_overflow(self, overflow: Overflow) -> None:
        """Note what a block has found: the next step is skipped if the flag is set."""
        if overflow.delayed is not None:
            self._note_delayed(overflow)
            return
        scaler, flag, _ = overflow
        earlier = self.overflows.get(scaler)
        self.overflows[scaler] = flag if earlier is None else torch.maximum(earlier, flag)

    def _note_delayed(self, overflow: Overflow) -> None:
        """Note a pass that has left the scale alone, in one flag with others since the scaler's last transition."""
        earlier = self.delayed_overflows.get(overflow.scaler)
        if earlier is None or earlier.is_decided:
            self.delayed_overflows[overflow.scaler] = overflow
        elif earlier.delayed is overflow.delayed:
            self.delayed_overflows[overflow.scaler] = overflow._replace(flag=torch.maximum(earlier.flag, overflow.flag))
        else:  # the scaler has made its transition since
            self.note_overflow(earlier._replace(delayed=None))
            self.delayed_overflows[overflow.scaler] = overflow

    def forget_overflows(self) -> None:
        """Forget the overflows of gradients that are gone."""
        self.overflows = {}
        self.delayed_overflows = {}
        self.checks_gradients = False

    def forget_gradients(self) -> None:
        """Forget all that is known of gradients: ``zero_grad`` has cleared them."""
        self.forget_overflows()
        self.delayed_scalers.clear()
        self.unreduced = None
        self.saved_by_script = {}

    def make_delayed_transitions(self) -> None:
        """Make the transitions that ``delay_unscale`` has left. No host sync."""
        for scaler in self.delayed_scalers:
            scaler.make_delayed_transition()

    def drop_used_gradients(self, skipped: bool | None) -> None:
        """Drop the gradients of masters after a step, and the flags; ``skipped``: None where only the device knows.

        Gradients of tensors without a master stay until they are cleared, as in plain torch; so do those of masters
        that another optimizer shares. They may not be finite unless the step was made.
        """
        may_have_overflowed = self.checks_gradients or bool(self.overflows or self.delayed_overflows)
        self.overflows = {}
        self.delayed_overflows = {}
        self.delayed_scalers.clear()
        was_made = skipped is False
        self.checks_gradients = may_have_overflowed and not was_made
        for master in self.leaves.masters:
            if id(master.half) not in self.shared:
                # As :meth:`Master.drop_gradient`, for thousands of masters at each step.
                master.grad_shown = False
                master.value.grad = None

    # -- what it holds -------------------------------------------------------------------------------------------------
    @_torch.eager
    def look_up(self, optimizer: Optimizer) -> None:
        """Follow the groups of ``optimizer``, and its ``step``, where they have changed."""
        if not self._is_up_to_date(optimizer):
            follow_groups()
        if vars(optimizer).get("step") is not self.known_step:
            optimizer._amp_follow_step()

    def _is_up_to_date(self, optimizer: Optimizer) -> bool:
        """Whether the groups hold the very params that they held when they were last looked up."""
        if len(optimizer.param_groups) != len(self.groups):
            return False
        for group, params in zip(optimizer.param_groups, self.groups, strict=True):
            if len(group["params"]) != len(params):
                return False
            if not all(map(operator.is_, group["params"], params)):
                return False
        return True

    def look_up_anew(self, optimizer: Optimizer) -> None:
        """Put masters of half params into the groups of ``optimizer``, and note what it holds."""
        masters = put_masters_into(optimizer, self.session)
        match_state(optimizer)
        sides = {id(tensor) for master in masters for tensor in (master.half, master.value)}
        held = {id(param): param for group in optimizer.param_groups for param in group["params"]}
        self.leaves = Leaves(masters, [param for key, param in held.items() if key not in sides])
        self.groups = [list(group["params"]) for group in optimizer.param_groups]
        self.note_when_gone(optimizer, self.leaves.ids())

    def note_when_gone(self, optimizer: Optimizer, ids: set[int]) -> None:
        """Have the ``ids`` of its leaves noted when ``optimizer`` is collected: another may come in its place."""
        if self.when_gone is not None:
            self.when_gone.detach()
        self.when_gone = weakref.finalize(optimizer, _note_gone, optimizer_index.gone, ids)
        self.when_gone.atexit = False


# -- groups that change ------------------------------------------------------------------------------------------------
def follow_groups(unscaled: Set[int] = frozenset()) -> None:
    """Follow the groups of all optimizers under amp where they have changed: a tensor may have gone to another.

    A tensor that comes to an optimizer, and that none held, may have a gradient: blocks give gradients to every tensor
    of a loss, and unscale the ones of their own optimizers. Where losses were scaled, such a gradient is dropped.

    Args:
        unscaled: Ids of tensors that no block can have reached, in models that come under amp now.
    """
    optimizers = optimizer_index.listed()
    known = {key for optimizer in optimizers for key in optimizer._amp_stash.leaves.ids()}
    known.update(unscaled)
    known.update(optimizer_index.gone)
    for optimizer in optimizers:
        stash: OptimizerState = optimizer._amp_stash
        if stash._is_up_to_date(optimizer):
            continue
        for master in stash.leaves.masters:  # one that leaves may come back, when a later block has given it another
            if master.grad_shown and master.half.grad is None:
                master.drop_gradient()
        stash.look_up_anew(optimizer)
        if stash.session.has_scaled:
            stash.checks_gradients = True  # an overflow may have left gradients of what it holds now
            _drop_gradients(stash.leaves.part(stash.leaves.ids() - known))
    _note_shared(optimizers)


def _drop_gradients(newcomers: Leaves) -> None:
    """Drop the gradients of ``newcomers``, with a warning if there are any."""
    for master in newcomers.masters:
        master.drop_gradient()
    for leaf in newcomers.tensors():
        if leaf.grad is not None:
            leaf.grad = None
            warn_of("scaled gradients of a later param")


def _note_gone(gone: set[int], ids: set[int]) -> None:
    """Add to ``gone`` the ``ids`` of the leaves of an optimizer that was collected: it shares them no more."""
    gone.update(ids)  # after a reset, this set is no longer ``optimizer_index.gone``
    _note_shared(optimizer_index.listed())


def _note_shared(optimizers: list[Optimizer]) -> None:
    """Note which of ``optimizers`` hold a leaf that another one holds, too."""
    holders: dict[int, int] = {}
    for optimizer in optimizers:
        for key in optimizer._amp_stash.leaves.ids():
            holders[key] = holders.get(key, 0) + 1
    for optimizer in optimizers:
        optimizer._amp_stash.shared = {key for key in optimizer._amp_stash.leaves.ids() if holders[key] > 1}


# -- all calls of initialize -------------------------------------------------------------------------------------------
def calls_shown() -> list[Session]:
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
    return calls_shown()[0].scalers
