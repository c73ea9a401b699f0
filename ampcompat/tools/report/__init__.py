"""The precision receipt: what really ran, in which dtype, and what half precision brought."""

from __future__ import annotations

import os

from ampcompat.amp.observers import observers
from ampcompat.tools.report.processes import VARIABLE
from ampcompat.tools.report.receipt import Receipt

__all__ = ["Receipt", "report", "report_as_asked"]

STEPS = 3


def report(steps: int = STEPS) -> Receipt:
    """Observe what runs from here on, and in which dtype: the precision receipt. apex had nothing like it.

    Every op of the first ``steps`` optimizer steps is counted, below autocast, where its dtype is what the device sees;
    compiled code runs eagerly in them. What runs before ``initialize`` is left out. After these steps, only steps,
    skips and loss scales are noted, without host syncs.

    Args:
        steps: Optimizer steps whose ops are counted.

    Returns:
        The receipt: ``print(receipt)``, ``receipt.write("receipt.html")`` (or .json, .txt), ``receipt.facts()``.

    Raises:
        ValueError: ``steps`` is not a positive integer.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"report(steps={steps!r}) - it must be a positive integer - pass 3 for instance.")
    receipt = Receipt(steps)
    receipt.start()
    return receipt


def report_as_asked() -> None:
    """Count in a process that a script under ``ampcompat run --receipt`` has started, from its ``initialize`` on."""
    folder = os.environ.get(VARIABLE, "")
    if os.path.isdir(folder) and not any(isinstance(one, Receipt) for one in observers()):
        Receipt(STEPS, folder).start_as_child()
