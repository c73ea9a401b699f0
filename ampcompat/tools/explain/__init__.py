"""Explain why steps are lost.

The batch of a lost step is run again with every op looked at; where that shows nothing, or the skip may be normal, the
probe is put into the run itself, from a step to the next, until it has seen where the value that is not finite was
born. A tally counts all steps, and the verdict says at the end what the lost ones were lost to, on which rank, or that
this is not known.
"""

from __future__ import annotations

import os

from ampcompat.tools.at_end import at_end
from ampcompat.tools.core import at_reset, observers
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.explain.observer import OverflowExplainer
from ampcompat.tools.explain.ranks import Ranks
from ampcompat.tools.explain.tally import Tally
from ampcompat.tools.explain.verdict import Verdict

__all__ = ["explain_as", "explain_as_asked", "explain_overflows"]

LIMIT = 3


def explain_overflows(limit: int = LIMIT, *, stop: bool = False, json: bool = False) -> None:
    """From here on, explain why steps are lost, or why a loss, gradient or weight is not finite, on standard error.

    A loss scale that comes down, at the start and now and then, skips steps: that is no fault. Explained is what
    persists: a loss or a value of a forward that is not finite, and gradients that overflow although the scale falls.
    When the script ends, a verdict says how many steps were lost, and to what. If gradients were 0 in float16 because
    the scale was too low for them, it says since when.

    While nothing overflows, references to the last batches are kept, the loss of each block is looked at, and what each
    step wrote: two host syncs a step. After an overflow that is no normal back-off, the same batch is run again
    (inputs, random numbers and buffers as they were) with every op examined; where that stays finite, or gives another
    result, the next steps are watched as they run, 50 at most, and 200 in the whole run. The message names the op, the
    module, the source line, how many values, their magnitude against 65504, and what to do. The run that is observed
    stays bitwise what it would have been. apex had nothing like it.

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
    for one in observers():
        if isinstance(one, OverflowExplainer):
            one.watch.stop()
    observers()[:] = [one for one in observers() if not isinstance(one, (OverflowExplainer, Tally))]
    tally = Tally()
    explainer = OverflowExplainer(limit, stop, json, tally)

    def end() -> None:
        explainer.watch.stop()
        is_observing = any(one is tally for one in observers())
        if is_observing:  # otherwise another call has taken its place
            for message in last_words(tally, explainer.ranks):
                if message.all_ranks or explainer.ranks.is_first:
                    message.emit(json)

    observers().append(tally)
    observers().append(explainer)
    at_reset(at_end(end))
    at_reset(explainer.watch.stop)


def last_words(tally: Tally, ranks: Ranks) -> list[Message]:
    """What is to be told when the run ends: the verdict, and before it what was held back without need."""
    if tally.steps == 0:
        return []
    held = tally.last_explanation()
    own = tally.account()
    verdict = Verdict(ranks.gather(own), ranks.count)
    underflow = None if tally.underflow is None else tally.underflow.as_dict()
    last = Message("verdict", str(verdict), content={**verdict.as_dict(), "underflow": underflow})
    return [*([] if held is None else [held]), last]


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
