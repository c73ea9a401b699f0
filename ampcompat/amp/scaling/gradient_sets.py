"""The state of gradients between blocks and steps, in sets of tensors that exactly the same optimizers hold.

Nearly every script has one :class:`GradientSet` for each optimizer. Optimizers that share tensors (an encoder under two
heads) have those in a set of their own: a block takes the sets of its optimizers, each once, and a step asks those of
its optimizer. What each event does to a set:

============================  ===============  ======================  ====================  =============
event                         NONE, EMPTY      UNSCALED                PENDING               LOST
============================  ===============  ======================  ====================  =============
block begins                  saved            saved                   rescaled              saved
block ends                    UNSCALED         added: UNSCALED         added: UNSCALED       LOST
block ends with an overflow   UNSCALED, noted  UNSCALED, noted         UNSCALED, noted       LOST
block gives no gradient       EMPTY            UNSCALED                UNSCALED              LOST
block gives other sets only   NONE             UNSCALED                UNSCALED              LOST
block raises                  NONE             UNSCALED, as before     scaled ones are lost  LOST
end of the block raises       LOST             LOST                    LOST                  LOST
ends with ``delay_unscale``   PENDING          PENDING                 PENDING               LOST
ends in DDP's ``no_sync``     PENDING          PENDING                 PENDING               LOST
``step``                      NONE             used, or skipped: NONE  unscaled first        skipped: NONE
``step`` of one of two users  NONE             used: still UNSCALED    unscaled first        skipped: LOST
``zero_grad``                 NONE             NONE                    NONE                  LOST
``p.grad`` cleared            NONE             the rest is used        the rest is unscaled  LOST
``p.grad`` edited             NONE             used, not by masters    unscaled              LOST
``load_state_dict``           NONE             UNSCALED                PENDING               LOST
============================  ===============  ======================  ====================  =============

A set has gradients of two kinds. Those of a half weight with a master are unscaled into ``grad`` of the master; that is
None again when the set is NONE, and ``p.grad`` of the half weight stays as it is until it is cleared, and is not used
again (``unscaling`` says what it holds when). Those of all other tensors are ``p.grad`` itself: they are saved while a
block is open, the new ones are unscaled in place and added. They stay after a step, as in plain torch: a step in state
NONE uses them again, and is skipped as long as one is not finite that an overflow has left.

An optimizer is a *user* of a set from the first block that gave the set these gradients. After the step of each user,
made or skipped, the gradients are used up. A user that has stepped does not find them in its masters again; its
next block begins anew, with a warning where another user has yet to step.

Overflows are found in the new gradients of a whole block, and are noted in each of its sets: every optimizer that holds
one of them skips its step as long as the gradients are there. The flags are forgotten after ``zero_grad``, when all
gradients are None, and after the step of the last user. Then gradients that are not a master's are still there: as long
as one is not finite, later steps are skipped for that.

What a block adds to gradients of other sets stays scaled; a step that uses them warns. What it adds to tensors that no
optimizer holds does too: these gradients are dropped when an optimizer gets the tensors, with a warning if the script
does not clear them before the next block or step.

FSDP2's gradients of ``set_requires_gradient_sync(False)`` are PENDING too, though they are not in ``p.grad``.

apex kept lists of gradients for each optimizer, and no state (``apex/amp/_process_optimizer.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.half.masters import Master, master_of
from ampcompat.amp.scaling import misuse
from ampcompat.amp.scaling.scaler import MAX_FLAGS, LossScaler


class GradientState(Enum):
    """Name the states of a set; the table at the head of this module has its events."""

    NONE = "no block since the last step"
    EMPTY = "as NONE, but there were blocks: a step warns"
    UNSCALED = "what blocks gave, unscaled"
    PENDING = "still scaled, in p.grad; what was unscaled before is kept apart"
    LOST = "a block whose end failed; cleared"


@dataclass(eq=False)
class Pending:
    """Scaled gradients that a later block unscales, or the step; shared by the sets of one block."""

    scale: torch.Tensor  # what they are scaled by (0-dim float32)
    scalers: dict[LossScaler, None]  # whose losses they stem from: the pass counts for each of them
    is_unsynced: bool = False  # whether a wrapper of the model has yet to average them over processes


class Overflow(NamedTuple):
    """Whether gradients are not finite.

    Attributes:
        scaler: That of the loss they stem from; None of those that an earlier overflow may have left.
        flag: 0-dim float32 tensor on a device, not 0 if so.
    """

    scaler: LossScaler | None
    flag: torch.Tensor


class OpenBlock(Protocol):
    """What a set asks of a ``scale_loss`` block."""

    optimizers: list[Optimizer]
    scale: torch.Tensor | None
    is_plain: bool


@dataclass(eq=False)
class GradientSet:
    """The gradients of the tensors that exactly the same optimizers hold, and all that is known of them.

    Attributes:
        masters: Masters of the half tensors among them.
        direct: The tensors that have no master.
        state: Their state.
        pending: What they are scaled by in state PENDING; else None.
        saved: Unscaled gradients of ``direct``, while scaled ones take their place in ``p.grad``: in an open block, and
            in state PENDING.
        block: The open ``scale_loss`` block that gives them gradients.
        overflows: Flags of the blocks that gave them. One that is set skips the steps that would use them.
        may_be_non_finite: Whether a step that was skipped, or may have been, has left gradients that the next one must
            look at itself.
        has_foreign_gradients: Whether a block of other optimizers has added to them, still multiplied by its scale.
        dropped: Ids of tensors that no optimizer held before, whose gradients were dropped: such blocks added to them.
        users: The optimizers whose blocks gave them, and others that have stepped with them; True: it has stepped.
    """

    masters: list[Master] = field(default_factory=list)
    direct: list[torch.Tensor] = field(default_factory=list)
    state: GradientState = GradientState.NONE
    pending: Pending | None = None
    saved: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    block: OpenBlock | None = None
    overflows: list[Overflow] = field(default_factory=list)
    may_be_non_finite: bool = False
    has_foreign_gradients: bool = False
    dropped: set[int] = field(default_factory=set)
    users: dict[weakref.ref[Optimizer], bool] = field(default_factory=dict)

    # -- what it holds -------------------------------------------------------------------------------------------------
    def add(self, member: Master | torch.Tensor) -> None:
        """Add a tensor, or the master of a half one."""
        if isinstance(member, Master):
            self.masters.append(member)
        else:
            self.direct.append(member)

    def leaves(self) -> list[torch.Tensor]:
        """The tensors that a backward pass gives gradients to."""
        return [*[master.half for master in self.masters], *self.direct]

    def gradients(self, with_masters: bool = True) -> Iterator[torch.Tensor]:
        """The gradients that a step uses: those of masters and of other tensors."""
        if with_masters:
            for master in self.masters:
                if master.value.grad is not None:
                    yield master.value.grad
        for param in self.direct:
            if param.grad is not None:
                yield param.grad

    def has_gradients(self) -> bool:
        """Whether there is a gradient that a step would use."""
        return next(self.gradients(), None) is not None

    def waits_for_others(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` has stepped with these gradients, which are kept for others that have yet to."""
        return len(self.users) > 1 and self.users.get(weakref.ref(optimizer), False)

    def _has_waiting_user(self) -> bool:
        return any(not stepped and user() is not None for user, stepped in self.users.items())

    def is_noted(self) -> bool:
        """Whether anything is known of the gradients that ends when they are cleared."""
        return bool(
            self.state is not GradientState.NONE
            or self.saved
            or self.users
            or self.overflows
            or self.may_be_non_finite
            or self.has_foreign_gradients
            or self.dropped
        )

    # -- a block or a step begins---------------------------------------------------------------------------------------
    def reset_if_cleared(self) -> None:
        """Where all gradients are None, forget what is known of them: a step that would use none is not skipped.

        Warn of gradients that :func:`regroup` has dropped.
        """
        if self.dropped:  # and a script has not cleared them since
            self.dropped.clear()
            misuse.warn_of("scaled gradients of a later param")
        if not self.is_noted() or self.pending is not None or self.state is GradientState.LOST:
            return
        if not self.has_gradients():
            self._forget_notes()
            if self.state is GradientState.UNSCALED:
                self.state = GradientState.NONE

    def begin_anew(self, by: Iterable[Optimizer]) -> None:
        """Drop what a user among ``by`` has stepped with; warn if that was kept for another user.

        LOST becomes NONE: a step was skipped for it.
        """
        if not any(map(self.waits_for_others, by)):
            return
        was_kept = any(master.value.grad is not None for master in self.masters)
        self._drop_masters_gradients()
        self.users = {user: stepped for user, stepped in self.users.items() if not stepped}
        self._drop_flags()
        if self.state is GradientState.LOST:
            self.state = GradientState.NONE
        if was_kept and self._has_waiting_user():
            misuse.warn_of("shared gradients dropped")

    def begin_block(self, block: OpenBlock) -> None:
        """Note that ``block`` is open."""
        self.block = block

    # -- it ends -------------------------------------------------------------------------------------------------------
    def add_saved(self) -> None:
        """Add the gradients that were saved to those that came since."""
        for param, old in self.saved:
            param.grad = old if param.grad is None else _torch.sum_of(param.grad, old)
        self.saved = []

    def end_block(self) -> None:
        """Note that no block is open any more, and forget what was saved or scaled."""
        self.block = None
        self.saved = []
        if self.pending is not None:
            self.note_unscaled()

    def note_new(self, has_new_grads: bool, block_has_new_grads: bool = True) -> None:
        """Note whether a block has left new gradients here, or to any of its sets."""
        if self.state is GradientState.LOST:
            return
        if has_new_grads:
            self.state = GradientState.UNSCALED
        elif self.state is GradientState.NONE and not block_has_new_grads:
            self.state = GradientState.EMPTY

    def note_user(self, optimizer: Optimizer) -> None:
        """Note that a block of ``optimizer`` gave these gradients, if it gave any."""
        if self.state not in (GradientState.NONE, GradientState.EMPTY):
            self.users.setdefault(weakref.ref(optimizer), False)

    def note_overflows(self, flags: list[Overflow]) -> None:
        """Have the next steps skipped if one of ``flags`` is set."""
        self.overflows = [*self.overflows, *flags]
        if len(self.overflows) > MAX_FLAGS:  # a script may never step
            self.overflows = _one_per_scaler(self.overflows)

    def clear_scaled(self) -> None:
        """Clear what a block has given that raised, and what it may have added to: gradients still scaled."""
        for leaf in self.leaves():
            leaf.grad = None
        self._drop_unsynced()

    def lose(self) -> None:
        """Clear what the end of a block has left half unscaled when it raised; the next step is skipped."""
        self.clear_scaled()
        self._drop_masters_gradients()
        self.end_block()
        self.overflows = []
        self.state = GradientState.LOST

    # -- gradients that stay scaled ------------------------------------------------------------------------------------
    def leave_pending(self, pending: Pending) -> None:
        """Leave the gradients of a block scaled; it is not open any more."""
        self.block = None
        self.mark_pending(pending)

    def mark_pending(self, pending: Pending) -> None:
        """Note that what is in ``p.grad`` is scaled."""
        if self.pending is None:
            state.optimizers.pending.append(self)
        self.pending = pending
        self.state = GradientState.PENDING

    def note_unscaled(self) -> None:
        """Note that what was still scaled is unscaled now, or gone."""
        self.pending = None
        state.optimizers.pending = [other for other in state.optimizers.pending if other is not self]
        if self.state is GradientState.PENDING:
            self.state = GradientState.UNSCALED if self.has_gradients() else GradientState.NONE

    # -- steps and clearing --------------------------------------------------------------------------------------------
    def note_step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Note that ``optimizer`` has stepped, or was skipped; after the last user the gradients are used up.

        ``skipped``: None where only the device knows.
        """
        self.users[weakref.ref(optimizer)] = True
        if not self._has_waiting_user():
            self._use_up(skipped)

    def note_checked(self, has_overflowed: bool) -> None:
        """Note that a closure's evaluation was checked: its flags say nothing of the next evaluation."""
        if has_overflowed:
            self._drop_flags()
        else:
            self.overflows = []

    def note_cleared(self) -> None:
        """Note that ``zero_grad`` has cleared or zeroed all gradients."""
        self.saved = []
        if self.pending is not None:
            self._drop_unsynced()
            self.note_unscaled()
        if self.state is not GradientState.LOST:
            self._forget_notes()
            self.state = GradientState.NONE

    def _use_up(self, skipped: bool | None) -> None:
        """Drop the masters' gradients; those of other tensors stay, as in plain torch."""
        self._drop_masters_gradients()
        may_be_non_finite = bool(self.overflows or self.may_be_non_finite) and skipped is not False
        self._forget_notes()
        self.may_be_non_finite = may_be_non_finite
        self.state = GradientState.NONE

    def _drop_flags(self) -> None:
        """Forget the flags of overflows; what they tell of may still be there, and the next step looks."""
        self.may_be_non_finite = self.may_be_non_finite or bool(self.overflows)
        self.overflows = []

    def _forget_notes(self) -> None:
        self.overflows = []
        self.may_be_non_finite = False
        self.has_foreign_gradients = False
        self.dropped.clear()
        self.users.clear()

    def _drop_masters_gradients(self) -> None:
        for master in self.masters:
            master.drop_gradient()

    def _drop_unsynced(self) -> None:
        """Drop the gradients that a wrapper of the model keeps for a later backward pass."""
        for adapter in state.adapters:
            adapter.drop_unsynced_gradients(self.leaves())

    # -- other holders -------------------------------------------------------------------------------------------------
    def part(self, members: list[Master | torch.Tensor], holders: Sequence[Optimizer]) -> GradientSet:
        """A set in the same state, of some of these tensors, which ``holders`` hold."""
        part = replace(
            self,
            masters=[],
            direct=[],
            overflows=list(self.overflows),
            dropped=set(self.dropped),
            users={user: stepped for user, stepped in self.users.items() if user() in holders},
        )
        for member in members:
            part.add(member)
        direct = set(map(id, part.direct))
        part.saved = [(param, grad) for param, grad in self.saved if id(param) in direct]
        if part.users and not part._has_waiting_user():  # the last one is gone, or does not hold them any more
            part._use_up(skipped=None)
        return part


