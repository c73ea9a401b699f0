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
block gives them to others    NONE             UNSCALED                UNSCALED              LOST
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

An optimizer *uses* a set from its first block on, to which the set's gradients go back. After the step of each of these
users, made or skipped, the gradients are used up. A user that has stepped does not find them in its masters again; its
next block begins anew, with a warning where another user has yet to step.

Overflows are found in the new gradients of a whole block, and are noted in each of its sets: every optimizer that holds
one of them skips its step as long as the gradients are there. They are forgotten with the gradients: after
``zero_grad``, when all are None, and after the step of the last user, which leaves those that are not a master's.

What a block adds to gradients of other sets stays scaled; a step that uses them warns. FSDP2's gradients of
``set_requires_gradient_sync(False)`` are PENDING too, though they are not in ``p.grad``.

apex kept lists of gradients for each optimizer, and no state (``apex/amp/_process_optimizer.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.half.masters import Master
from ampcompat.amp.scaling import misuse
from ampcompat.amp.scaling.scaler import MAX_FLAGS, LossScaler


class GradientState(Enum):
    """Name the states of a set; the table at the head of this module has its events."""

    NONE = "no block since the last step"
    EMPTY = "as NONE, and blocks that gave no gradient"
    UNSCALED = "what blocks gave, unscaled"
    PENDING = "still scaled, in p.grad; what was unscaled before is kept apart"
    LOST = "a block whose end failed; cleared"


@dataclass(eq=False)
class Pending:
    """Scaled gradients that a later block unscales, or the step; shared by the sets of one block."""

    scale: torch.Tensor  # what they are scaled by (0-dim float32)
    scalers: dict[LossScaler, None]  # whose losses they stem from: the pass counts for each of them


#: A scaler, and whether a backward pass of its loss overflowed (0-dim float32 on a device, not 0 if so).
Overflow = tuple[LossScaler, torch.Tensor]


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
        has_old_overflow: Whether a step that was skipped, or may have been, has left gradients that are not finite.
        has_foreign_gradients: Whether a block of other optimizers has added to them, still multiplied by its scale.
        users: The optimizers whose blocks gave them, and whether each has stepped with them.
    """

    masters: list[Master] = field(default_factory=list)
    direct: list[torch.Tensor] = field(default_factory=list)
    state: GradientState = GradientState.NONE
    pending: Pending | None = None
    saved: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    block: Any = None
    overflows: list[Overflow] = field(default_factory=list)
    has_old_overflow: bool = False
    has_foreign_gradients: bool = False
    users: dict[weakref.ref[Optimizer], bool] = field(default_factory=dict)

    # -- what it holds -------------------------------------------------------------------------------------------------
    def leaves(self) -> list[torch.Tensor]:
        """The tensors that a backward pass gives gradients to."""
        return [*[master.half for master in self.masters], *self.direct]

    def has_gradients(self) -> bool:
        """Whether there is a gradient that a step would use."""
        for master in self.masters:
            if master.value.grad is not None:
                return True
        for param in self.direct:
            if param.grad is not None:
                return True
        return bool(self.saved)

    def has_stepped(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` has stepped with these gradients, while others have yet to."""
        return len(self.users) > 1 and self.users.get(weakref.ref(optimizer), False)

    def _has_waiting_user(self) -> bool:
        waiting = [user for user, stepped in self.users.items() if not stepped and user() is not None]
        return bool(waiting)

    def gradients(self, with_masters: bool = True) -> Iterator[torch.Tensor]:
        """The gradients that a step uses: those of masters and of other tensors, and those saved."""
        params = [master.value for master in self.masters] if with_masters else []
        for param in (*params, *self.direct):
            if param.grad is not None:
                yield param.grad
        for _, grad in self.saved:
            yield grad

    # -- a block -------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Note that no block is open any more, and that no gradient is scaled or saved."""
        self.block = None
        self.saved = []
        if self.pending is not None:
            self.note_unscaled()

    def begin_anew(self, by: Iterable[Optimizer]) -> bool:
        """Drop what a user among ``by`` has stepped with; return whether that was kept for another user.

        Gradients that were lost have skipped a step then.
        """
        if len(self.users) < 2 or not any(map(self.has_stepped, by)):
            return False
        was_kept = any(master.value.grad is not None for master in self.masters)
        for master in self.masters:
            master.drop_gradient()
        self.users = {user: stepped for user, stepped in self.users.items() if not stepped}
        self._age_overflows()
        if self.state is GradientState.LOST:
            self.state = GradientState.NONE
        return was_kept and self._has_waiting_user()

    def reset_if_cleared(self) -> None:
        """Where all gradients are None, forget overflows and users: a step that would use none is not skipped."""
        noted = self.users or self.overflows or self.has_old_overflow or self.has_foreign_gradients
        if not noted or self.pending is not None or self.state is GradientState.LOST:
            return
        if not self.has_gradients():
            self._forget()
            if self.state is GradientState.UNSCALED:
                self.state = GradientState.NONE

    def _age_overflows(self) -> None:
        """Keep of overflows that what they left may still be there."""
        self.has_old_overflow = self.has_old_overflow or bool(self.overflows)
        self.overflows = []

    def _forget(self) -> None:
        self.overflows = []
        self.has_old_overflow = False
        self.has_foreign_gradients = False
        self.users.clear()

    def add_saved(self) -> None:
        """Add the gradients that were saved to those that came since."""
        for param, old in self.saved:
            param.grad = old if param.grad is None else _torch.sum_of(param.grad, old)
        self.saved = []

    def note_new(self, has_new_grads: bool, block_has_new_grads: bool = True) -> None:
        """Note whether a block has left new gradients here, or to any of its sets."""
        if self.state is GradientState.LOST:
            return
        if has_new_grads:
            self.state = GradientState.UNSCALED
        elif self.state is GradientState.NONE and not block_has_new_grads:
            self.state = GradientState.EMPTY

    def note_user(self, optimizer: Optimizer) -> None:
        """Note that a block of ``optimizer`` gave these gradients."""
        if self.state not in (GradientState.NONE, GradientState.EMPTY):
            self.users.setdefault(weakref.ref(optimizer), False)

    def note_overflows(self, flags: list[Overflow]) -> None:
        """Have the next steps skipped if one of ``flags`` is set."""
        self.overflows = [*self.overflows, *flags]
        if len(self.overflows) > MAX_FLAGS:  # a script may never step
            self.overflows = _one_per_scaler(self.overflows)

    def pend(self, pending: Pending) -> None:
        """Leave the gradients of a block scaled."""
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

    def lose(self) -> None:
        """Clear what the end of a block has left half unscaled when it raised; the next step is skipped."""
        for master in self.masters:
            master.half.grad = None
            master.drop_gradient()
        for param in self.direct:
            param.grad = None
        self._drop_waiting()
        self.close()
        self.overflows = []
        self.state = GradientState.LOST

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
            self._age_overflows()
        self.overflows = []

    def _use_up(self, skipped: bool | None) -> None:
        """Drop the masters' gradients; those of other tensors stay, as in plain torch."""
        for master in self.masters:
            master.added_grad = None
            master.value.grad = None
        may_stay = bool(self.overflows or self.has_old_overflow) and skipped is not False
        self._forget()
        self.has_old_overflow = may_stay
        self.state = GradientState.NONE

    def clear(self) -> None:
        """Note that ``zero_grad`` has cleared or zeroed all gradients."""
        self.saved = []
        if self.pending is not None:
            self._drop_waiting()
            self.note_unscaled()
        if self.state is not GradientState.LOST:
            self._forget()
            self.state = GradientState.NONE

    def undo(self) -> None:
        """Drop what a block has given that raised, and what it may have added to: gradients still scaled."""
        for leaf in self.leaves():
            leaf.grad = None
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        for adapter in state.adapters:
            adapter.drop_waiting_gradients(self.leaves())

    # -- other holders -------------------------------------------------------------------------------------------------
    def part(self, masters: list[Master], direct: list[torch.Tensor], holders: Sequence[Optimizer]) -> GradientSet:
        """A set in the same state, of some of these tensors and of new ones, which ``holders`` hold."""
        held = set(map(id, direct))
        return replace(
            self,
            masters=masters,
            direct=direct,
            saved=[(param, grad) for param, grad in self.saved if id(param) in held],
            overflows=list(self.overflows),
            users={user: stepped for user, stepped in self.users.items() if user() in holders},
        )


def _one_per_scaler(flags: list[Overflow]) -> list[Overflow]:
    """One flag for each scaler, that tells whether any of its ``flags`` is set."""
    by_scaler: dict[LossScaler, list[torch.Tensor]] = {}
    for scaler, flag in flags:
        by_scaler.setdefault(scaler, []).append(flag)
    return [(scaler, _torch.any_of(held)) for scaler, held in by_scaler.items()]


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


def watch_modules() -> None:
    """Have saved gradients follow modules' ``zero_grad``; until a reset."""
    state.patch_once(_torch.watch_zero_grad, _drop_saved)


def _drop_saved(module: torch.nn.Module, set_to_none: bool) -> None:
    """Drop what is saved of the parameters of ``module``, whose ``zero_grad`` was called."""
    with_saved = [each for each in all_sets() if each.saved]
    if not with_saved:
        return
    cleared = set(map(id, module.parameters()))
    for each in with_saved:
        each.saved = [(param, grad) for param, grad in each.saved if id(param) not in cleared]


class _Members:
    """The tensors of a set in the making: those that some optimizers hold, and that have come from one older set."""

    def __init__(self, holders: list[Optimizer]) -> None:
        self.holders = holders
        self.masters: list[Master] = []
        self.direct: list[torch.Tensor] = []

    def add(self, leaf: Master | torch.Tensor) -> None:
        if isinstance(leaf, Master):
            self.masters.append(leaf)
        else:
            self.direct.append(leaf)


def regroup() -> None:
    """Bring the sets of all optimizers up to date with what each of them holds.

    A set that falls apart passes its state on to each part. Tensors that no set had join the set of their holders.

    An optimizer goes on with the gradients of one that is gone, also where they are still scaled, as in plain torch.
    Those of tensors that no optimizer held for a while are dropped: blocks give gradients to every tensor of a loss,
    and unscale those of their optimizers.
    """
    index = state.optimizers
    optimizers = index.listed()
    groups = _members_by_holders(optimizers)
    held_before = index.held
    index.held = weakref.WeakValueDictionary()
    index.pending = []
    index.grouped = len(optimizers)
    for optimizer in optimizers:
        optimizer._amp_stash.sets = []
        index.held.update({id(leaf): leaf for leaf in optimizer._amp_stash.leaves()})
    for members_by_set in groups:
        newcomers = members_by_set.pop(None, None)
        if newcomers is not None and members_by_set:
            joined, members = next(iter(members_by_set.items()))
            if joined is not None and joined.pending is None:
                _drop_scaled(newcomers, held_before)
            members.masters += newcomers.masters
            members.direct += newcomers.direct
        elif newcomers is not None:
            _drop_scaled(newcomers, held_before)
            # An optimizer that is gone may have left gradients that are not finite.
            members_by_set[GradientSet(has_old_overflow=index.has_scaled)] = newcomers
        for old, members in members_by_set.items():
            if old is not None:
                _put_in_place(old.part(members.masters, members.direct, members.holders), members.holders)


def _put_in_place(made: GradientSet, holders: list[Optimizer]) -> None:
    """Give a set to its holders; used up if a user that has yet to step does not hold it any more, or is gone."""
    if made.pending is not None:
        state.optimizers.pending.append(made)
    if made.users and not made._has_waiting_user():
        made._use_up(skipped=None)
    for optimizer in holders:
        optimizer._amp_stash.sets.append(made)


def _drop_scaled(newcomers: _Members, held_before: Mapping[int, torch.Tensor]) -> None:
    """Clear gradients of ``newcomers`` that are none of ``held_before``, if a loss was scaled yet."""
    if not state.optimizers.has_scaled:
        return
    for master in newcomers.masters:
        if held_before.get(id(master.half)) is not master.half:
            master.drop_gradient()
            _drop_scaled_gradient(master.half)
    for param in newcomers.direct:
        if held_before.get(id(param)) is not param:
            _drop_scaled_gradient(param)


def _drop_scaled_gradient(leaf: torch.Tensor) -> None:
    if leaf.grad is not None:
        leaf.grad = None
        misuse.warn_of("scaled gradients of a later param")


def _members_by_holders(optimizers: list[Optimizer]) -> list[dict[GradientSet | None, _Members]]:
    """For each combination of ``optimizers``, the tensors that exactly these hold, by the set that they are in now."""
    old_sets = dict.fromkeys([*state.optimizers.pending, *sets_of(optimizers)])
    old_set_of = {id(leaf): old for old in old_sets for leaf in old.leaves()}
    leaves: dict[int, Master | torch.Tensor] = {}
    holders: dict[int, list[Optimizer]] = {}
    for optimizer in optimizers:
        stash = optimizer._amp_stash
        leaves.update((id(master.half), master) for master in stash.masters)
        leaves.update((id(param), param) for param in stash.direct)
        for leaf in stash.leaves():
            holders.setdefault(id(leaf), []).append(optimizer)
    groups: dict[tuple[int, ...], dict[GradientSet | None, _Members]] = {}
    for key, held in leaves.items():
        held_by = holders[key]
        members_by_set = groups.setdefault(tuple(map(id, held_by)), {})
        members_by_set.setdefault(old_set_of.get(key), _Members(held_by)).add(held)
    return list(groups.values())
