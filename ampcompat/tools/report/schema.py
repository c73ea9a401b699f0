"""Type the receipt as plain data, as its JSON file has it."""

from __future__ import annotations

from typing import TypeAlias, TypedDict

#: Ops or FLOPs by dtype.
Counts: TypeAlias = dict[str, int]


class Setting(TypedDict):
    """Tell what the latest ``initialize`` was asked for; ``half`` is "" where nothing is half."""

    initialized: bool
    enabled: bool
    opt_level: str | None
    half: str


Cast = TypedDict("Cast", {"from": str, "to": str, "count": int, "bytes": int})


class ModuleFlops(TypedDict):
    """Count the FLOPs of one module's forward."""

    module: str
    flops: Counts


class Parameters(TypedDict):
    """Count the parameters of one module and dtype."""

    module: str
    type: str
    dtype: str
    count: int


class Held(TypedDict):
    """Count the bytes that the models hold."""

    weights: int
    weights_in_float32: int
    masters: int


class Results(TypedDict):
    """Count the bytes that the forwards made."""

    forward_results: int
    forward_results_in_float32: int


class Memory(Held, Results):
    """Add the most that the accelerator had allocated."""

    peak: int | None


class Point(TypedDict):
    """Describe one step, and the loss scales after it."""

    step: int
    skipped: bool
    scales: list[float]


class WideProduct(TypedDict):
    """Describe a forward product that was not half, and why."""

    op: str
    module: str
    dtype: str
    shapes: str
    reason: str
    flops: int


class OddProduct(TypedDict):
    """Describe a half product, and its dimensions that are no multiple of 8."""

    op: str
    module: str
    shapes: str
    odd: list[int]
    flops: int


class Reason(TypedDict):
    """Tell why forward products were not half, with their share of the forward FLOPs, and their modules."""

    reason: str
    share: float
    modules: list[str]


class Counted(TypedDict):
    """Hold the counts of one process, by direction of the pass where there are several."""

    setting: Setting
    traced_steps: int
    ops: dict[str, Counts]
    flops: dict[str, Counts]
    casts: list[Cast]
    modules: list[ModuleFlops]
    parameters: list[Parameters]
    devices: list[str]
    memory: Memory
    steps: int
    blocks: int
    skipped: int
    history: list[Point]
    would_repay: list[WideProduct]
    odd_products: list[OddProduct]
    slow: list[str]


class Process(TypedDict):
    """Describe one process, and how it ended."""

    pid: int
    rank: int
    world: int
    ended: bool
    error: str | None


class Own(Counted):
    """Hold the facts of one process, or of several added up."""

    whole_steps: bool
    process: Process


class ProcessRow(Process):
    """Describe one process of several."""

    half_flops_share: float | None
    traced_steps: int
    steps: int
    skipped: int


class Crash(TypedDict):
    """Name the error that ended the script."""

    type: str
    message: str


class Provenance(TypedDict):
    """Tell what was run, when, and with which versions."""

    script: str
    arguments: list[str]
    date: str
    seconds: float
    torch: str
    versions: dict[str, str | None]
    children_counted: bool
    error: Crash | None
    exit: int | str | None


class Facts(Provenance, Own):
    """Hold the whole receipt."""

    ending: str
    processes: list[ProcessRow]
    of_processes: list[str]
    half_flops_share: float | None
    why_float32: list[Reason]
    sentences: list[str]