def _one_per_scaler(overflows: list[Overflow]) -> list[Overflow]:
    """One of ``overflows`` for each scaler, whose flag tells whether any of them is set."""
    by_scaler: dict[LossScaler | None, list[torch.Tensor]] = {}
    for scaler, flag in overflows:
        by_scaler.setdefault(scaler, []).append(flag)
    return [Overflow(scaler, _torch.any_of(flags)) for scaler, flags in by_scaler.items()]


# -- which sets there are ----------------------------------------------------------------------------------------------
def sets_of(optimizers: Sequence[Optimizer]) -> list[GradientSet]:
    """The sets of ``optimizers``, each once."""
    if len(optimizers) == 1:
        sets: list[GradientSet] = optimizers[0]._amp_stash.sets
        return sets
    return list(dict.fromkeys(each for optimizer in optimizers for each in optimizer._amp_stash.sets))


def all_sets() -> list[GradientSet]:
    """The sets of all optimizers under amp, each once."""
    return sets_of(state.optimizers.listed())


def is_a_block_open() -> bool:
    """Whether a block is open, of any optimizer."""
    return any(each.block is not None for each in all_sets())


def watch_modules() -> None:
    """Have sets follow modules' ``zero_grad``; until a reset."""
    state.patch_once(_torch.watch_zero_grad, _module_zeroed)


