"""What is told of one tensor: its dtype, shape and range, its zeros, and what in it is not finite."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ampcompat.tools.dtypes import dtype_name

#: Rows that are written out.
SHOWN_ROWS = 8


@dataclass(frozen=True)
class TensorFacts:
    """One tensor, as it was when it was looked at."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    least: float | None  # of its finite values; None where none is finite
    most: float | None
    zeros: int
    not_finite: int
    elements: int
    rows: tuple[int, ...]  # that hold what is not finite; none where all rows do

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorFacts:
        """Look at ``tensor``. Reads the device."""
        values = tensor.detach()
        finite = values[torch.isfinite(values)]
        least, most = (finite.min(), finite.max()) if finite.numel() else (None, None)
        return cls(
            name=name,
            dtype=values.dtype,
            shape=tuple(values.shape),
            least=None if least is None else float(least) + 0.0,  # 0 for -0
            most=None if most is None else float(most) + 0.0,
            zeros=int((finite == 0).sum()),
            not_finite=values.numel() - finite.numel(),
            elements=values.numel(),
            rows=_lost_rows(values),
        )

    def __str__(self) -> str:
        facts = [] if self.least is None else [f"{self.least:.5g} .. {self.most:.5g}"]
        if self.zeros:
            facts.append(f"{self._of(self.zeros)} 0")
        if self.not_finite:
            facts.append(f"{self._of(self.not_finite)} not finite{_in_rows(self.rows)}")
        text = f"{self.name} {dtype_name(self.dtype)} {list(self.shape)}"
        return f"{text}: {', '.join(facts)}" if facts else text

    def _of(self, count: int) -> str:
        return f"{count} of {self.elements} {'is' if count == 1 else 'are'}"

    def as_dict(self) -> dict[str, object]:
        """The same for a line of JSON."""
        return {**vars(self), "dtype": dtype_name(self.dtype)}


def _lost_rows(values: torch.Tensor) -> tuple[int, ...]:
    if values.dim() < 2 or len(values) < 2:
        return ()
    is_lost = ~torch.isfinite(values).flatten(1).all(1)
    rows: list[int] = is_lost.nonzero().flatten().tolist()
    return () if len(rows) == len(values) else tuple(rows)


def _in_rows(rows: tuple[int, ...]) -> str:
    if not rows:
        return ""
    more = f" and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else ""
    return f", in row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:SHOWN_ROWS]))}{more}"
