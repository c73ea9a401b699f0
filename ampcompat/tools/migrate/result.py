"""Hold the result of a migration."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampcompat.tools.check.split_lines import lines_of
from ampcompat.tools.migrate.caller import Caller

MARK = "# TODO(ampcompat): "


class MissingLibcst(ImportError):
    """libcst, which rewrites the sources, is not installed."""

    def __init__(self) -> None:
        super().__init__("ampcompat migrate rewrites sources with libcst: pip install 'ampcompat[migrate]'")


@dataclass(frozen=True)
class Tree:
    """What the other files of a tree say to one of them.

    Attributes:
        made_in: Where ``amp.initialize`` stands, ``train.py:12``, for a file that does not call it; ``""`` if nowhere.
        helper: What such a file imports to reach the scaler that the others make, ``.mixed_precision``; ``""`` where
            it cannot.
        trains_elsewhere: Whether other files scale the losses and step, for a file that calls ``amp.initialize``.
    """

    made_in: str = ""
    helper: str = ""
    trains_elsewhere: bool = False


ALONE = Tree()


@dataclass
class Result:
    """One migrated source.

    Attributes:
        code: The new text; equal to the old one when there was nothing to do.
        todos: What could not be translated, as ``(line in the new text, message)``.
        notes: What differs, and needs no action.
        makes: The line on which the source calls ``amp.initialize``, 0 for none (``native``).
        needs: Whether it uses a scaler that another file makes, and does not reach it (``native``).
        shares: Whether it uses the scaler of the helper's module (``native``).
        optimizers: The last parts of the names of optimizers whose gradients its scaler scales (``native``).
        caller: The source before it got the helper; None where it needs none (``native``).
    """

    code: str
    todos: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    makes: int = 0
    needs: bool = False
    shares: bool = False
    optimizers: tuple[str, ...] = ()
    caller: Caller | None = None

    @classmethod
    def of(cls, code: str) -> Result:
        """The result with its marks listed."""
        marks = [(n, line.strip()) for n, line in enumerate(lines_of(code), 1)]
        return cls(code, [(n, line[len(MARK) :]) for n, line in marks if line.startswith(MARK)])
