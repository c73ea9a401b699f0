"""Keep amp's own state of one optimizer, as ``optimizer._amp_stash``, and which tensors the optimizer holds.

apex kept the same there (``apex/amp/_process_optimizer.py: AmpOptimizerState``); attributes with apex's names go on
working, since scripts test for them.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._types import HALF_DTYPES, Optimizer
from ampcompat.amp._amp_state import maybe_print
from ampcompat.amp.adapters.wrapped import inner_optimizers
from ampcompat.amp.half.masters import Master, drop_cleared_gradients, master_of, settle
from ampcompat.amp.half.record import ensure_master
from ampcompat.amp.half.saving import hook, is_hooked
from ampcompat.amp.scaling.scaler import MAX_FLAGS, LossScaler
from ampcompat.amp.scaling.session import Session


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


class WaitingGradient:
    """An unscaled gradient that waits for a step, to see what writes to it."""

    def __init__(self, param: torch.Tensor) -> None:
        grad: torch.Tensor = param.grad  # type: ignore[assignment] # the caller has looked
        self.param = param
        self.reference = weakref.ref(grad)
        self.version = grad._version

    def is_there(self) -> bool:
        """Whether the param still has this gradient. A block of its own optimizer puts another one in its place."""
        grad = _torch.tensor_of(self.reference)
        return grad is not None and grad is self.param.grad

    def was_added_to(self) -> bool:
        """Whether it is there, and was written since."""
        return self.is_there() and self.param.grad._version != self.version  # type: ignore[union-attr]


#: A scaler, and whether a backward pass of its loss overflowed (0-dim float32 on a device, not 0 if so).
Overflow = tuple[LossScaler, torch.Tensor]


#: A flag of a step that the device decided about, and the scale to name, both while they are copied to the host. No
#: scaler: the flag tells of gradients that an earlier overflow has left.
FlagOnItsWay = tuple[LossScaler | None, _torch.HostCopy]


@dataclass(eq=False, slots=True)
class LastStep:
    """What the last step of an optimizer, made or skipped, has left.

    Attributes:
        skipped: Whether it was skipped; None before the first step, and while only the device knows.
        first_gradient: The first gradient in the model when the step had used it. A step that finds the same one again
            had no new gradient.
        left_to_others: Masters whose gradients it has used, and left to another optimizer that holds them and has not;
            with these gradients.
    """

    skipped: bool | None = None
    first_gradient: weakref.ref[torch.Tensor] | None = None
    left_to_others: dict[Master, weakref.ref[torch.Tensor]] = field(default_factory=dict)


@dataclass(eq=False)
class AmpOptimizerState:
    """Masters and gradients of one optimizer between blocks and steps.

    What the optimizer holds; changes with its param groups (:meth:`look_up`):

    Attributes:
        session: The call of ``initialize`` that owns it.
        groups: The params of each group, as last looked up.
        masters: Masters of these params.
        direct: Params without a master.

    A backward pass; set when a block begins, and reset when it ends:

    Attributes:
        block: The open ``scale_loss`` block.
        aside: Unscaled gradients of ``direct``, while scaled ones take their place in ``param.grad``. They stay aside
            as long as gradients are pending.
        aside_taken: Whether a script's own ``_post_amp_backward`` has asked for them, to add them itself.
        pending: Set while gradients stay scaled after a block.

    What blocks have left for the next step; reset by the step:

    Attributes:
        gradients: Whether there are any.
        overflows: Flags any of which skips the next step.
        earlier_overflows: Flags of overflows whose gradients may still be there, after a skipped step or a block of an
            optimizer that shares tensors with this one. Any of them skips a step that would use a gradient which is not
            finite. They outlive skipped steps; a step that is made, and ``zero_grad``, reset them.

        mixed_gradient: One that a block of another optimizer has added to, still multiplied by its loss scale.

    What steps have left:

    Attributes:
        last_step: The last one.
        undecided_steps: Steps that the device decided about, oldest first; the host has not read their flags yet.
    """

    session: Session
    groups: list[list[torch.Tensor]] = field(default_factory=list)
    masters: list[Master] = field(default_factory=list)
    direct: list[torch.Tensor] = field(default_factory=list)
    block: weakref.ref[Any] | None = None
    aside: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    aside_taken: bool = False
    pending: Pending | None = None
    gradients: Gradients = Gradients.NONE
    overflows: list[Overflow] = field(default_factory=list)
    earlier_overflows: list[Overflow] = field(default_factory=list)
    mixed_gradient: WaitingGradient | None = None
    last_step: LastStep = field(default_factory=LastStep)
    undecided_steps: list[list[FlagOnItsWay]] = field(default_factory=list)

    lazy_init_called = True  # apex's name: masters exist from ``initialize`` on

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
            self.overflows = _one_per_scaler(self.overflows)

    def note_earlier_overflows(self, flags: list[Overflow]) -> None:
        """Have steps skipped that find a gradient which is not finite, if one of ``flags`` is set."""
        self.earlier_overflows = [*self.earlier_overflows, *flags]
        if len(self.earlier_overflows) > MAX_FLAGS:
            self.earlier_overflows = _one_per_scaler(self.earlier_overflows)

    def used_gradients(self) -> dict[Master, torch.Tensor]:
        """The gradients that the last step has used, as far as they are still there for other optimizers."""
        used: dict[Master, torch.Tensor] = {}
        for master, reference in self.last_step.left_to_others.items():
            grad = master.value.grad
            if grad is not None and grad is _torch.tensor_of(reference):
                used[master] = grad
        return used

    def gradients_for_step(self) -> list[torch.Tensor]:
        """The gradients that a step would use: those of masters and of other params, and those put aside."""
        used = self.used_gradients()
        params = [master.value for master in self.masters if master not in used]
        params += self.direct
        gradients = [param.grad for param in params if param.grad is not None]
        gradients += [grad for _, grad in self.aside]
        return gradients

    def take_aside(self, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients aside of ``params``; the caller adds them."""
        self.aside_taken = True
        aside = {id(param): grad for param, grad in self.aside}
        return [aside.get(id(param)) for param in params]

    def add_aside(self) -> None:
        """Add the gradients that were put aside to those that came since."""
        for param, old in self.aside:
            param.grad = old if param.grad is None else _torch.sum_of(param.grad, old)
        self.aside = []

    def look_up(self, optimizer: Optimizer) -> None:
        """Bring masters and direct params up to date where the groups of ``optimizer`` changed."""
        if self._is_up_to_date(optimizer):
            return
        self.masters = adopt_masters(optimizer, self.session)
        sides = {id(tensor) for master in self.masters for tensor in (master.half, master.value)}
        held = {id(param): param for group in optimizer.param_groups for param in group["params"]}
        self.direct = [param for key, param in held.items() if key not in sides]
        self.groups = [list(group["params"]) for group in optimizer.param_groups]
        state.optimizers.held.update({id(leaf): leaf for leaf in self.leaves()})
        state.optimizers.sharing = None

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

    def show_masters(self, optimizer: Optimizer) -> None:
        """Have masters, and their gradients, follow what the script did to the model's, which reads or writes them."""
        drop_cleared_gradients(self.masters)
        if not self.in_block:
            self.look_up(optimizer)
            settle(self.masters)

    def report_arrived(self) -> None:
        """Say which earlier steps the device skipped, as far as their flags have reached the host."""
        while self.undecided_steps and all(copied.arrived() for _, copied in self.undecided_steps[0]):
            self._report(self.undecided_steps.pop(0))

    def report_all(self) -> None:
        """Say which earlier steps the device skipped. A host sync where flags have not reached the host."""
        while self.undecided_steps:
            self._report(self.undecided_steps.pop(0))

    def _report(self, flags: list[FlagOnItsWay]) -> None:
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
        self.add_aside()
        if any(param.grad is not None for param in self.direct):
            self.gradients = Gradients.UNSCALED

    @property
    def already_patched(self) -> bool:
        """Whether the next step will be skipped: one host sync for each overflow flag.

        Writing it changes nothing. apex patched ``step`` to skip, and skipped none of those that a script had marked as
        patched.
        """
        if self.gradients is Gradients.LOST:
            return True
        return any(flag.item() for _, flag in self.overflows)

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
        return self.take_aside(self.all_fp16_params)

    @property
    def all_fp32_grad_stash(self) -> list[torch.Tensor | None]:
        """The same of float32 params."""
        return self.take_aside(self.all_fp32_params)

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


