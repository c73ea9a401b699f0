"""What was counted in a run: steps that were skipped, what was not finite, what was told. No reasons."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ampcompat.tools.words import counted, were


@dataclass
class Counts:
    """The counts of one rank, as plain data.

    Attributes:
        steps: Steps of all optimizers.
        skipped: Those that were skipped.
        blocks: ``scale_loss`` blocks.
        blocks_since: Those after the last step.
        most_blocks: The most from one step to the next.
        lost: Of how many steps the "loss", the "gradients" or the "weights" were not finite.
        told: In how many lost steps each birth was seen, by its words.
        scales: For each loss whose scale moves, the first scale and the last.
        spoiled_at: The step since which weights are not finite; 0 where they are.
        at_end: What is not finite, or 0, at the end, in words.
        warned: Mistakes that amp has warned of.
    """

    steps: int = 0
    skipped: int = 0
    blocks: int = 0
    blocks_since: int = 0
    most_blocks: int = 1
    lost: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    scales: dict[str, list[float]] = field(default_factory=dict)
    spoiled_at: int = 0
    at_end: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)

    def add_block(self) -> None:
        """Count a block."""
        self.blocks += 1
        self.blocks_since += 1

    def add_step(self, is_skipped: bool) -> None:
        """Count a step."""
        self.steps += 1
        self.skipped += is_skipped
        self.most_blocks = max(self.most_blocks, self.blocks_since)
        self.blocks_since = 0

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
        parts += [f"told: {words} ({counted(steps, 'step')})" for words, steps in self.told.items()]
        if self.spoiled_at:
            parts.append(f"weights are not finite since step {self.spoiled_at}")
        parts += self.at_end
        parts += [f"amp has warned of {words}" for words in self.warned]
        return "; ".join(parts) + "."

    def _steps(self) -> str:
        if self.steps == 0:
            return f"no step was made, in {counted(self.blocks, 'scale_loss block')}"
        return f"{self.skipped} of {counted(self.steps, 'step')} {were(self.skipped)} skipped"
