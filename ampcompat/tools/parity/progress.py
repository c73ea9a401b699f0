"""Show a run's progress: a bar with steps/s on a terminal, a line at its start and end elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from ampcompat.tools.parity.runs import Run
from ampcompat.tools.recording.steps import Step

WIDTH = 30


class Progress:
    """Progress of one level.

    Args:
        name: Of the level.
        steps: Steps asked for.
        write: Takes text and what follows it (a newline or nothing).
        terminal: Whether text is read on a terminal as it comes.
    """

    def __init__(self, name: str, steps: int, write: Callable[[str, str], None], terminal: bool) -> None:
        self.name, self.steps, self.write, self.terminal = name, steps, write, terminal
        self.made = self.skipped = 0
        self.seconds = 0.0
        if terminal:
            self._draw()
        else:
            write(f"{name}: running", "\n")

    def on_step(self, step: Step) -> None:
        """One more step."""
        self.made, self.skipped = step.step, self.skipped + step.skipped
        self.seconds += step.seconds or 0.0
        if self.terminal:
            self._draw()

    def finish(self, run: Run) -> None:
        """The run is over."""
        rate = self._rate()
        text = f"{self.name}: {self.made} steps{rate and ', ' + rate}, {self.skipped} skipped"
        text += f"; {run.message}" if run.message else ""
        self.write("\r\x1b[K" + text if self.terminal else text, "\n")

    def _draw(self) -> None:
        filled = WIDTH * self.made // self.steps
        bar = "#" * filled + "." * (WIDTH - filled)
        self.write(f"\r\x1b[K{self.name:8} [{bar}] {self.made}/{self.steps}  {self._rate()}", "")

    def _rate(self) -> str:
        """Steps per second, by the times recorded."""
        return f"{(self.made - 1) / self.seconds:.3g} steps/s" if self.made > 1 and self.seconds > 0 else ""
