"""Keep amp's own state of one optimizer, as ``optimizer._amp_stash``, and which tensors the optimizer holds.

apex kept the same there (``apex/amp/_process_optimizer.py: AmpOptimizerState``); attributes with apex's names go on
working, since scripts test for them.
"""

from __future__ import annotations

import operator
import weakref
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp._amp_state import maybe_print
from ampcompat.amp.masters import Master, drop_cleared_gradients, ensure_master, master_of, reconcile
from ampcompat.amp.properties import HALF_DTYPES
from ampcompat.amp.scaler import MAX_FLAGS, LossScaler
from ampcompat.amp.session import Session
from ampcompat.amp.weights import hook


class Gradients(Enum):
    """Name what the blocks since the last step have left an optimizer; the table is at the head of ``block``."""

    NONE = "no block"
    EMPTY = "blocks that gave no gradient"
    UNSCALED = "unscaled gradients"
    LOST = "a block whose end failed"


@dataclass(eq=False)
class Pending:
    """Scaled gradients in ``param.grad`` that a later block unscales, or the step; shared by a block's optimizers."""

    scale: torch.Tensor  # what they are scaled by (0-dim float32)
    scalers: dict[LossScaler, None]  # whose losses they stem from: the pass counts for each of them


#: A scaler, and whether a backward pass of its loss overflowed (0-dim float32 on a device, not 0 if so).
Overflow = tuple[LossScaler, torch.Tensor]