def _one_per_scaler(flags: list[Overflow]) -> list[Overflow]:
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
def adopt_masters(optimizer: Optimizer, session: Session) -> list[Master]:
    """Have ``optimizer`` hold the masters of half weights, as ``session`` wants it; return those that it steps.

    As in apex (``apex/amp/_process_optimizer.py: lazy_init_with_master_weights``).
    """
    masters: dict[Master, None] = {}

    def adopted(param: torch.Tensor) -> torch.Tensor:
        master = _master_to_step(param, session)
        if master is None:
            return _model_tensor(param)
        masters[master] = None
        return master.value

    _exchange_params(optimizer, adopted)
    return list(masters)


def give_back_params(optimizer: Optimizer) -> None:
    """Undo :func:`adopt_masters`: ``optimizer`` holds the model's own tensors again."""
    _exchange_params(optimizer, _model_tensor)


def _exchange_params(optimizer: Optimizer, exchanged: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put ``exchanged(param)`` in the place of each param of ``optimizer``.

    Groups and their lists keep their identity; state moves with its parameter.
    """
    states = [each.state for each in (optimizer, *inner_optimizers(optimizer))]
    for group in optimizer.param_groups:
        params = group["params"]
        for index, param in enumerate(params):
            new = exchanged(param)
            if new is param:
                continue
            for state_by_param in states:
                if param in state_by_param:
                    state_by_param[new] = state_by_param.pop(param)
            params[index] = new


def _model_tensor(param: torch.Tensor) -> torch.Tensor:
    """The model's tensor that ``param`` is the master of; ``param`` itself if it is none."""
    master = master_of(param)
    if master is None or master.value is not param:
        return param
    return master.half


def _master_to_step(param: torch.Tensor, session: Session) -> Master | None:
    """The master that an optimizer of ``session`` steps for ``param``; None where it steps the model's own tensor.

    Made if missing, together with the hooks of a module that was added after ``initialize``. A half parameter of no
    model has a master that nothing holds but its optimizer's list of them.
    """
    has_masters = session.policy.master_weights
    master = master_of(param)
    if master is not None and master.value is param:
        was_cast_back = master.half.dtype == torch.float32  # by a later call, at another level
        return master if has_masters and not was_cast_back else None
    if param.dtype not in HALF_DTYPES:
        return None
    if master is not None:
        return master if has_masters else None
    if session.policy.half_dtype is None:  # half by the script's own doing
        return None
    slots = _slots_of(param)
    for module, _ in slots:
        if not is_hooked(module):  # it was added after initialize
            hook(module, param.dtype, has_masters)
    if not has_masters:
        return None
    for module, name in slots:
        master = ensure_master(module, name)
    return Master(param) if master is None else master


def _slots_of(param: torch.Tensor) -> list[tuple[torch.nn.Module, str]]:
    """The modules of initialized models that hold ``param`` (several where it is tied), and its name in each."""
    modules = dict.fromkeys(module for model in state.models.live for module in model.modules())
    return [(module, name) for module in modules for name, held in module._parameters.items() if held is param]


def match_state(optimizer: Optimizer) -> None:
    """Give state from before ``initialize`` the dtype of its param, where torch's own ``load_state_dict`` does so."""
    for each in (optimizer, *inner_optimizers(optimizer)):
        if getattr(type(each), "load_state_dict", None) is not torch.optim.Optimizer.load_state_dict:
            continue
        for param, held in list(each.state.items()):
            if not isinstance(param, torch.Tensor) or not isinstance(held, dict):
                continue
            for name, value in held.items():
                if name != "step" and _is_state_of(param, value) and value.dtype != param.dtype:
                    each.state[param] = {**each.state[param], name: value.to(param.dtype)}


def _is_state_of(param: torch.Tensor, value: object) -> bool:
    """Whether ``value`` is a momentum or the like: a floating tensor of the shape of ``param``."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == param.shape
