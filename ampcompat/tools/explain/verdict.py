"""The verdict: how many steps were lost on all ranks, and to what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ampcompat.tools.explain.lost import LostStep, is_ordinary


@dataclass
class Account:
    """What one rank knows of its steps, as plain data.

    Attributes:
        rank: Its number.
        steps: How many steps there were.
        lost: Those that were lost.
        told: The causes of the faults that were told, by their keys; also of faults that cost no step.
        has_told_unknown: Whether it was told that a cause was not found.
        weights_lost_at: The step that left weights that are not finite; 0 where none is known.
        warned: Mistakes that amp has warned of, in a few words.
        underflow: What is said of gradients that were too small; "" where none were.
    """

    rank: int
    steps: int
    lost: list[LostStep]
    told: dict[str, str]
    has_told_unknown: bool
    weights_lost_at: int
    warned: list[str]
    underflow: str

    def __post_init__(self) -> None:
        self.lost = [row if isinstance(row, LostStep) else LostStep(**row) for row in self.lost]  # JSON has dicts


@dataclass
class Cause:
    """What steps were lost to.

    Attributes:
        text: In a few words.
        steps: Numbers of these steps.
        ranks: The ranks that have seen it.
    """

    text: str
    steps: set[int] = field(default_factory=set)
    ranks: list[int] = field(default_factory=list)


def causes_of(accounts: Sequence[Account]) -> list[Cause]:
    """What steps were lost to on any rank, that which has cost most steps first."""
    found: dict[str, Cause] = {}
    for account in accounts:
        for text in dict.fromkeys(account.told.values()):
            cause = found.setdefault(text, Cause(text))
            cause.steps |= {row.number for row in account.lost if account.told.get(row.fault) == text}
            cause.ranks.append(account.rank)
    return sorted(found.values(), key=lambda cause: -len(cause.steps))


class Verdict:
    """The verdict of the first of some accounts, which takes in what the others have explained.

    Args:
        accounts: Those that there are, this rank's first.
        ranks: How many ranks there are.
    """

    def __init__(self, accounts: Sequence[Account], ranks: int) -> None:
        self._own = accounts[0]
        self._heard = len(accounts)
        self._ranks = ranks
        lost = [row for account in accounts for row in account.lost]
        self.skipped = {row.number for row in lost if row.skipped}
        self.not_finite = {row.number for row in lost if not row.skipped}
        self._lost = self.skipped | self.not_finite
        self.causes = causes_of(accounts)
        is_anything_told = bool(self.causes) or any(account.has_told_unknown for account in accounts)
        self._is_ordinary = is_ordinary(lost, self._own.steps, is_anything_told)

    def __str__(self) -> str:
        own = self._own
        if self._is_ordinary:
            said = f"{self._counts()} while the loss scale {self._scale_of(self._lost)}: that is normal"
        elif self._lost:
            said = f"{self._counts()}; {'; '.join(self._parts())}"
        elif self.causes:
            said = f"{self._counts()}; a batch was lost to {' and to '.join(self._name(one) for one in self.causes)}"
        else:
            said = self._counts()
        if self._heard < self._ranks:
            of_whom = "this rank" if self._heard == 1 else f"{self._heard} of {self._ranks} ranks"
            said = f"On {of_whom}, {said}"
        other = [one for one in own.warned if all(one != cause.text for cause in self.causes)]
        if other:
            said += f"; amp has warned of {', and of '.join(other)}"
        return f"{said}, but {own.underflow}." if own.underflow else f"{said}."

    def _scale_of(self, steps: set[int]) -> str:
        """What had become of the loss scale at the last of ``steps``."""
        found = [row.scale for row in self._own.lost if row.number in steps and row.scale]
        return found[-1] if found else "came down"

    def _counts(self) -> str:
        steps = f"{self._own.steps} step{'s' if self._own.steps > 1 else ''}"
        if not self._lost:
            return f"none of {steps} was skipped"
        counts = []
        if self.skipped:
            counts.append(f"{len(self.skipped)} of {steps} {_were(len(self.skipped))} skipped")
        if self.not_finite:
            counts.append(f"{len(self.not_finite)} of {steps} had a loss, a gradient or a weight that is not finite")
        return ", ".join(counts)

    def _parts(self) -> list[str]:
        """What the lost steps were lost to, all of them."""
        own = self._own
        lost = len(self._lost)
        rest = set(self._lost)
        parts: list[str] = []
        for cause in self.causes:
            count = len(cause.steps)
            rest -= cause.steps
            if not count:
                continue
            of_which = "" if count >= lost else f" of {count} of these"
            subject = f"that of {count}" if parts else f"the cause{of_which}"
            parts.append(f"{subject} is {self._name(cause)}")
        unknown = rest & {row.number for row in own.lost if row.is_unknown}
        if unknown:
            of_which = "" if len(unknown) >= lost else f" of {len(unknown)} of these"
            is_since = own.weights_lost_at and not self.causes
            since = f": weights are not finite since step {own.weights_lost_at}" if is_since else ""
            parts.append(f"the cause{of_which} was not found{since}")
        ordinary = rest - unknown
        if ordinary:
            scale = self._scale_of(ordinary)
            parts.append(f"{len(ordinary)} {_were(len(ordinary))} lost while the loss scale {scale}, which is normal")
        unseen = sum(not row.was_looked_into for row in own.lost)
        if unseen:
            parts.append(f"{unseen} of these {_were(unseen)} not looked into")
        return parts

    def _name(self, cause: Cause) -> str:
        if self._own.rank in cause.ranks:
            return cause.text
        ranks = ", ".join(map(str, cause.ranks))
        return f"{cause.text} (on rank{'s' if len(cause.ranks) > 1 else ''} {ranks})"

    def as_dict(self) -> dict[str, object]:
        """The same for a line of JSON."""
        return {
            "steps": self._own.steps,
            "skipped": len(self.skipped),
            "not_finite": len(self.not_finite),
            "causes": [{"cause": cause.text, "steps": len(cause.steps), "ranks": cause.ranks} for cause in self.causes],
            "ranks": self._heard,
        }


def _were(count: int) -> str:
    return "was" if count == 1 else "were"