@dataclass(eq=False)
class AmpOptimizerState:
    """Masters and gradients of one optimizer between blocks and steps."""

    session: Session
    groups: list[list[torch.Tensor]] = field(default_factory=list)  # the params of each group, as last looked up
    masters: list[Master] = field(default_factory=list)  # of these params
    direct: list[torch.Tensor] = field(default_factory=list)  # params without a master
    block: weakref.ref[Any] | None = None  # the open ``scale_loss`` block of this optimizer
    gradients: Gradients = Gradients.NONE  # what blocks have left since the last step
    # Unscaled gradients of ``direct``, while scaled ones take their place in ``param.grad``.
    aside: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    aside_taken: bool = False  # a script has asked for them, to add them itself
    pending: Pending | None = None
    overflows: list[Overflow] = field(default_factory=list)  # any of them skips the next step
    # Those whose gradients may still be there, after a skipped step or a block of an optimizer that shares tensors with
    # this one: any of them skips a step that would use a gradient which is not finite.
    earlier_overflows: list[Overflow] = field(default_factory=list)
    # By step that the device decided, on their way to the host: each flag, with the scale to name. No scaler: an
    # earlier overflow.
    reports: list[list[tuple[LossScaler | None, _torch.HostCopy]]] = field(default_factory=list)
    # Masters whose gradients the last step has used up, but another optimizer that holds them has not; with these.
    left: dict[Master, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    skipped: bool | None = None  # whether the last step was; None before it, and while only the device knows
    spent: weakref.ref[torch.Tensor] | None = None  # the model's first gradient when the last step had used it up

    lazy_init_called = True  # masters exist from ``initialize`` on

    @property
    def in_block(self) -> bool:
        """Whether a block of this optimizer is open."""
        return self.block is not None and self.block() is not None

    def leaves(self) -> list[torch.Tensor]:
        """The tensors that a backward pass gives gradients to."""
        return [*[master.half for master in self.masters], *self.direct]

    def first_gradient(self) -> torch.Tensor | None:
        """The first gradient that there is in the model, to tell new ones from old ones by."""
        for master in self.masters:
            if master.half.grad is not None:
                return master.half.grad
        for param in self.direct:
            if param.grad is not None:
                return param.grad
        return None

    def note_overflows(self, flags: list[Overflow]) -> None:
        """Have the next step skipped if one of ``flags`` is set."""
        self.overflows = [*self.overflows, *flags]
        if len(self.overflows) > MAX_FLAGS:  # a script may never step
            self.overflows = _by_scaler(self.overflows)

    def note_earlier_overflows(self, flags: list[Overflow]) -> None:
        """Have steps skipped that find a gradient which is not finite, if one of ``flags`` is set."""
        self.earlier_overflows = [*self.earlier_overflows, *flags]
        if len(self.earlier_overflows) > MAX_FLAGS:
            self.earlier_overflows = _by_scaler(self.earlier_overflows)

    def used_up(self) -> dict[Master, torch.Tensor]:
        """The gradients that the last step has used up, as far as they are still there for other optimizers."""
        found: dict[Master, torch.Tensor] = {}
        for master, reference in self.left.items():
            grad = master.value.grad
            if grad is not None and grad is _torch.tensor_of(reference):
                found[master] = grad
        return found

    def gradients_in_use(self) -> list[torch.Tensor]:
        """The gradients that there are for a step: those of masters and of other params, and those put aside."""
        used_up = self.used_up()
        params = [*[master.value for master in self.masters if master not in used_up], *self.direct]
        found = [grad for param in params if (grad := param.grad) is not None]
        return [*found, *[grad for _, grad in self.aside]]

    def take_aside(self, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients aside of ``params``; the caller adds them."""
        self.aside_taken = True
        aside = {id(param): grad for param, grad in self.aside}
        return [aside.get(id(param)) for param in params]

    def look_up(self, optimizer: Optimizer) -> None:
        """Bring masters and direct params up to date where the groups of ``optimizer`` changed."""
        groups, known = optimizer.param_groups, self.groups
        if len(groups) == len(known):
            for group, params in zip(groups, known, strict=True):
                if len(group["params"]) != len(params) or not all(map(operator.is_, group["params"], params)):
                    break
            else:
                return
        self.masters = adopt_masters(optimizer, self.session)
        with_master = {id(tensor) for master in self.masters for tensor in (master.half, master.value)}
        held = {id(p): p for group in groups for p in group["params"]}
        self.direct = [param for key, param in held.items() if key not in with_master]
        self.groups = [list(group["params"]) for group in groups]
        state.optimizers.sharing = None

    def hand_out_masters(self, optimizer: Optimizer) -> None:
        """Expect writes to the masters, which are asked for where there is no gradient to clip."""
        drop_cleared_gradients(self.masters)
        if self.in_block or self.gradients is not Gradients.NONE or self.pending is not None:
            return
        self.look_up(optimizer)
        reconcile(self.masters)
        for master in self.masters:
            master.hand_out()

    def report(self, wait: bool = True) -> None:
        """Say which earlier steps the device skipped; ``wait`` for flags not on the host yet: a host sync."""
        while self.reports and (wait or all(copied.arrived() for _, copied in self.reports[0])):
            read = [(scaler, copied.read()) for scaler, copied in self.reports.pop(0)]
            overflowed = [(scaler, scale) for scaler, (found, scale) in read if found]
            if not self.reports and self.skipped is None:
                self.skipped = bool(overflowed)
            announce(overflowed)

    # -- by apex's names -----------------------------------------------------------------------------------------------
    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether ``param.grad`` holds gradients that a later block, or the step, unscales.

        Scripts write it beside a backward pass of their own. False: what is there is unscaled, or nothing is; gradients
        of half parameters are then dropped by the next block, as in apex. True: it is scaled by the first loss scaler.
        """
        return self.pending is not None

    @params_have_scaled_gradients.setter
    def params_have_scaled_gradients(self, value: bool) -> None:
        if bool(value) == self.params_have_scaled_gradients:
            return
        owners = [optimizer for optimizer in state.optimizers.listed() if optimizer._amp_stash is self]
        if value:
            scaler = self.session.scalers[0]
            self.pending = Pending(scaler.scale_on(), {scaler: None})
            state.optimizers.pending.update(owners)
            return
        self.pending = None
        state.optimizers.pending.difference_update(owners)
        for param, old in self.aside:
            param.grad = old if param.grad is None else _torch.sum_of(param.grad, old)
        self.aside = []
        if any(param.grad is not None for param in self.direct):
            self.gradients = Gradients.UNSCALED

    @property
    def already_patched(self) -> bool:
        """Whether the next step will be skipped: one host sync for each overflow flag.

        Writing it changes nothing. apex patched ``step`` to skip, and skipped none of those that a script had marked as
        patched.
        """
        return self.gradients is Gradients.LOST or any(found.item() for _, found in self.overflows)

    @already_patched.setter
    def already_patched(self, value: bool) -> None:
        pass

    # Half params (all, where there are no masters), masters, and float32 params; also by group.
    all_fp16_params = property(lambda s: [m.half for m in s.masters] or [p for p in s.direct if p.dtype in HALF_DTYPES])
    all_fp32_from_fp16_params = property(lambda s: [m.value for m in s.masters])
    all_fp32_from_fp32_params = all_fp32_params = property(lambda s: [p for p in s.direct if p.dtype == torch.float32])
    # Unscaled gradients from before the block, for a script's own ``_post_amp_backward``.
    all_fp16_grad_stash = property(lambda s: s.take_aside(s.all_fp16_params))
    all_fp32_grad_stash = all_fp32_from_fp32_grad_stash = property(lambda s: s.take_aside(s.all_fp32_params))
    fp16_groups = property(lambda s: [[m.half for m in map(master_of, params) if m is not None] for params in s.groups])
    fp32_from_fp16_groups = property(lambda s: [[p for p in params if master_of(p) is not None] for params in s.groups])
    fp32_from_fp32_groups = property(
        lambda s: [[p for p in params if master_of(p) is None and p.dtype == torch.float32] for params in s.groups]
    )


def _by_scaler(flags: list[Overflow]) -> list[Overflow]:
    """One flag for each scaler, that tells whether any of its ``flags`` is set."""
    by_scaler: dict[LossScaler, list[torch.Tensor]] = {}
    for scaler, flag in flags:
        by_scaler.setdefault(scaler, []).append(flag)
    return [(scaler, _torch.any_of(held)) for scaler, held in by_scaler.items()]


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


# -- which tensors an optimizer holds ----------------------------------------------------------------------------------
def stepper(optimizer: Optimizer) -> Optimizer:
    """The optimizer whose params amp exchanges for masters: ``optimizer``, or that inside a ZeroRedundancyOptimizer."""
    inside = vars(optimizer).get("optim")
    return optimizer if inside is None or not _torch.is_zero(optimizer) else inside


def adopt_masters(optimizer: Optimizer, session: Session | None = None) -> list[Master]:
    """Have ``optimizer`` hold the masters of half weights; with no ``session``, the model's own tensors.

    Returns the masters that it steps. Groups and their lists keep their identity; state moves with its parameter, as in
    apex (``apex/amp/_process_optimizer.py: lazy_init_with_master_weights``).
    """
    steps = stepper(optimizer)
    if steps is not optimizer:  # a ZeroRedundancyOptimizer
        _torch.separate_inner_groups(optimizer)
    states = [one.state for one in (optimizer, *_torch.inner_optimizers(optimizer))]
    masters: dict[Master, None] = {}
    for group in steps.param_groups:
        params = group["params"]
        for index, param in enumerate(params):
            new, master = _held_for(param, session)
            if master is not None and new is master.value:
                masters[master] = None
            if new is not param:
                for held in states:
                    if param in held:
                        held[new] = held.pop(param)
                params[index] = new
    return list(masters)


def match_state(optimizer: Optimizer) -> None:
    """Give state from before ``initialize`` the dtype of its param, where torch's own ``load_state_dict`` does so."""
    for one in (optimizer, *_torch.inner_optimizers(optimizer)):
        if getattr(type(one), "load_state_dict", None) is not torch.optim.Optimizer.load_state_dict:
            continue
        for param, held in list(one.state.items()):
            if not isinstance(param, torch.Tensor) or not isinstance(held, dict):
                continue
            for name, value in held.items():
                is_state = isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == param.shape
                if is_state and name != "step" and value.dtype != param.dtype:
                    one.state[param] = {**one.state[param], name: value.to(param.dtype)}


def _held_for(param: torch.Tensor, session: Session | None) -> tuple[torch.Tensor, Master | None]:
    """Return the tensor that an optimizer of ``session`` holds in the place of ``param``, and its master if it has one.

    A half parameter of no model has a master that nothing holds but its optimizer's list of them.
    """
    masters = session is not None and session.policy.master_weights
    master = master_of(param)
    if master is not None and master.value is param:
        # An earlier call's master may be of a weight that is float32 again.
        return (param if masters and master.half.dtype != torch.float32 else master.half), master
    if session is None or param.dtype not in HALF_DTYPES or (master is None and session.policy.half is None):
        return param, master
    homes = _homes_of(param) if master is None else []
    for module, _ in homes:
        if "_amp_half" not in module.__dict__:  # of a module that was added after initialize
            hook(module, param.dtype, masters)
    if not masters:
        return param, master
    for module, name in homes:
        master = ensure_master(module, name)
    if master is None:
        master = Master(param)
    return master.value, master


def _homes_of(param: torch.Tensor) -> list[tuple[torch.nn.Module, str]]:
    """The modules of initialized models that hold ``param`` (several where it is tied), and its name in each."""
    modules = dict.fromkeys(module for model in state.models.live for module in model.modules())
    return [(module, name) for module in modules for name, held in module._parameters.items() if held is param]
