"""What was counted in a run: steps that were skipped, what was not finite, what was told. No reasons."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from ampcompat.tools.explain import meanings
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.words import counted, were


@dataclass
class Counts:
    """The counts of one rank, as plain data."""

    steps: int = 0  # of all optimizers
    skipped: int = 0
    blocks: int = 0  # of ``scale_loss``
    blocks_since: int = 0  # those after the last step
    most_blocks: int = 1  # from one step to the next
    lost: dict[str, int] = field(default_factory=dict)  # steps whose "loss", "gradients" or "weights" were not finite
    told: dict[str, int] = field(default_factory=dict)  # lost steps in which each birth was seen, by its words
    scales: dict[str, list[float]] = field(
        default_factory=dict
    )  # the first and the last of each loss whose scale moves
    spoiled_at: int = 0  # the step since which weights are not finite
    at_end: dict[str, str] = field(default_factory=dict)  # what is not finite, or 0, in words, by the row of the page
    warned: list[str] = field(default_factory=list)  # mistakes that amp has warned of

    def add_block(self) -> None:
        """Count a block."""
        self.blocks += 1
        self.blocks_since += 1

    def add_step(self, is_skipped: bool, lost: str) -> None:
        """Count a step, and what of it was not finite, if anything was."""
        self.steps += 1
        self.skipped += is_skipped
        if lost:
            self.lost[lost] = self.lost.get(lost, 0) + 1
        self.most_blocks = max(self.most_blocks, self.blocks_since)
        self.blocks_since = 0

    def message(self, rank: int, ranks: int) -> Message:
        """The counts of ``rank``, one of so many."""
        rows = [meanings.SKIPPED] if self.skipped and not self.told and "loss" not in self.lost else []
        rows += [row for row in (meanings.ZEROS, meanings.OLD_GRADIENTS) if row.name in self.at_end]
        rows += [meanings.NO_STEP] if self.blocks_since > self.most_blocks or not self.steps else []
        who = f"rank {rank} of {ranks}: " if ranks > 1 else ""
        lines = [("see", meanings.see(rows))] if rows else []
        return Message("verdict", f"{who}{self}", lines, {**asdict(self), "of_rank": rank})

    def __str__(self) -> str:
        parts = [self._steps()]
        if self.steps and self.blocks_since > self.most_blocks:
            parts.append(f"no step was made after the last {self.blocks_since} scale_loss blocks")
        if self.lost:
            parts.append(
                "not finite: " + ", ".join(f"the {what} of {counted(n, 'step')}" for what, n in self.lost.items())
            )
        if self.skipped:
            parts += [f"the loss scale{of} went from {a:g} to {b:g}" for of, (a, b) in self.scales.items()]
        parts += [f"seen: {words}, in {counted(steps, 'step')}" for words, steps in self.told.items()]
        if self.spoiled_at:
            parts.append(f"weights are not finite since step {self.spoiled_at}")
        parts += self.at_end.values()
        parts += [f"amp has warned of {words}" for words in self.warned]
        return "; ".join(parts) + "."

    def _steps(self) -> str:
        if self.steps == 0:
            return f"no step was made, in {counted(self.blocks, 'scale_loss block')}"
        return f"{self.skipped} of {counted(self.steps, 'step')} {were(self.skipped)} skipped"
