"""The precision report: what really ran, in which dtype, and what half precision brought."""

from __future__ import annotations

import os

from ampcompat.tools.core import observers
from ampcompat.tools.paths import why_not_writable
from ampcompat.tools.report.observer import PrecisionReport

__all__ = ["PrecisionReport", "report", "report_as_asked"]

STEPS = 3
#: Names the file of ``ampcompat run --report=FILE`` for the processes that the script starts; "" is standard output.
VARIABLE = "AMPCOMPAT_REPORT"


def report(steps: int = STEPS) -> PrecisionReport:
    """Observe what runs from here on, and in which dtype. apex had nothing like it.

    Every op of the first ``steps`` optimizer steps is counted, below autocast, where its dtype is what the device sees;
    compiled code runs eagerly in them. What runs before ``initialize`` is left out. After these steps, only steps,
    skips and loss scales are noted, without host syncs.

    Args:
        steps: Optimizer steps whose ops are counted.

    Returns:
        The precision report: ``print(report)``, ``report.write("report.json")`` (or .txt), ``report.facts()``.

    Raises:
        ValueError: ``steps`` is not a positive integer.
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"report(steps={steps!r}) - it must be a positive integer - pass 3 for instance.")
    found = PrecisionReport(steps)
    found.start()
    return found


def report_as_asked() -> None:
    """Observe a process that a script under ``ampcompat run --report`` has started, from its ``initialize`` on.

    When it ends, it writes a file of its own.

    Raises:
        ValueError: The file cannot be written.
    """
    file = os.environ.get(VARIABLE)
    problem = why_not_writable(file) if file else ""
    if problem:
        raise ValueError(f"{VARIABLE}={file!r} - {problem} - name a file that can be written.")
    if file is not None and not any(isinstance(one, PrecisionReport) for one in observers()):
        PrecisionReport(STEPS).start_as_child(file)
