"""What is told of one tensor: its dtype, shape and range, its zeros, and what in it is not finite."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ampcompat.tools.dtypes import dtype_name

#: Rows that are written out.
SHOWN_ROWS = 8


@dataclass(frozen=True)
class TensorFacts:
    """One tensor, as it was when it was looked at.

    Attributes:
        name: What it is called, as in "input" or "exp_avg_sq".
        dtype: Its dtype.
        shape: Its shape.
        least: The least of its finite values; None where none is finite.
        most: The largest of them.
        zeros: How many values are 0.
        not_finite: How many values are inf or NaN.
        elements: How many values there are.
        rows: The rows that hold inf or NaN; none where all rows do.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    least: float | None
    most: float | None
    zeros: int
    not_finite: int
    elements: int
    rows: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorFacts:
        """Look at ``tensor``. Reads the device."""
        values = tensor.detach()
        finite = values[torch.isfinite(values)]
        return cls(
            name=name,
            dtype=values.dtype,
            shape=tuple(values.shape),
            least=float(finite.min()) + 0.0 if finite.numel() else None,  # 0 for -0
            most=float(finite.max()) + 0.0 if finite.numel() else None,
            zeros=int((finite == 0).sum()),
            not_finite=values.numel() - finite.numel(),
            elements=values.numel(),
            rows=_lost_rows(values),
        )

    def __str__(self) -> str:
        text = f"{self.name} {dtype_name(self.dtype)} {list(self.shape)}"
        facts = []
        if self.least is not None:
            facts.append(f"{self.least:.4g} .. {self.most:.4g}")
        if self.zeros:
            facts.append(f"{_of(self.zeros, self.elements)} 0")
        if self.not_finite:
            facts.append(self.lost)
        return f"{text}: {', '.join(facts)}" if facts else text

    @property
    def lost(self) -> str:
        """As in "3 of 32 are not finite, in rows 2, 5"."""
        return f"{_of(self.not_finite, self.elements)} not finite{_in_rows(self.rows)}"

    def as_dict(self) -> dict[str, object]:
        """The same for a line of JSON."""
        return {**vars(self), "dtype": dtype_name(self.dtype)}


def _lost_rows(values: torch.Tensor) -> tuple[int, ...]:
    """The rows that hold what is not finite; none where all do, or where there is one row."""
    if values.dim() < 2 or len(values) < 2:
        return ()
    is_lost = ~torch.isfinite(values).flatten(1).all(1)
    rows: list[int] = is_lost.nonzero().flatten().tolist()
    return () if len(rows) == len(values) else tuple(rows)


def _of(count: int, elements: int) -> str:
    return f"{count} of {elements} {'is' if count == 1 else 'are'}"


def _in_rows(rows: tuple[int, ...]) -> str:
    if not rows:
        return ""
    more = f" and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else ""
    return f", in row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:SHOWN_ROWS]))}{more}"
