"""The sentences at the head of a receipt."""

from __future__ import annotations

from ampcompat.tools.dtypes import is_half
from ampcompat.tools.report.schema import Crash, Facts, ProcessRow, Reason

#: Below this share of the FLOPs in half, the headline says float32.
MOSTLY = 0.5
#: Modules named with each reason.
SHOWN = 3


def sentences(facts: Facts) -> list[str]:
    """Sum up in sentences; the first says whether half precision is on, or that the script crashed."""
    share = facts.half_flops_share
    found = [facts.ending] if facts.ending else []
    found.append(_headline(facts, share))
    if share is not None and share < MOSTLY and facts.why_float32:
        found.append("In float32, of the forward: " + "; ".join(map(_why, facts.why_float32)) + ".")
    found += facts.slow
    if facts.steps:
        last = facts.history[-1].scales if facts.history else []
        ended = f"; the loss scale ended at {', '.join(f'{scale:g}' for scale in last)}" if last else ""
        found.append(f"{facts.skipped} of {facts.steps} optimizer steps were skipped for overflow{ended}.")
    if facts.steps and not facts.blocks and facts.setting.half == "float16":
        found.append("No scale_loss block was entered: losses were not scaled, so small gradients vanished.")
    if facts.odd_products:
        found.append(
            f"{len(facts.odd_products)} half products have dimensions that are no multiple of 8: GPUs pad them, or"
            " leave the tensor cores idle."
        )
    return [*found, *facts.of_processes]


def _headline(facts: Facts, share: float | None) -> str:
    """Whether half precision is on."""
    half = facts.setting.half
    if not any(is_half(dtype) for counts in facts.ops.values() for dtype in counts):
        return f"Nothing ran in half precision: {_why_nothing(facts)}"
    if share is None:
        return f"Ops ran in {half}, but no matrix product, convolution or attention among them."
    if share < MOSTLY:
        return f"Mostly float32: {_percent(share)} of the FLOPs ran in {half or 'half'}."
    return f"Half precision is on: {_percent(share)} of the FLOPs ran in {half or 'half'}."


def _why_nothing(facts: Facts) -> str:
    setting = facts.setting
    if not setting.initialized:
        if facts.children_counted:
            return "amp.initialize was not called, neither in the script nor in a process that it started."
        return "amp.initialize was not called in this process; what it started is in receipts of `ampcompat run` only."
    if not setting.enabled:
        return "amp.initialize was called with enabled=False."
    if setting.opt_level == "O0":
        return "opt_level O0 is float32 throughout."
    if not any(facts.ops.values()):
        return "no op was traced; a compiled model's are not seen."
    return "what runs is not what amp.initialize was given: pass it the model that is called, and leave its casts on."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _why(entry: Reason) -> str:
    """As in "60.0 % kept in float32 (head, tail)"."""
    modules = entry.modules
    more = f" and {len(modules) - SHOWN} more" if len(modules) > SHOWN else ""
    return f"{_percent(entry.share)} {entry.reason} ({', '.join(modules[:SHOWN])}{more})"


def ending(error: Crash | None, status: int | str | None, steps: int) -> str:
    """How the script ended, where it did not end well."""
    if error is None:
        return f"The script ended with {status!r}." if status not in (None, 0) else ""
    after = f"after {steps} optimizer steps"
    if error.type == "KeyboardInterrupt":
        return f"The script was interrupted {after}."
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    if lines and lines[0].endswith(":"):  # a worker's traceback
        shown = f"{lines[0]} {lines[-1]}"
    else:
        shown = lines[0] if lines else ""
    return f"The script crashed {after}: {error.type}{': ' if shown else ''}{shown}"


def of_processes(processes: list[ProcessRow]) -> list[str]:
    """Which processes the receipt adds up, and which left less than they should have."""
    found = []
    if len(processes) > 1:
        ranks = ", ".join(str(one.rank) for one in processes)
        found.append(f"{len(processes)} processes trained (ranks {ranks}); their counts are added up.")
    for one in processes:
        name = f"Process {one.pid} (rank {one.rank})"
        if one.error:
            found.append(f"{name} crashed: {one.error}")
        elif not one.ended and not one.traced_steps:
            found.append(
                f"{name} is missing: it called amp.initialize, and was killed, or still runs, before it counted."
            )
        elif not one.ended:
            found.append(f"{name} was killed, or still runs: its first {one.traced_steps} steps are counted, no more.")
    return found


def of_missing_ranks(missing: int, world: int, rank: int, alone: bool) -> str:
    """How many ranks are not in the receipt; ``alone`` where it counts the process of ``rank`` only."""
    if alone:
        why = f"it counts one process, of rank {rank}. `ampcompat run --receipt` adds up the ranks of a machine."
    else:
        why = "they run elsewhere, or have left no counts."
    return f"{missing} of {world} ranks are not in this receipt: {why}"