def _module_zeroed(module: torch.nn.Module, set_to_none: bool) -> None:
    """Note in the sets of its parameters that ``module.zero_grad()`` was called; of masters, ``masters`` knows it."""
    noted = [each for each in all_sets() if each.is_noted()]
    if not noted:
        return
    zeroed = set(map(id, module.parameters()))
    for each in noted:
        if zeroed.issuperset(map(id, each.leaves())):
            each.note_cleared()
        else:
            each.saved = [(param, grad) for param, grad in each.saved if id(param) not in zeroed]
            each.dropped -= zeroed


@dataclass(eq=False)
class _Group:
    """What exactly the optimizers ``holders`` hold, by the sets that it was in until now."""

    holders: list[Optimizer]
    members_by_set: dict[GradientSet, list[Master | torch.Tensor]] = field(default_factory=dict)
    newcomers: list[Master | torch.Tensor] = field(default_factory=list)

    def sets(self, dropped: set[int]) -> list[GradientSet]:
        """The sets of these optimizers from now on: one for each older set; newcomers join one that is not scaled.

        ``dropped``: ids of tensors whose gradients were dropped.
        """
        sets = [old.part(members, self.holders) for old, members in self.members_by_set.items()]
        if not self.newcomers:
            return sets
        joined = next((each for each in sets if each.pending is None), None)
        if joined is None:
            joined = GradientSet()
            sets.append(joined)
        for member in self.newcomers:
            joined.add(member)
            stepped = member.value if isinstance(member, Master) else member
            if state.optimizers.has_scaled and stepped.grad is not None:
                joined.may_be_non_finite = True  # its last optimizer may have left an overflow
        joined.dropped |= dropped.intersection(map(id, joined.leaves()))
        return sets


