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

from ampcompat.amp import misuse, overflow
from ampcompat.amp.aside import Aside, give_back, put_aside
from ampcompat.amp.gradients import Intake
from ampcompat.amp.master_index import follow_replacements
from ampcompat.amp.masters import Master
from ampcompat.amp.optimizer_state import AmpOptimizerState
from ampcompat.amp.scale_move import ByHand, PutOff, ScaleMove
from ampcompat.amp.scaler import LossScaler


class BackwardPass:
    """A backward pass that gives gradients to ``optimizers``, of a loss scaled by ``scaler``.

    Args:
        optimizers: Optimizers under amp, each once.
        scaler: The loss scaler.
    """

    def __init__(self, optimizers: Sequence[Any], scaler: LossScaler) -> None:
        self.optimizers, self.scaler = optimizers, scaler
        self.stashes: list[AmpOptimizerState] = [one._amp_stash for one in optimizers]
        self.kept: Aside = []
        self.intakes: list[Intake] = []
        self.masters: list[list[Master]] = []
        self.move: ScaleMove | PutOff | ByHand | None = None
        self.after: list[tuple[object, dict[str, Any]]] = []
        self.past_undoing = False

    def begin(self) -> None:
        """Put accumulated gradients aside, so that the pass sees its own alone."""
        for one, stash in zip(self.optimizers, self.stashes, strict=True):
            if stash.delayed_scaler is not self.scaler:
                finish_delayed(one, stash)
            overflow.report_if_known(stash)
            prepare(one, stash)
            stash.in_block = True

    def end(self, move: type[ScaleMove | PutOff | ByHand] = ScaleMove) -> bool:
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
            intake.unscale(self.scaler, stash.aside)
            self.intakes.append(intake)
            self.masters.append(masters)
        self.how = move
        self.past_undoing = True
        self._finish()
        return any([intake.any for intake in self.intakes])  # noqa: C419 - faster

    def end_scaled(self, local: Sequence[Any] = ()) -> None:
        """Leave gradients scaled: a later pass of the same scaler unscales them.

        Args:
            local: Those of the optimizers whose gradients DDP will yet average.
        """
        for stash in self.stashes:
            give_back(stash.delayed_aside, add=True)
        self.after = [
            (
                stash,
                {
                    "gradients_are_local": stash.gradients_are_local or any(one is other for other in local),
                    "params_have_scaled_gradients": True,
                    "delayed_scaler": self.scaler,
                    "delayed_aside": [],
                    "in_block": False,
                },
            )
            for one, stash in zip(self.optimizers, self.stashes, strict=True)
        ]
        self.past_undoing = True
        self._finish()

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
            intake.add(self.scaler)
        if not self.after:
            self.after = self._state_after()
        if self.move is not None:
            self.move.make()
        for owner, values in self.after:
            vars(owner).update(values)

    def _state_after(self) -> list[tuple[object, dict[str, Any]]]:
        move = self.move = self.how(self.scaler)
        # The loss was backpropagated; it need not reach every optimizer of the block.
        reached = any([intake.any for intake in self.intakes])  # noqa: C419 - faster
        after: list[tuple[object, dict[str, Any]]] = []
        for stash, masters in zip(self.stashes, self.masters, strict=True):
            values = {
                "aside": [],
                "delayed_aside": [],
                "params_have_scaled_gradients": False,
                "gradients_are_local": False,
                "blocks": stash.blocks + 1,
                "blocks_with_gradients": stash.blocks_with_gradients + reached,
                "seen": misuse.watch(masters),
                "in_block": False,
            }
            if move.found is not None:
                values["overflows"] = [*stash.overflows, (self.scaler, move.found)]
            after.append((stash, values))
        return after

    def _undo(self) -> None:
        self.scaler._found_inf = {}
        for intake in self.intakes:
            intake.undo()
        for one, stash in zip(self.optimizers, self.stashes, strict=True):
            if stash.in_block:  # all that was accumulated lies aside
                masters, direct = stash.parts(one)
                for param in (*(m.half for m in masters), *direct):
                    param.grad = None
            give_back(stash.delayed_aside)
            give_back(stash.aside)
            stash.delayed_aside, stash.aside, stash.in_block = [], [], False
        give_back(self.kept)


def prepare(optimizer: Any, stash: AmpOptimizerState) -> None:
    """Put aside the gradients that ``optimizer`` has accumulated."""
    masters, direct = stash.parts(optimizer)
    if stash.stepped:
        # A step consumes master gradients: model.zero_grad() and p.grad = None do not reach them.
        for master in masters:
            master.value.grad = None
        stash.stepped = False
    if stash.gradients_are_local:
        pass  # DDP averages what lies in ``param.grad`` when its backward pass comes
    elif stash.params_have_scaled_gradients:
        put_aside([], [*(m.half for m in masters), *direct], stash.delayed_aside)
    else:
        put_aside(masters, direct, stash.aside)


def finish_delayed(optimizer: Any, stash: AmpOptimizerState) -> None:
    """Gradients are still scaled (``delay_unscale=True`` in the last block) and about to be used: unscale them."""
    if not stash.params_have_scaled_gradients or stash.delayed_scaler is None:
        return
    pending = BackwardPass([optimizer], stash.delayed_scaler)
    try:
        for param in stash.parts(optimizer)[1]:
            if param.grad is not None:
                pending.kept.append((param, param.grad))
                param.grad = param.grad.clone()
        pending.end()
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
