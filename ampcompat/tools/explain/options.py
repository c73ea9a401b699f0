"""Parse ``--explain=WORDS`` and ``AMPCOMPAT_EXPLAIN``."""

from __future__ import annotations

from dataclasses import dataclass

_ON, _OFF = ("1", "yes", "true", "on"), ("", "0", "no", "false", "off")
GRAMMAR = "'json', 'ranges', and 'first' or a number of faults to end the script after, separated by commas"


@dataclass(frozen=True)
class Options:
    """How to explain.

    Attributes:
        limit: Different faults that are explained.
        stop: Whether the script ends with the last of them.
        json: Whether each message is a line of JSON.
        ranges: Whether the ranges of every layer are shown, of the first step that is made and with each fault.
    """

    limit: int = 3
    stop: bool = False
    json: bool = False
    ranges: bool = False


def is_on(text: str) -> bool:
    """Whether the environment's ``text`` asks for anything: "no", "0", "false", "off" and "" do not."""
    return text.strip().lower() not in _OFF


def parse(text: str) -> Options:
    """Read words such as ``"json,first"``; those that mean a plain yes change nothing.

    Raises:
        ValueError: A word is none of :data:`GRAMMAR`.
    """
    limit, stop, words = Options.limit, False, set[str]()
    for word in filter(None, (part.strip().lower() for part in text.split(","))):
        if word in (*_ON, *_OFF) and word == text.strip().lower():
            continue
        if word == "first" or (word.isascii() and word.isdigit() and int(word) > 0):
            limit, stop = 1 if word == "first" else int(word), True
        elif word in ("json", "ranges"):
            words.add(word)
        else:
            raise ValueError(f"explain={text!r} - {word!r} is none of its words - write {GRAMMAR}.")
    return Options(limit, stop, json="json" in words, ranges="ranges" in words)
