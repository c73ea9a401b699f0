"""The watch over the first blocks of a run, and over steps up to the one after them: each rule warns once."""

from __future__ import annotations

from ampcompat._state import state
from ampcompat.amp.misuse.block_rules import ForeignGradients, PlainGradients, UnscaledLoss
from ampcompat.amp.misuse.half_gradients import EditedHalfGradients
from ampcompat.amp.misuse.rule import LastSteps, Rule
from ampcompat.amp.misuse.step_rules import MissingBlock, WritesInStep
from ampcompat.amp.misuse.unknown_optimizers import ScaledForNone
from ampcompat.amp.observers import observer_state
from ampcompat.amp.scaling.open_blocks import OpenBlock
from ampcompat.amp.scaling.optimizer_state import AmpOptimizer

#: How many blocks are watched for each loss: a hook on the loss takes a tenth of a millisecond of a backward pass.
WATCHED = 16


def watch_more(losses: int) -> None:
    """Watch the next blocks, for ``losses`` losses of a call of ``initialize``."""
    watches = _watches()
    if not watches:
        watches = [Watch()]
        observer_state.observers += [*watches[0].rules, watches[0]]
        state.undo_once(end_watch)
    watches[0].blocks_left += WATCHED * losses


def end_watch() -> None:
    """End the watch, if there is one, and take its hooks away."""
    for watch in _watches():
        watch.end()


def _watches() -> list[Watch]:
    return [observer for observer in observer_state.observers if isinstance(observer, Watch)]


class Watch(Rule):
    """Counts blocks, and takes the rules and itself away at the first step after the last.

    Attributes:
        rules: In the order in which they hear of an event.
        blocks_left: How many blocks it has yet to see.
    """

    def __init__(self) -> None:
        steps = LastSteps()
        self.rules: list[Rule] = [
            EditedHalfGradients(),
            ForeignGradients(steps),
            PlainGradients(steps),
            UnscaledLoss(),
            ScaledForNone(),
            MissingBlock(steps),
            WritesInStep(),
            steps,
        ]
        self.blocks_left = 0

    def on_block_end(self, block: OpenBlock) -> None:
        """Count one block less to watch."""
        self.blocks_left = max(self.blocks_left - 1, 0)

    on_block_undone = on_block_end

    def on_step(self, optimizer: AmpOptimizer, skipped: bool | None) -> None:
        """End the watch with the first step after the last block."""
        if not self.blocks_left:
            self.end()

    def end(self) -> None:
        """Take the rules away, and their hooks."""
        ended = (*self.rules, self)
        observer_state.observers[:] = [other for other in observer_state.observers if other not in ended]
        for rule in self.rules:
            rule.end()
