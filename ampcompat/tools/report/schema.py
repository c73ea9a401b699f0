"""The receipt as typed data. Its JSON file has the same names (see :mod:`ampcompat.tools.data`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from ampcompat.tools.data import named

#: Ops or FLOPs by dtype.
Counts: TypeAlias = dict[str, int]


@dataclass
class Setting:
    """Tell what the latest ``initialize`` was asked for; ``half`` is "" where nothing is half."""

    initialized: bool = False
    enabled: bool = False
    opt_level: str | None = None
    half: str = ""


@dataclass(kw_only=True)
class Cast:
    """Count the casts from one dtype to another, and the bytes that they read."""

    source: str = named("from")
    target: str = named("to")
    count: int
    bytes: int


@dataclass
class ModuleFlops:
    """Count the FLOPs of one module's forward."""

    module: str
    flops: Counts


@dataclass
class Parameters:
    """Count the parameters of one module and dtype."""

    module: str
    type: str
    dtype: str
    count: int


@dataclass
class Memory:
    """Count bytes: of what the models hold, of what the forwards made, and the most that the accelerator allocated."""

    weights: int = 0
    weights_in_float32: int = 0
    masters: int = 0
    forward_results: int = 0
    forward_results_in_float32: int = 0
    peak: int | None = None


@dataclass
class Point:
    """Describe one step, and the loss scales after it."""

    step: int
    skipped: bool
    scales: list[float]


@dataclass
class WideProduct:
    """Describe a forward product that was not half, and why."""

    op: str
    module: str
    dtype: str
    shapes: str
    reason: str
    flops: int


@dataclass
class OddProduct:
    """Describe a half product, and its dimensions that are no multiple of 8."""

    op: str
    module: str
    shapes: str
    odd: list[int]
    flops: int


@dataclass
class Reason:
    """Tell why forward products were not half, with their share of the forward FLOPs, and their modules."""

    reason: str
    share: float
    modules: list[str]


@dataclass
class Process:
    """Describe one process, and how it ended."""

    pid: int
    rank: int
    world: int
    ended: bool = False
    error: str | None = None


@dataclass(kw_only=True)
class Seen:
    """Hold what is said as it was seen, of one process or of several added up.

    Attributes:
        traced_steps: Optimizer steps whose ops were counted.
        whole_steps: Whether these were all that was asked for, so that counts can be divided by them.
        slow: Sentences on devices without fast half arithmetic.
    """

    process: Process
    setting: Setting = field(default_factory=Setting)
    traced_steps: int = 0
    whole_steps: bool = False
    steps: int = 0
    blocks: int = 0
    skipped: int = 0
    history: list[Point] = field(default_factory=list)
    parameters: list[Parameters] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    slow: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class ProcessRow(Process):
    """Describe one process of several."""

    half_flops_share: float | None
    traced_steps: int
    steps: int
    skipped: int


@dataclass
class Crash:
    """Name the error that ended the script."""

    type: str
    message: str


@dataclass(kw_only=True)
class Provenance:
    """Tell what was run, when, with which versions, and how it ended.

    Attributes:
        children_counted: Whether processes that the script starts are counted, too.
        exit: The status that it exited with, or the message; None for none.
        ending: How it ended in a sentence, where it did not end well.
    """

    script: str
    arguments: list[str]
    date: str
    seconds: float
    torch: str
    versions: dict[str, str | None]
    children_counted: bool
    error: Crash | None
    exit: int | str | None
    ending: str


@dataclass(kw_only=True)
class Facts(Seen, Provenance):
    """Hold the whole receipt; ops and FLOPs by direction of the pass."""

    ops: dict[str, Counts]
    flops: dict[str, Counts]
    casts: list[Cast]
    modules: list[ModuleFlops]
    would_repay: list[WideProduct]
    odd_products: list[OddProduct]
    processes: list[ProcessRow]
    of_processes: list[str]
    half_flops_share: float | None
    why_float32: list[Reason]
    sentences: list[str] = field(default_factory=list)
