"""Explain why steps are lost.

After a lost step that is no normal back-off of the loss scale, a probe sees every op of the next steps, until it has
seen where the value that is not finite was born. A batch that spoils the weights does not come again: before its step
is made, its forwards are run again under the probe.

The way of a lost step:

1. ``observer`` hears of it from amp. ``steps`` and ``weights`` know what came before, ``lost`` whether it is normal.
2. ``diagnosis`` looks for an ``event``, the birth of the value: the ``watch`` has seen it if that was on; otherwise the
   ``forwards`` are run ``again``. Both use the ``probe``; ``call`` is an op, ``places`` say where it stands.
3. ``ops`` makes a ``fault`` of the event, and ``hints`` says what to do in this ``setting``: what is not finite may be
   ``undefined`` in float32 too, or ``too_large`` for half. What the latter reaches has ``twins`` in float32, so that
   ``in_float32`` knows how far float32 is needed. Two faults have no event: ``written`` (a step left a weight not
   finite) and ``numbers`` (of an optimizer, that half does not hold). Causes that lie further back are in ``growth``,
   ``spoiled`` and ``misuse``.
4. ``telling`` tells it once, in ``messages``. At the end ``verdict`` sums up, with what ``ranks`` has gathered.
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

    A message names the op, the module, the source line, how many values, their magnitude against 65504, and what to do.
    A loss scale that comes down, at the start and now and then, skips steps: that is no fault. When the script ends, a
    verdict says how many steps were lost, and to what, or since when gradients are 0 in float16 because the scale is
    too low. That of rank 0 is for all ranks of the process group, if they end within ten seconds of it.

    While nothing overflows, this costs two host syncs a step, three at static scales, and references to the last
    batches. After a lost step, the next ones are watched, 50 at most; after every third skip in a row, one is; 200 in
    the whole run. The run stays bitwise what it would have been. apex had nothing like it.

    Args:
        limit: How many different faults to explain; the same fault is explained once.
        stop: End the script (``SystemExit``, status 1) after the last of these.
        json: Write each message as a JSON object on a line of its own.

    Raises:
        ValueError: ``limit`` is not a positive integer.
    """
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ValueError(f"explain_overflows(limit={limit!r}) - it must be a positive integer - pass 3 for instance.")
    for earlier in _explainers():
        earlier.watch.stop()
        observers().remove(earlier)
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


def _explainers() -> list[OverflowExplainer]:
    return [one for one in observers() if isinstance(one, OverflowExplainer)]


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
    if asked in ("", "0") or _explainers():
        return
    try:
        explain_as(asked)
    except ValueError as problem:
        raise ValueError(f"AMPCOMPAT_EXPLAIN: {problem}") from None
