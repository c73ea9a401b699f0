"""The autopsy of an overflow: which module and op it was, and the line that cures it."""

from __future__ import annotations

import os

from ampcompat.amp.observers import observers
from ampcompat.tools.explain.observer import Autopsy
from ampcompat.tools.explain.options import Options, is_on, parse

__all__ = ["explain_as_asked", "explain_in_words", "explain_overflows"]


def explain_overflows(limit: int = 3, *, stop: bool = False, json: bool = False, ranges: bool = False) -> None:
    """From here on, explain why a step was skipped, or why a loss, gradient or weight is not finite, on standard error.

    While nothing overflows, references to the last batches are kept, and what each step wrote is looked at: one host
    sync a step. After an overflow the same batch is run again (inputs, random numbers and buffers as they were) with
    every op examined. The message names the op, the module, the source line, the magnitude against 65504, and the line
    that cures it. The run that is observed stays bitwise what it would have been. apex had nothing like it.

    Where nothing skips (static scales, O0), the loss and the gradients are looked at too: one host sync each. Numbers
    of an optimizer that its half parameters' dtype does not hold (an eps of 1e-8) are named at its first step.

    Args:
        limit: How many different faults to explain; the same fault is explained once.
        stop: End the script (``SystemExit``, status 1) after the last of these.
        json: Write each message as a JSON object on a line of its own.
        ranges: Show the ranges of every layer, forward and backward, of the first step that is made and of each fault.

    Raises:
        ValueError: ``limit`` is not a positive integer.
    """
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ValueError(f"explain_overflows(limit={limit!r}) - it must be a positive integer - pass 3 for instance.")
    _start(Options(limit, stop, json, ranges))


def explain_as_asked() -> None:
    """Start explaining as ``AMPCOMPAT_EXPLAIN`` says: so ``ampcompat run --explain`` reaches child processes.

    Raises:
        ValueError: It holds a word that means nothing.
    """
    asked = os.environ.get("AMPCOMPAT_EXPLAIN", "")
    if is_on(asked) and not any(isinstance(one, Autopsy) for one in observers()):
        try:
            _start(parse(asked))
        except ValueError as problem:
            raise ValueError(f"AMPCOMPAT_EXPLAIN: {problem}") from None


def explain_in_words(words: str) -> None:
    """Explain as ``words`` say, the grammar of ``--explain=WORDS``; "no" ends it.

    Raises:
        ValueError: One of them means nothing.
    """
    options = parse(words)
    _stop()
    if is_on(words):
        _start(options)


def _stop() -> None:
    observers()[:] = [one for one in observers() if not isinstance(one, Autopsy)]


def _start(options: Options) -> None:
    _stop()
    observers().append(Autopsy(options))