def regroup() -> None:
    """Bring the sets of all optimizers up to date with what each of them holds.

    An optimizer goes on with the gradients of one that is gone, also where they are still scaled, as in plain torch.
    Those of tensors that no optimizer held while a block was open are dropped: blocks give gradients to every tensor of
    a loss, and unscale those of their optimizers. A script that clears them as well hears nothing of it.
    """
    index = state.optimizers
    optimizers = index.listed()
    groups = _groups_by_holders(optimizers)
    leaves = _leaves_of(optimizers)
    dropped: set[int] = set()
    if index.has_scaled:
        dropped = _drop_gradients([leaf for key, leaf in leaves.items() if index.unscaled.get(key) is not leaf])
    left_scaled = {id(leaf) for each in index.pending for leaf in each.leaves()}.difference(leaves)
    for key in left_scaled:
        index.unscaled.pop(key, None)
    index.unscaled.update(leaves)
    index.has_others = len(index.unscaled) > len(leaves)
    index.grouped = len(optimizers)
    index.pending = []
    for optimizer in optimizers:
        optimizer._amp_stash.sets = []
    for group in groups:
        for gradient_set in group.sets(dropped):
            if gradient_set.pending is not None:
                index.pending.append(gradient_set)
            for optimizer in group.holders:
                optimizer._amp_stash.sets.append(gradient_set)


