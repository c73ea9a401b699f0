"""The autopsy of an overflow: which module and op it was, and the line that cures it."""

from __future__ import annotations

import os

from ampcompat.amp.observers import observers
from ampcompat.explain.observer import Autopsy

__all__ = ["explain_as_asked", "explain_overflows"]


def explain_overflows(limit: int = 3) -> None:
    """From here on, explain why a step was skipped, or why a loss or gradient is not finite, in one printed message.

    While nothing overflows, references to the last batches are kept and nothing else is done. After an overflow the
    same batch is run again (inputs, random numbers and buffers as they were) with every op examined. The message names
    the op, the module, the source line, the magnitude against 65504, and the line that cures it. The run that is
    observed stays bitwise what it would have been.

    Where nothing skips (static scales, O0) the loss and the gradients are looked at: one host sync each a block.

    Args:
        limit: How many different faults to explain; the same fault is explained once.

    Raises:
        ValueError: ``limit`` is not a positive integer.
    """
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ValueError(f"explain_overflows(limit={limit!r}) - it must be a positive integer - pass 3 for instance.")
    observers()[:] = [one for one in observers() if not isinstance(one, Autopsy)]
    observers().append(Autopsy(limit))


def explain_as_asked() -> None:
    """Start explaining where ``AMPCOMPAT_EXPLAIN`` is set: so ``ampcompat run --explain`` reaches child processes."""
    asked = os.environ.get("AMPCOMPAT_EXPLAIN", "") not in ("", "0")
    if asked and not any(isinstance(one, Autopsy) for one in observers()):
        explain_overflows()
