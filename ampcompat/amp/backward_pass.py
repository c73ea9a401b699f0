"""One backward pass, from the entry of a ``scale_loss`` block to its exit: made whole, or not at all.

Whatever fails inside (the user's code, memory, Ctrl-C at any line) must leave no gradient half unscaled and no scale
half moved, and while all goes well nothing may be copied for that. So work that can be undone comes first: the new
gradients are unscaled while the accumulated ones lie aside. Then comes what cannot be: accumulated master gradients are
added to in place. From there on an interrupted pass is finished, not undone: each part of the rest can tell that it was
done, or sets values that were computed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ampcompat import _torch
from ampcompat.amp import misuse, overflow
from ampcompat.amp.accumulation import go_back, note_waiting, put_all_aside, rescale, waiting_beside
from ampcompat.amp.aside import give_back
from ampcompat.amp.gradients import Intake
from ampcompat.amp.master_index import follow_replacements
from ampcompat.amp.masters import Master
from ampcompat.amp.optimizer_state import AmpOptimizerState, Waiting
from ampcompat.amp.scale_move import ByHand, Flag, LeftToScript, PutOff, ScaleMove
from ampcompat.amp.scaler import LossScaler

Move = ScaleMove | PutOff | ByHand


class BackwardPass:
    """A backward pass that gives gradients to ``optimizers``, of a loss scaled by ``scaler``.

    Args:
        optimizers: Optimizers under amp, each once.
        scaler: The loss scaler.
        scale: What it multiplied the loss by; None, and later set, where that is not known yet.
    """

    def __init__(self, optimizers: Sequence[Any], scaler: LossScaler, scale: torch.Tensor | None = None) -> None:
        self.optimizers, self.scaler, self.scale = optimizers, scaler, scale
        self.stashes: list[AmpOptimizerState] = [one._amp_stash for one in optimizers]
        # Of a pass that unscales what waits: these gradients.
        self.kept: list[tuple[torch.Tensor, torch.Tensor | None]] | None = None
        self.intakes: list[Intake] = []
        self.masters: list[list[Master]] = []
        self.how: type[Move] = ScaleMove
        self.moves: list[Move] = []
        self.after: list[tuple[AmpOptimizerState, dict[str, Any]]] = []
        self.past_undoing = False

    def begin(self) -> None:
        """Put accumulated gradients aside, so that the pass sees its own alone."""
        beside = waiting_beside(self.optimizers)
        if beside or len(self.optimizers) > 1:
            # Those that wait first: what lies in shared tensors is scaled.
            self.optimizers = sorted([*self.optimizers, *beside], key=lambda one: one._amp_stash.waiting is None)
            self.stashes = [one._amp_stash for one in self.optimizers]
        for one, stash in zip(self.optimizers, self.stashes, strict=True):
            overflow.report_if_known(stash)
            if stash.waiting is not None and not stash.waiting.fits(self.scaler):
                if stash.gradients_are_local:
                    rescale([one, *waiting_beside([one])], self.scaler)
                else:
                    finish_delayed(one, stash, self.scaler)
        for one, stash in zip(self.optimizers, self.stashes, strict=True):
            put_all_aside(one, stash)
            stash.in_block = True

    @_torch.without_grad
    def end(self, move: type[Move] = ScaleMove) -> bool:
        """Unscale the new gradients, add them to the accumulated ones, move the scale. No host sync.

        Args:
            move: What happens to the scaler.

        Returns:
            Whether there were new gradients.
        """
        done: set[int] | None = set() if len(self.optimizers) > 1 else None
        for one, stash in zip(self.optimizers, self.stashes, strict=True):
            give_back(stash.delayed_aside, add=True, copy=True)
            masters, direct = stash.parts(one)
            follow_replacements(masters)
            if done is not None:  # what two optimizers share belongs to the first
                masters = [m for m in masters if id(m.value) not in done]
                direct = [p for p in direct if id(p) not in done]
                done.update(id(m.value) for m in masters)
                done.update(id(p) for p in direct)
            intake = Intake(masters, direct)
            self.intakes.append(intake)
            self.masters.append(masters)
            intake.unscale(self.scaler, self.scale, stash.aside)
        self.how = move
        self.past_undoing = True
        self._finish()
        return any([intake.any for intake in self.intakes])  # noqa: C419 - faster

    @torch.no_grad()
    def end_scaled(self, local: Sequence[Any] = ()) -> None:
        """Leave gradients scaled: a later pass unscales them.

        Args:
            local: Those of the optimizers whose gradients DDP will yet average.
        """
        scale: torch.Tensor = self.scaler._scale if self.scale is None else self.scale  # type: ignore[assignment]
        for stash in self.stashes:
            give_back(stash.delayed_aside, add=True)
        note_waiting(self.optimizers)
        block = frozenset([object()])
        after: list[tuple[AmpOptimizerState, dict[str, Any]]] = []
        for one, stash in zip(self.optimizers, self.stashes, strict=True):
            earlier, blocks = (stash.waiting.scalers, stash.waiting.blocks) if stash.waiting else ({}, frozenset())
            values = {
                "waiting": Waiting({**earlier, self.scaler: None}, self.scaler, scale, blocks | block),
                "gradients_are_local": stash.gradients_are_local or any(one is other for other in local),
                "delayed_aside": [],
                "local": [],
                "in_block": False,
            }
            after.append((stash, values))
        self.after = after
        self.past_undoing = True
        self._finish()

    @torch.no_grad()
    def fail(self) -> None:
        """Something was raised: undo what was done, or finish it."""
        if self.past_undoing:
            try:
                self._finish()
                return
            except Exception:  # no memory for it: what was accumulated in place stays, the rest goes back
                pass
        self._undo()

    def _finish(self) -> None:
        for intake in self.intakes:
            intake.add(self.scaler, self.scale)
        if not self.after:
            self.after = self._state_after()
        for move in self.moves:
            move.make()
        for stash, values in self.after:
            vars(stash).update(values)

    def _state_after(self) -> list[tuple[AmpOptimizerState, dict[str, Any]]]:
        move = self.how(self.scaler)
        moves: list[Move] = [move]
        overflows: list[Flag] = []
        if move.found is not None:
            # Scalers whose losses lie in the same gradients count a pass as well: which overflowed is not known.
            waiting = [stash.waiting for stash in self.stashes if stash.waiting is not None]
            others = {other: None for held in waiting for other in held.scalers if other is not self.scaler}
            moves += [ScaleMove(other, move.found) for other in others]
            decider = self.scaler.updates_by_hand if self.how is LeftToScript else None
            overflows = [Flag(self.scaler, move.found, decider), *(Flag(other, move.found) for other in others)]
        # The loss was backpropagated; it need not reach every optimizer of the block.
        reached = any([intake.any for intake in self.intakes])  # noqa: C419 - faster
        after: list[tuple[AmpOptimizerState, dict[str, Any]]] = []
        for stash, masters in zip(self.stashes, self.masters, strict=True):
            values = {
                "aside": [],
                "delayed_aside": [],
                "waiting": None,
                "gradients_are_local": False,
                "local": [],
                "blocks": stash.blocks + 1,
                "blocks_with_gradients": stash.blocks_with_gradients + reached,
                "seen": misuse.watch(masters),
                "in_block": False,
                "overflows": overflow.joined(stash.overflows, overflows),
            }
            after.append((stash, values))
        self.moves = moves
        return after

    def _undo(self) -> None:
        self.scaler._found_inf = {}
        for intake in self.intakes:
            intake.undo()
        if self.kept is None:
            for one, stash in zip(self.optimizers, self.stashes, strict=True):
                go_back(one, stash)
        else:  # what is aside stays aside
            for param, grad in self.kept:
                param.grad = grad


def finish_delayed(optimizer: Any, stash: AmpOptimizerState, next_scaler: LossScaler | None = None) -> None:
    """Unscale what waits: it is about to be used, or a block with another scale follows.

    For the other optimizers of its blocks, and those that share its tensors, it is the same backward pass.

    Args:
        optimizer: An optimizer under amp.
        stash: Its state.
        next_scaler: The scaler of the block that follows. Where it is the same, the two are one backward pass of it.
    """
    if stash.waiting is None:
        return
    together = [optimizer, *waiting_beside([optimizer], of_one_block=True)]
    pending = BackwardPass(together, stash.waiting.scaler, stash.waiting.scale)
    direct = {id(p): p for one, held in zip(together, pending.stashes, strict=True) for p in held.parts(one)[1]}
    pending.kept = kept = []
    try:
        for param in direct.values():
            kept.append((param, param.grad))
            if param.grad is not None:
                param.grad = param.grad.clone()
        pending.end(PutOff if next_scaler is pending.scaler else ScaleMove)
    except BaseException:
        pending.fail()
        raise


def post_backward(optimizer: Any, scaler: LossScaler) -> None:
    """The exit of a block by hand (apex: ``_post_amp_backward``): ``scaler`` is updated by its own caller."""
    by_hand = BackwardPass([optimizer], scaler)
    try:
        by_hand.end(ByHand)
    except BaseException:
        by_hand.fail()
        raise
