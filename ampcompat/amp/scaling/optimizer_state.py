"""What amp keeps with one optimizer, as ``optimizer._amp_stash``, and which tensors the optimizer holds.

apex kept the same there (``apex/amp/_process_optimizer.py: AmpOptimizerState``); attributes with apex's names go on
working, since scripts test for them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._types import HALF_DTYPES, Optimizer
from ampcompat.amp.scaling.exchange import adopt_masters, match_state
from ampcompat.amp.scaling.gradients import Overflow, open_block_of, pending_in
from ampcompat.amp.scaling.leaves import Leaves
from ampcompat.amp.scaling.mistakes import warn_of
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.session import Session
from ampcompat.amp.scaling.unscaling import add_saved

#: Overflow flags that an optimizer keeps apart until it steps; more become one for each scaler.
MAX_FLAGS = 1024

#: A flag of a step that the device decided about, and the scale to name, both while they are copied to the host. No
#: scaler: the flag tells of gradients that an earlier overflow has left.
FlagCopy = tuple[LossScaler | None, _torch.HostCopy]


@dataclass(eq=False)
class AmpOptimizerState:
    """What amp keeps with one optimizer.

    Attributes:
        session: The call of ``initialize`` that owns it.
        groups: The params of each group, as last looked up.
        leaves: Masters of these params, and params without a master.
        shared: Ids of the leaves that another optimizer holds, too.
        overflows: Flags of blocks since the last step, most of them not set; one that is set skips the next.
        suspect: Whether the next step looks at its gradients itself, since a skipped step or another optimizer's block
            may have left some that are not finite.
        skipped: Whether the last step was skipped; None before the first step, and while only the device knows.
        undecided_steps: Steps that the device decided about, oldest first (see ``device_steps``).
        part: The leaves that ``_post_amp_backward`` unscales while a block calls a script's own; None: all.
        known_step: The optimizer's own ``step`` attribute, as last looked up.
        is_stepping: Whether a step runs that a script has put in the place of ours, and that ours is wrapped around.
        saved_grads_taken: Whether a script's own ``_post_amp_backward`` has asked for saved gradients, to add them
            itself.
    """

    session: Session
    groups: list[list[torch.Tensor]] = field(default_factory=list)
    leaves: Leaves = field(default_factory=Leaves)
    shared: Set[int] = frozenset()
    overflows: list[Overflow] = field(default_factory=list)
    suspect: bool = False
    skipped: bool | None = None
    undecided_steps: list[list[FlagCopy]] = field(default_factory=list)
    part: Leaves | None = None
    known_step: object = None
    is_stepping: bool = False
    saved_grads_taken: bool = False

    lazy_init_called = True  # apex's name: masters exist from ``initialize`` on

    @property
    def in_block(self) -> bool:
        """Whether a block is open that gives gradients to tensors of this optimizer."""
        return open_block_of(self.leaves) is not None

    @property
    def knows_of_gradients(self) -> bool:
        """Whether anything is known of the gradients that ends when they are cleared."""
        return bool(self.overflows or self.suspect)

    # -- events --------------------------------------------------------------------------------------------------------
    def note_overflows(self, overflows: Sequence[Overflow]) -> None:
        """Note the flags of a block: the next step is skipped if one of ``overflows`` is set."""
        self.overflows = [*self.overflows, *overflows]
        if len(self.overflows) > MAX_FLAGS:  # a script may never step
            self.overflows = _one_per_scaler(self.overflows)

    def forget_overflows(self) -> None:
        """Forget the overflows of gradients that are gone."""
        self.overflows = []
        self.suspect = False

    def note_cleared(self) -> None:
        """Note that all gradients were cleared or zeroed."""
        self.forget_overflows()

    def note_step(self, skipped: bool | None) -> None:
        """Note that the optimizer has stepped, or was skipped; None: the device knows."""
        self.skipped = skipped
        self.session.steps += 1

    def drop_used_gradients(self, skipped: bool | None) -> None:
        """Drop the gradients of masters after a step.

        Gradients of tensors without a master stay, as in plain torch; so do those of masters that another optimizer
        shares. After a skipped step, the next one looks at them.
        """
        may_have_overflowed = self.suspect or bool(self.overflows)
        self.suspect = may_have_overflowed and skipped is not False
        self.overflows = []
        for master in self.leaves.masters:
            if id(master.half) not in self.shared:
                master.drop_gradient()

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

    def adopt(self, optimizer: Optimizer) -> None:
        """Put masters of half params into the groups of ``optimizer``, and note what it holds."""
        masters = adopt_masters(optimizer, self.session)
        match_state(optimizer)
        sides = {id(tensor) for master in masters for tensor in (master.half, master.value)}
        held = {id(param): param for group in optimizer.param_groups for param in group["params"]}
        self.leaves = Leaves(masters, [param for key, param in held.items() if key not in sides])
        self.groups = [list(group["params"]) for group in optimizer.param_groups]

    # -- by apex's names -----------------------------------------------------------------------------------------------
    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether ``param.grad`` holds gradients that a later block, or the step, unscales.

        Scripts write False: they have unscaled or cleared what is there. After that, the next block drops gradients of
        half parameters, as under apex.
        """
        block = open_block_of(self.leaves)
        return bool(pending_in(self.leaves)) or (block is not None and block.took_pending)

    @params_have_scaled_gradients.setter
    def params_have_scaled_gradients(self, value: bool) -> None:
        if value and not self.params_have_scaled_gradients:
            raise RuntimeError(
                "params_have_scaled_gradients = True - only a scale_loss block knows by what gradients are scaled -"
                " write `with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled: scaled.backward()`."
            )
        if not value:
            for pending in pending_in(self.leaves):
                state.pending.remove(pending)
                add_saved(pending.saved)

    @property
    def already_patched(self) -> bool:
        """Whether an overflow skips the next step: one host sync for each flag.

        Writing it changes nothing. apex patched ``step`` to skip, and skipped none of those that a script had marked as
        patched.
        """
        return any(flag.item() for _, flag in self.overflows)

    @already_patched.setter
    def already_patched(self, value: bool) -> None:
        pass

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """Half params: those with masters; all of them where there are no masters."""
        with_masters = [master.half for master in self.leaves.masters]
        return with_masters or [param for param in self.leaves.direct if param.dtype in HALF_DTYPES]

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """Masters."""
        return [master.value for master in self.leaves.masters]

    @property
    def all_fp32_params(self) -> list[torch.Tensor]:
        """Params that are float32 in the model."""
        return [param for param in self.leaves.direct if param.dtype == torch.float32]

    @property
    def all_fp16_grad_stash(self) -> list[torch.Tensor | None]:
        """Unscaled gradients of half params from before the block, for a script's own ``_post_amp_backward``."""
        return self._take_saved(self.all_fp16_params)

    @property
    def all_fp32_grad_stash(self) -> list[torch.Tensor | None]:
        """The same of float32 params."""
        return self._take_saved(self.all_fp32_params)

    all_fp32_from_fp32_params = all_fp32_params
    all_fp32_from_fp32_grad_stash = all_fp32_grad_stash

    def _take_saved(self, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """The saved gradients of ``params``; the caller adds them."""
        self.saved_grads_taken = True
        block = open_block_of(self.leaves)
        saved = {} if block is None else block.saved
        return [saved.get(param) for param in params]

    @property
    def fp16_groups(self) -> NoReturn:
        """Refused: apex's lists of params by group."""
        raise AttributeError(
            "optimizer._amp_stash has no fp16_groups, fp32_from_fp16_groups or fp32_from_fp32_groups - amp keeps no"
            " lists by group - use all_fp16_params and all_fp32_from_fp16_params, or optimizer.param_groups, which hold"
            " the masters."
        )

    fp32_from_fp16_groups = fp16_groups
    fp32_from_fp32_groups = fp16_groups


def _one_per_scaler(overflows: list[Overflow]) -> list[Overflow]:
    """One of ``overflows`` for each scaler, whose flag tells whether any of them is set."""
    by_scaler: dict[LossScaler | None, list[torch.Tensor]] = {}
    for scaler, flag in overflows:
        by_scaler.setdefault(scaler, []).append(flag)
    return [Overflow(scaler, _torch.any_of(flags)) for scaler, flags in by_scaler.items()]


# -- groups that change ------------------------------------------------------------------------------------------------
def follow_groups(unscaled: Set[int] = frozenset()) -> None:
    """Follow the groups of all optimizers under amp where they have changed: a tensor may have gone to another.

    A tensor that comes to an optimizer, and that none held, may have a gradient: blocks give gradients to every tensor
    of a loss, and unscale the ones of their own optimizers. Where losses were scaled, such a gradient is dropped.

    Args:
        unscaled: Ids of tensors that no block can have reached, in models that come under amp now.
    """
    optimizers = state.optimizers.listed()
    known = {key for optimizer in optimizers for key in optimizer._amp_stash.leaves.ids()}
    known.update(unscaled)
    known.update(key for pending in state.pending for key in pending.leaves.ids())
    for optimizer in optimizers:
        stash: AmpOptimizerState = optimizer._amp_stash
        if stash._is_up_to_date(optimizer):
            continue
        stash.adopt(optimizer)
        if stash.session.has_scaled:
            stash.suspect = True  # an overflow may have left gradients of what it holds now
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


def _note_shared(optimizers: list[Optimizer]) -> None:
    """Note which of ``optimizers`` hold a leaf that another one holds, too."""
    holders: dict[int, int] = {}
    for optimizer in optimizers:
        for key in optimizer._amp_stash.leaves.ids():
            holders[key] = holders.get(key, 0) + 1
    for optimizer in optimizers:
        optimizer._amp_stash.shared = {key for key in optimizer._amp_stash.leaves.ids() if holders[key] > 1}
