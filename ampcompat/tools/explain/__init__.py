"""Explain an overflow: which module and op it was, and what to do."""

from __future__ import annotations

import os

from ampcompat.tools.core import observers
from ampcompat.tools.explain.observer import OverflowExplainer

__all__ = ["explain_as", "explain_as_asked", "explain_overflows"]


def explain_overflows(limit: int = 3, *, stop: bool = False, json: bool = False) -> None:
    """From here on, explain why a step was skipped, or why a loss, gradient or weight is not finite, on standard error.

    While nothing overflows, references to the last batches are kept, and what each step wrote is looked at: one host
    sync a step. After an overflow the same batch is run again (inputs, random numbers and buffers as they were) with
    every op examined. The message names the op, the module, the source line, the magnitude against 65504, and what to
    do. The run that is observed stays bitwise what it would have been. apex had nothing like it.

    Where nothing skips (static scales, O0), the loss and the gradients are looked at too: one host sync each. Numbers
    of an optimizer that its half parameters' dtype does not hold (an eps of 1e-8) are named at its first step.

    Args:
        limit: How many different faults to explain; the same fault is explained once.
        stop: End the script (``SystemExit``, status 1) after the last of these.
        json: Write each message as a JSON object on a line of its own.

    Raises:
        ValueError: ``limit`` is not a positive integer.
    """
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ValueError(f"explain_overflows(limit={limit!r}) - it must be a positive integer - pass 3 for instance.")
    observers()[:] = [one for one in observers() if not isinstance(one, OverflowExplainer)]
    observers().append(OverflowExplainer(limit, stop, json))


def explain_as(how: str) -> None:
    """Explain as ``--explain=how`` asks: "1" (the first three faults), "first" (end the script after one), "json".

    Raises:
        ValueError: It is another word.
    """
    if how == "1":
        explain_overflows()
    elif how == "first":
        explain_overflows(limit=1, stop=True)
    elif how == "json":
        explain_overflows(json=True)
    else:
        raise ValueError(
            f"explain={how!r} - it takes one of the words 1, first and json - for anything else, call"
            " amp.explain_overflows(limit=..., stop=..., json=...) in the script."
        )


def explain_as_asked() -> None:
    """Start explaining as ``AMPCOMPAT_EXPLAIN`` says; "0" and "" say no.

    Raises:
        ValueError: It holds a word that means nothing.
    """
    asked = os.environ.get("AMPCOMPAT_EXPLAIN", "").strip()
    if asked in ("", "0") or any(isinstance(one, OverflowExplainer) for one in observers()):
        return
    try:
        explain_as(asked)
    except ValueError as problem:
        raise ValueError(f"AMPCOMPAT_EXPLAIN: {problem}") from None
