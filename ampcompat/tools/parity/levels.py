"""Which runs a comparison consists of: an opt_level and a half dtype each, float32 first."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ampcompat.tools.dtypes import SHORT_NAMES, SPELLINGS

OPT_LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


@dataclass(frozen=True)
class Level:
    """One run.

    Attributes:
        opt_level: ``"O0"`` to ``"O5"``.
        dtype: ``"float16"`` or ``"bfloat16"``; None where the level alone decides (O0, O4, O5).
    """

    opt_level: str
    dtype: str | None = None

    @property
    def name(self) -> str:
        """Such as ``"O1 fp16"``; the level alone where it decides the dtype."""
        return self.opt_level if self.dtype is None else f"{self.opt_level} {SHORT_NAMES[self.dtype]}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that put a script at this level."""
        return {"AMPCOMPAT_OPT_LEVEL": self.opt_level, "AMPCOMPAT_DTYPE": self.dtype or ""}


REFERENCE = Level("O0")


def read_levels(opt_levels: str, dtypes: str) -> list[Level]:
    """The runs that two comma-separated lists ask for: O0 first, asked for or not, then each level in each dtype.

    Raises:
        ValueError: An unknown or missing level or dtype.
    """
    wanted, halves = _words(opt_levels), _words(dtypes)
    _check(wanted, OPT_LEVELS, "an opt_level")
    _check(halves, SPELLINGS, "a half dtype")
    if not wanted or not halves:
        raise ValueError("an empty list - there must be one opt_level and one dtype at least - name them.")
    levels = [REFERENCE]
    for opt_level in wanted:
        decides_dtype = opt_level in ("O0", "O4", "O5")
        if decides_dtype:
            levels.append(Level(opt_level))
        else:
            levels += [Level(opt_level, SPELLINGS[half]) for half in halves]
    return list(dict.fromkeys(levels))


def _check(words: Collection[str], known: Collection[str], kind: str) -> None:
    for word in words:
        if word not in known:
            raise ValueError(f"{word!r} is not {kind} - it must be one of {', '.join(known)} - name one of these.")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
