"""The verdict: how many steps were lost on all ranks, and to what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ampcompat.tools.explain.lost import LostStep, is_mostly_skipped, is_single_skip
from ampcompat.tools.explain.underflow import Underflow
from ampcompat.tools.words import counted, were


@dataclass
class Account:
    """What one rank knows of its steps, as plain data."""

    rank: int
    steps: int  # how many there were
    lost: list[LostStep]
    told: dict[str, str]  # the causes of the faults that were told, by their keys; also of those that cost no step
    has_told_unknown: bool  # that a cause was not found
    weights_lost_at: int  # the step that left weights that are not finite; 0 where none is known
    warned: list[str]  # mistakes that amp has warned of, in a few words
    underflow: Underflow | None  # of the latest step, if its gradients were too small, or 0
    unstepped: str = ""  # that no step was made after the last blocks, if these are many
    lost_buffers: list[str] = field(default_factory=list)  # that were finite at amp.initialize, and are not at the end

    def __post_init__(self) -> None:
        # JSON has dicts, and lists.
        self.lost = [row if isinstance(row, LostStep) else LostStep(**row) for row in self.lost]
        self.underflow = None if self.underflow is None else Underflow(*self.underflow)


@dataclass
class Cause:
    """What steps were lost to, in a few words."""

    text: str
    steps: set[int] = field(default_factory=set)  # their numbers
    ranks: list[int] = field(default_factory=list)  # that have seen it


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
        self._not_looked_into = {row.number for row in lost if not row.was_looked_into}
        self.causes = causes_of(accounts)
        self.unknown = self._unknown(lost)
        is_anything_told = bool(self.causes) or any(account.has_told_unknown for account in accounts)
        are_skips = bool(lost) and not self.not_finite
        self._is_ordinary = are_skips and not is_anything_told and not is_mostly_skipped(lost, self._own.steps)

    def _unknown(self, lost: Sequence[LostStep]) -> set[int]:
        """The numbers of those of ``lost`` whose cause no rank knows; a single skip is a normal one."""
        explained = {number for cause in self.causes for number in cause.steps}
        rows = [row for row in lost if row.is_unknown and row.number not in explained]
        numbers = sorted({row.number for row in rows})
        return {row.number for row in rows if not is_single_skip(row, numbers)}

    def __str__(self) -> str:
        own = self._own
        if self._is_ordinary:
            said = f"{self._counts()} while the loss scale {self._way_of_scale(self._lost)}: that is normal"
        elif self._lost:
            said = f"{self._counts()}; {'; '.join(self._parts())}"
        elif self.causes:
            said = f"{self._counts()}; a batch was lost to {' and to '.join(self._name(one) for one in self.causes)}"
        else:
            said = self._counts()
        if self._heard < self._ranks:
            of_whom = "this rank" if self._heard == 1 else f"{self._heard} of {self._ranks} ranks"
            said = f"On {of_whom}, {said}"
        if own.unstepped:
            said += f"; {own.unstepped}"
        if own.lost_buffers and (self._is_ordinary or not self._lost):
            is_or_are = "is" if len(own.lost_buffers) == 1 else "are"
            said += f"; {' and '.join(own.lost_buffers)} {is_or_are} not finite at the end"
        other = [one for one in own.warned if all(one != cause.text for cause in self.causes)]
        if other:
            said += f"; amp has warned of {', and of '.join(other)}"
        return f"{said}, but {own.underflow}." if self._tells_of_underflow else f"{said}."

    @property
    def _tells_of_underflow(self) -> bool:
        """Whether gradients were 0 at the end, for another reason than the lost steps of a known cause."""
        underflow = self._own.underflow
        if underflow is None:
            return False
        came_down = any(cause.steps for cause in self.causes)
        return underflow.before > 0 or underflow.zeros > 0 or underflow.since == 1 or not came_down

    def _way_of_scale(self, steps: set[int]) -> str:
        """What had become of each loss scale at the last of ``steps`` that it skipped."""
        found = {row.of_loss: row.scale for row in self._own.lost if row.number in steps and row.scale}
        ways = [f"{of_loss}{scale}" for of_loss, scale in sorted(found.items())]
        return ", and that ".join(ways) or "came down"

    def _counts(self) -> str:
        steps = counted(self._own.steps, "step")
        if not self._lost:
            return f"none of {steps} was skipped"
        counts = []
        if self.skipped:
            counts.append(f"{len(self.skipped)} of {steps} {were(len(self.skipped))} skipped")
        if self.not_finite:
            counts.append(f"{len(self.not_finite)} of {steps} had a loss, a gradient or a weight that is not finite")
        return ", ".join(counts)

    def _parts(self) -> list[str]:
        """What the lost steps were lost to, all of them."""
        own = self._own
        rest = set(self._lost)
        parts: list[str] = []
        for cause in self.causes:
            count = len(cause.steps)
            rest -= cause.steps
            if count:
                subject = f"that of {count}" if parts else f"the cause{self._of_these(count)}"
                parts.append(f"{subject} is {self._name(cause)}")
        unknown = self.unknown
        if unknown:
            is_since = own.weights_lost_at and not self.causes
            since = ""
            if is_since:
                way = "loss_scale='dynamic' skips such a step, so that the next ones show why"
                since = f": weights are not finite since step {own.weights_lost_at} ({way})"
            parts.append(f"the cause{self._of_these(len(unknown))} was not found{since}")
        ordinary = rest - unknown
        if ordinary:
            way = self._way_of_scale(ordinary)
            parts.append(f"{len(ordinary)} {were(len(ordinary))} lost while the loss scale {way}, which is normal")
        unlooked = len(self._not_looked_into)
        if unlooked:
            parts.append(f"{unlooked} of these {were(unlooked)} not looked into")
        return parts

    def _of_these(self, count: int) -> str:
        """As in " of 3 of these"; "" where these are all that were lost."""
        return "" if count >= len(self._lost) else f" of {count} of these"

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
            "underflow": None if self._own.underflow is None else self._own.underflow._asdict(),
        }
