"""What explain has to say, as typed data: the line of JSON of each message has these names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ampcompat.tools.data import named


@dataclass
class Said:
    """Hold the data of a message of one kind."""

    kind: ClassVar[str]


@dataclass
class Grown:
    """Describe a weight that steps made many times larger.

    Attributes:
        parameter: Qualified name, or "" where no live model has it.
        before: Its largest magnitude some steps ago.
        after: Its largest magnitude now.
        times: How many times larger that is.
        steps: How many steps were made in between.
        lr: The highest learning rate of its group in these; None where that is no number.
    """

    parameter: str
    before: float
    after: float
    times: float
    steps: int
    lr: float | None

    @property
    def text(self) -> str:
        """As in "conv2.weight grew from 0.21 to 350 in 3 steps, at lr=50"."""
        name = self.parameter or "a weight"
        steps = f"{self.steps} step{'s' if self.steps > 1 else ''}"
        rate = "" if self.lr is None else f", at lr={self.lr:g}"
        return f"{name} grew from {self.before:.3g} to {self.after:.3g} in {steps}{rate}"

    @property
    def cure(self) -> str:
        """What stops it."""
        than = "" if self.lr is None else f" than {self.lr:g}"
        return f"a lower learning rate{than}, a warmup, or clipped gradients: no precision holds weights that grow so"


@dataclass(kw_only=True)
class Fault(Said):
    """Describe what was born not finite.

    Attributes:
        step: The number of the step that it belongs to.
        op: The op's name; see :class:`ampcompat.tools.explain.probe.Event`.
        function: The torch function that the script called.
        model: Class name of the model.
        module: Qualified name of the module; None outside of any.
        type: Its class name.
        file, line, source: The script's line; None where only torch's code ran.
        direction: "forward" or "backward".
        dtype: Of the result.
        largest: Its largest magnitude in float32.
        growth: The weight that the last steps made many times larger, if any.
        cures: The likeliest first.
        note: What makes the replay unlike the run, if anything.
    """

    kind = "fault"
    step: int
    op: str
    function: str
    model: str
    module: str | None
    type: str
    file: str | None
    line: int | None
    source: str | None
    direction: str = named("pass")
    dtype: str
    largest: float
    growth: Grown | None
    cures: list[str]
    note: str


@dataclass
class Elsewhere(Said):
    """Tell that no model did it, and whether the forwards could be run again."""

    kind = "elsewhere"
    step: int
    run_again: bool


@dataclass(kw_only=True)
class Weights(Said):
    """Describe weights or state that a step left not finite; ``state`` is "" for the weight itself."""

    kind = "weights"
    optimizer: str
    group: int
    parameter: str
    state: str
    dtype: str
    not_finite: int
    elements: int
    why: list[str]
    growth: Grown | None
    cures: list[str]
    step: int


@dataclass
class Number:
    """Describe a number of a param group, and what it becomes in the dtype of the parameters."""

    group: int
    name: str
    value: float
    becomes: float
    dtype: str


@dataclass
class Numbers(Said):
    """List the numbers of an optimizer that its parameters' dtype does not hold."""

    kind = "numbers"
    optimizer: str
    numbers: list[Number]
    cures: list[str]


@dataclass(kw_only=True)
class LayerRange:
    """Describe the results of one module in one pass; the shares are of 1."""

    module: str
    type: str
    direction: str = named("pass")
    dtype: str
    largest: float
    smallest: float
    zeros: float
    infs: float
    nans: float


@dataclass
class LayerRanges(Said):
    """List the ranges of every layer of a model in one batch."""

    kind = "ranges"
    model: str
    step: int
    scale: float
    rows: list[LayerRange]


@dataclass
class Note(Said):
    """Tell nothing but the message."""

    kind = "note"


@dataclass
class End(Said):
    """Tell that the script ends here."""

    kind = "end"
