"""Keep amp's own state of one optimizer, as ``optimizer._amp_stash``, and which tensors the optimizer holds.

apex kept the same there (``apex/amp/_process_optimizer.py: AmpOptimizerState``); attributes with apex's names go on
working, since scripts test for them.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._types import HALF_DTYPES, Optimizer
from ampcompat.amp._amp_state import maybe_print
from ampcompat.amp.half.masters import Master, master_of
from ampcompat.amp.scaling.exchange import adopt_masters
from ampcompat.amp.scaling.gradient_sets import GradientSet, GradientState, Overflow, Pending, regroup
from ampcompat.amp.scaling.scaler import LossScaler
from ampcompat.amp.scaling.session import Session

#: A flag of a step that the device decided about, and the scale to name, both while they are copied to the host. No
#: scaler: the flag tells of gradients that an earlier overflow has left.
FlagCopy = tuple[LossScaler | None, _torch.HostCopy]


@dataclass(eq=False, slots=True)
class LastStep:
    """What the last step of an optimizer, made or skipped, has left.

    Attributes:
        skipped: Whether it was skipped; None before the first step, and while only the device knows.
        gradient_used: The first gradient in the model after the step. A step that finds the same one again had no new
            gradient.
    """

    skipped: bool | None = None
    gradient_used: weakref.ref[torch.Tensor] | None = None


@dataclass(eq=False)
class AmpOptimizerState:
    """What amp keeps with one optimizer.

    Attributes:
        session: The call of ``initialize`` that owns it.
        groups: The params of each group, as last looked up.
        masters: Masters of these params.
        direct: Params without a master.
        sets: Sets of ``masters`` and ``direct``, with the state of their gradients; some may be other optimizers' too.
        saved_grads_taken: Whether a script's own ``_post_amp_backward`` has asked for saved gradients, to add them
            itself.
        had_block: Whether there was a block since the last step.
        last_step: What the last step has left.
        undecided_steps: Steps that the device decided about, oldest first; the host has not read their flags yet. A
            message says which were skipped with the next block or step, or when ``amp.step_was_skipped`` asks.
    """

    session: Session
    groups: list[list[torch.Tensor]] = field(default_factory=list)
    masters: list[Master] = field(default_factory=list)
    direct: list[torch.Tensor] = field(default_factory=list)
    sets: list[GradientSet] = field(default_factory=list)
    saved_grads_taken: bool = False
    had_block: bool = False
    last_step: LastStep = field(default_factory=LastStep)
    undecided_steps: list[list[FlagCopy]] = field(default_factory=list)

    lazy_init_called = True  # apex's name: masters exist from ``initialize`` on

    @property
    def in_block(self) -> bool:
        """Whether a block is open that gives gradients to tensors of this optimizer."""
        return any(each.block is not None for each in self.sets)

    def leaves(self) -> list[torch.Tensor]:
        """The tensors that a backward pass gives gradients to."""
        return [*[master.half for master in self.masters], *self.direct]

    def has_state(self, wanted: GradientState) -> bool:
        """Whether one of its sets is in the state ``wanted``."""
        return wanted in [each.state for each in self.sets]

    def first_gradient(self) -> torch.Tensor | None:
        """The first gradient that there is in the model, by which a step tells new gradients from old."""
        for master in self.masters:
            if master.half.grad is not None:
                return master.half.grad
        for param in self.direct:
            if param.grad is not None:
                return param.grad
        return None

    @_torch.eager
    def note_step(self, skipped: bool | None) -> None:
        """Note that the optimizer has stepped, or was skipped; None where only the device knows."""
        gradient = self.first_gradient()
        self.had_block = False
        self.last_step.skipped = skipped
        self.last_step.gradient_used = None if gradient is None else weakref.ref(gradient)
        self.session.steps += 1

    def was_used(self, gradient: torch.Tensor) -> bool:
        """Whether ``gradient``, the first in the model, was there after the last step."""
        used = self.last_step.gradient_used
        return used is not None and _torch.tensor_of(used) is gradient

    @contextmanager
    def limited_to(self, sets: list[GradientSet]) -> Iterator[None]:
        """Context in which ``sets`` are those of this optimizer."""
        own = self.sets
        self.sets = sets
        try:
            yield
        finally:
            self.sets = own

    def take_saved(self, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """The saved gradients of ``params``; the caller adds them."""
        self.saved_grads_taken = True
        saved = {id(param): grad for each in self.sets for param, grad in each.saved}
        return [saved.get(id(param)) for param in params]

    @_torch.eager
    def look_up(self, optimizer: Optimizer) -> None:
        """Bring masters, direct params and sets up to date where the groups of ``optimizer`` changed.

        Those of other optimizers follow theirs: a tensor may have gone from one to the other.
        """
        if self._is_up_to_date(optimizer):
            return
        for other in state.optimizers.listed():
            stash: AmpOptimizerState = other._amp_stash
            if not stash._is_up_to_date(other):
                stash.adopt(other)
        regroup()

    def adopt(self, optimizer: Optimizer) -> None:
        """Have ``optimizer`` hold masters of its half params, and note what it holds."""
        self.masters = adopt_masters(optimizer, self.session)
        sides = {id(tensor) for master in self.masters for tensor in (master.half, master.value)}
        held = {id(param): param for group in optimizer.param_groups for param in group["params"]}
        self.direct = [param for key, param in held.items() if key not in sides]
        self.groups = [list(group["params"]) for group in optimizer.param_groups]

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

    def report_arrived(self) -> None:
        """Say which earlier steps the device skipped, as far as their flags have reached the host."""
        while self.undecided_steps and all(copied.arrived() for _, copied in self.undecided_steps[0]):
            self._report(self.undecided_steps.pop(0))

    def report_all(self) -> None:
        """Say which earlier steps the device skipped. A host sync where flags have not reached the host."""
        while self.undecided_steps:
            self._report(self.undecided_steps.pop(0))

    def _report(self, flags: list[FlagCopy]) -> None:
        """Read the flags of one step, the oldest that was undecided, and say so if it was skipped."""
        overflowed: list[tuple[LossScaler | None, float]] = []
        for scaler, copied in flags:
            flag, scale = copied.read()
            if flag:
                overflowed.append((scaler, scale))
        is_last = not self.undecided_steps
        if is_last and self.last_step.skipped is None:
            self.last_step.skipped = bool(overflowed)
        announce(overflowed)

    # -- by apex's names -----------------------------------------------------------------------------------------------
    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether ``param.grad`` holds gradients that a later block, or the step, unscales.

        Scripts write it beside a backward pass of their own. False: what is there is unscaled, or nothing is; gradients
        of half parameters are then dropped by the next block, as in apex. True: it is scaled by the first loss scaler.
        """
        return self.has_state(GradientState.PENDING)

    @params_have_scaled_gradients.setter
    def params_have_scaled_gradients(self, value: bool) -> None:
        if bool(value) == self.params_have_scaled_gradients:
            return
        scaler = self.session.scalers[0]
        pending = Pending(scaler.scale_on(), {scaler: None})
        for each in self.sets:
            if value:
                each.mark_pending(pending)
            elif each.pending is not None:
                each.add_saved()
                each.note_unscaled()

    @property
    def already_patched(self) -> bool:
        """Whether the next step will be skipped: one host sync for each overflow flag.

        Writing it changes nothing. apex patched ``step`` to skip, and skipped none of those that a script had marked as
        patched.
        """
        if self.has_state(GradientState.LOST):
            return True
        flags: list[Overflow] = [overflow for each in self.sets for overflow in each.overflows]
        return any(flag.item() for _, flag in flags)

    @already_patched.setter
    def already_patched(self, value: bool) -> None:
        pass

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """Half params: those with masters; all of them where there are no masters."""
        with_masters = [master.half for master in self.masters]
        return with_masters or [param for param in self.direct if param.dtype in HALF_DTYPES]

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """Masters."""
        return [master.value for master in self.masters]

    @property
    def all_fp32_params(self) -> list[torch.Tensor]:
        """Params that are float32 in the model."""
        return [param for param in self.direct if param.dtype == torch.float32]

    @property
    def all_fp16_grad_stash(self) -> list[torch.Tensor | None]:
        """Unscaled gradients of half params from before the block, for a script's own ``_post_amp_backward``."""
        return self.take_saved(self.all_fp16_params)

    @property
    def all_fp32_grad_stash(self) -> list[torch.Tensor | None]:
        """The same of float32 params."""
        return self.take_saved(self.all_fp32_params)

    all_fp32_from_fp32_params = all_fp32_params
    all_fp32_from_fp32_grad_stash = all_fp32_grad_stash

    @property
    def fp16_groups(self) -> list[list[torch.Tensor]]:
        """Half params with masters, by group."""
        masters_by_group = [map(master_of, params) for params in self.groups]
        return [[master.half for master in masters if master is not None] for masters in masters_by_group]

    @property
    def fp32_from_fp16_groups(self) -> list[list[torch.Tensor]]:
        """Masters, by group."""
        return [[param for param in params if master_of(param) is not None] for params in self.groups]

    @property
    def fp32_from_fp32_groups(self) -> list[list[torch.Tensor]]:
        """Float32 params without a master, by group."""

        def is_direct(param: torch.Tensor) -> bool:
            return param.dtype == torch.float32 and master_of(param) is None

        return [list(filter(is_direct, params)) for params in self.groups]


def announce(overflowed: list[tuple[LossScaler | None, float]]) -> None:
    """Say of which scalers an overflow skipped a step, in apex's words (``apex/amp/handle.py: scale_loss``).

    With no scaler, the step was skipped for gradients that an earlier overflow has left.
    """
    for scaler, scale in dict(overflowed).items():
        if scaler is None:
            maybe_print(
                "Gradient overflow.  Skipping step, gradients of an earlier overflow were not cleared - call"
                " zero_grad() after a skipped step (D40)."
            )
        else:
            maybe_print(
                f"Gradient overflow.  Skipping step, loss scaler {scaler.loss_id} reducing loss scale to {scale}"
            )