def note_scaled() -> None:
    """Note that a block scales its loss: from now on gradients of tensors that no optimizer holds may be scaled."""
    index = state.optimizers
    index.has_scaled = True
    if index.has_others:
        index.has_others = False
        index.unscaled = weakref.WeakValueDictionary(_leaves_of(index.listed()))


def _leaves_of(optimizers: list[Optimizer]) -> dict[int, torch.Tensor]:
    """By id, the tensors of ``optimizers`` that a backward pass gives gradients to."""
    return {id(leaf): leaf for optimizer in optimizers for leaf in optimizer._amp_stash.leaves()}


def _groups_by_holders(optimizers: list[Optimizer]) -> list[_Group]:
    """The tensors of ``optimizers``, in groups that exactly the same of them hold."""
    old_sets = dict.fromkeys([*state.optimizers.pending, *sets_of(optimizers)])
    old_set_of = {id(leaf): old for old in old_sets for leaf in old.leaves()}
    members: dict[int, Master | torch.Tensor] = {}
    holders: dict[int, list[Optimizer]] = {}
    for optimizer in optimizers:
        stash = optimizer._amp_stash
        members.update((id(master.half), master) for master in stash.masters)
        members.update((id(param), param) for param in stash.direct)
        for leaf in stash.leaves():
            holders.setdefault(id(leaf), []).append(optimizer)
    groups: dict[tuple[int, ...], _Group] = {}
    for key, member in members.items():
        held_by = holders[key]
        group = groups.setdefault(tuple(map(id, held_by)), _Group(held_by))
        old = old_set_of.get(key)
        if old is None:
            group.newcomers.append(member)
        else:
            group.members_by_set.setdefault(old, []).append(member)
    return list(groups.values())


def _drop_gradients(leaves: list[torch.Tensor]) -> set[int]:
    """Drop the gradients of ``leaves``, and those of their masters; return the ids of tensors that had one."""
    dropped = set()
    for leaf in leaves:
        master = master_of(leaf)
        if master is not None:
            master.drop_gradient()
        if leaf.grad is not None:
            leaf.grad = None
            dropped.add(id(leaf))
    return dropped
