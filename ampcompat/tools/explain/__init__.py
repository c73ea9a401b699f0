"""Tell, as facts, where the first value of a lost step was born that is not finite.

A probe sees every op and remembers where each value that is not finite was born; after a lost step explain runs the
forward again under it, or watches the next steps. Read ``probe`` (what is found), ``birth`` (what is told of it) and
``observer`` (when).
"""

from __future__ import annotations

import os

from ampcompat.tools.at_end import at_end
from ampcompat.tools.core import at_reset, observers
from ampcompat.tools.explain.observer import OverflowExplainer

__all__ = ["explain_as", "explain_as_asked", "explain_overflows"]

LIMIT = 3


def explain_overflows(limit: int = LIMIT, *, stop: bool = False, json: bool = False) -> None:
    """From here on, tell on standard error where the values of lost steps became inf or NaN, and counts at the end.

    A message has facts alone: the line, the op, what went in, what came out, what float32 gives of the same inputs.
    docs/debugging.md has what to do about each. A loss scale that comes down, at the start and now and then, skips
    steps: these are counted. When the script ends, rank 0 tells the counts of all ranks of the process group, if they
    end within ten seconds of it.

    While nothing overflows, this costs two host syncs a step, three at static scales, and references to the last
    batches. After a lost step, the next ones are watched, 50 at most; after every third skip in a row, one is; 200 in
    the whole run. The run stays bitwise what it would have been. apex had nothing like it.

    Args:
        limit: How many different births to tell; the same one is told once.
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
