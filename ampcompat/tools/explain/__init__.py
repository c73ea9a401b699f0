"""Explain why steps are lost.

From the first lost step that is no normal back-off of the loss scale, the probe is in the run itself: from a step to
the next it sees every op, until it has seen where the value that is not finite was born. After every third skip in a
row it is in for one step, also where a run starts well. A batch that spoils the weights does not come again, and all is
lost after it: its forwards are run again under the probe at once, before the step. Each lost step is a row; the verdict
reads these rows at the end, of all ranks, and says what the steps were lost to.

The way of a lost step: ``observer`` (an event of amp), ``lost`` (whether it is normal), ``diagnosis``, ``search``
(asks ``watch``, or runs the forward ``again``; both use ``probe``), ``ops`` and ``hints`` (or ``written``: what a step
wrote), ``telling``, ``verdict``.
"""

from __future__ import annotations

import os

from ampcompat.tools.at_end import at_end
from ampcompat.tools.core import at_reset, observers
from ampcompat.tools.explain.observer import OverflowExplainer

__all__ = ["explain_as", "explain_as_asked", "explain_overflows"]

LIMIT = 3


def explain_overflows(limit: int = LIMIT, *, stop: bool = False, json: bool = False) -> None:
    """From here on, explain why steps are lost, or why a loss, gradient or weight is not finite, on standard error.

    A loss scale that comes down, at the start and now and then, skips steps: that is no fault. Explained is what
    persists: a loss or a value of a forward that is not finite, and gradients that overflow although the scale falls.
    When the script ends, a verdict says how many steps were lost, and to what. If gradients were 0 in float16 because
    the scale was too low for them, it says since when.

    While nothing overflows, references to the last batches are kept, the loss of each block is looked at, and what each
    step wrote: two host syncs a step. From a lost step on that is no normal back-off, the next steps are watched as
    they run, 50 at most; after every third skip in a row, at the start too, one step is; 200 in the whole run. Before
    that, where the loss is not finite, the same batch is run again (inputs and random numbers as they were). The
    message names the op, the module, the source line, how many values, their magnitude against 65504, and what to do.
    The run that is observed stays bitwise what it would have been. apex had nothing like it.

    Where nothing skips (static scales, O0), the gradients are looked at too: one host sync more. Numbers of an
    optimizer that its half parameters' dtype does not hold (an eps of 1e-8) are named at its first step. The verdict of
    rank 0 is that of all ranks of the process group, if they end within ten seconds of it.

    Args:
        limit: How many different faults to explain; the same fault is explained once.
        stop: End the script (``SystemExit``, status 1) after the last of these.
        json: Write each message as a JSON object on a line of its own.

    Raises:
        ValueError: ``limit`` is not a positive integer.
    """
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ValueError(f"explain_overflows(limit={limit!r}) - it must be a positive integer - pass 3 for instance.")
    explainers = [one for one in observers() if isinstance(one, OverflowExplainer)]
    for one in explainers:
        one.watch.stop()
        observers().remove(one)
    explainer = OverflowExplainer(limit, stop, json)

    def end() -> None:
        explainer.watch.stop()
        if explainer in observers():  # otherwise another call has taken its place
            for message in explainer.last_words():
                if message.all_ranks or explainer.ranks.is_first:
                    message.emit(json)

    observers().append(explainer)
    at_reset(at_end(end))
    at_reset(explainer.watch.stop)


def explain_as(how: str) -> None:
    """Explain as ``--explain=how`` asks: "3" (so many faults), "first" (end the script after one), "json".

    Raises:
        ValueError: It is another word.
    """
    if how.isdecimal() and int(how):
        explain_overflows(int(how))
    elif how == "first":
        explain_overflows(limit=1, stop=True)
    elif how == "json":
        explain_overflows(json=True)
    else:
        raise ValueError(
            f"explain={how!r} - it takes a number of faults, first or json - for anything else, call"
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
