"""Which runs a comparison consists of: an opt_level and a half dtype each, float32 first."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ampcompat.tools.dtypes import SHORT_NAMES, SPELLINGS, dtype_name

if TYPE_CHECKING:
    from ampcompat.amp.levels import Level as Row


@dataclass(frozen=True)
class Level:
    """One run.

    Attributes:
        opt_level: A level of amp's table.
        dtype: ``"float16"`` or ``"bfloat16"``; None where the level alone decides.
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
    from ampcompat.tools.core import LEVELS  # imports torch, which only this needs

    wanted, halves = _words(opt_levels), _words(dtypes)
    _check(wanted, LEVELS, "an opt_level")
    _check(halves, SPELLINGS, "a half dtype")
    if not wanted or not halves:
        raise ValueError("an empty list - there must be one opt_level and one dtype at least - name them.")
    levels = [REFERENCE]
    for opt_level in wanted:
        if _decides_dtype(LEVELS[opt_level]):
            levels.append(Level(opt_level))
        else:
            levels += [Level(opt_level, SPELLINGS[half]) for half in halves]
    return list(dict.fromkeys(levels))


def _decides_dtype(row: Row) -> bool:
    """Whether a level computes in one dtype, whatever half dtype is asked for: float32, or bfloat16."""
    is_float32 = not row.patch_torch_functions and str(row.cast_model_type) == "torch.float32"
    return is_float32 or dtype_name(row.half_dtype) != "float16"


def _check(words: Collection[str], known: Collection[str], kind: str) -> None:
    for word in words:
        if word not in known:
            hint = letter_hint(word, known)
            raise ValueError(
                f"{word!r} is not {kind} - it must be one of {', '.join(known)} - name one of these.{hint}"
            )


def letter_hint(word: str, levels: Collection[str]) -> str:
    """Ask whether ``word`` meant one of ``levels``, with the digit 0 or a small letter for its first letter."""
    meant = "O" + word.lstrip("oO0")
    return f" Did you mean {meant}, with the letter O?" if word and meant in levels else ""


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
