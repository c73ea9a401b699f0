"""What one process counts, and leaves for the process that shows the receipt."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ampcompat.tools.report.schema import Seen


class Product(NamedTuple):
    """A matrix product, convolution or attention: what FLOPs are counted of; and why it is not half, if it is not."""

    op: str
    module: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    reason: str = ""


@dataclass
class Tally:
    """Count the ops that ran. A direction is "forward", "backward", or "no grad" (optimizers, evaluation).

    Attributes:
        ops: Number of ops by direction and dtype.
        flops: FLOPs of products by direction and dtype.
        products: FLOPs of each product outside of the backward pass.
        casts: Number of casts, by dtypes.
        cast_bytes: Bytes read by casts, by dtypes.
        results: Bytes of forward results, by dtype, those of casts apart.
        cast_results: Bytes of what forward casts made, by dtype.
    """

    ops: Counter[tuple[str, str]] = field(default_factory=Counter)
    flops: Counter[tuple[str, str]] = field(default_factory=Counter)
    products: Counter[Product] = field(default_factory=Counter)
    casts: Counter[tuple[str, str]] = field(default_factory=Counter)
    cast_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    results: Counter[str] = field(default_factory=Counter)
    cast_results: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Add the counts of ``other``."""
        for name, counts in vars(other).items():
            getattr(self, name).update(counts)


@dataclass(kw_only=True)
class Record(Seen):
    """Add what the receipt works out further."""

    tally: Tally = field(default_factory=Tally)


def merged(records: list[Record]) -> Record:
    """Several processes as one: counts added up, everything else of the first that was initialized."""
    lead = next((one for one in records if one.setting.initialized), records[0])
    tally = Tally()
    for one in records:
        tally.add(one.tally)
    return replace(
        lead,
        tally=tally,
        traced_steps=sum(one.traced_steps for one in records),
        whole_steps=all(one.whole_steps for one in records),
        steps=sum(one.steps for one in records),
        blocks=sum(one.blocks for one in records),
        skipped=sum(one.skipped for one in records),
    )
