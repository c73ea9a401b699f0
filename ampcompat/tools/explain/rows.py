"""Which rows of a tensor are not finite, in words: a batch has a row for each sample."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ampcompat.tools.tensors import readable

#: Rows that are written out.
SHOWN_ROWS = 8
#: A row whose largest value is so many times the usual one is of other data.
_FAR = 100.0


def lost_rows(tensor: torch.Tensor) -> str:
    """The rows of ``tensor`` that are not finite, from 0, as in ", in rows 3, 7 and 2 more"; "" where all are."""
    rows = _lost(tensor)
    return f", in {_listed(rows)}" if rows else ""


def far_rows(out: torch.Tensor, operands: Iterable[torch.Tensor], inputs: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The rows in which ``out`` is not finite, if these are far larger in what the op was given, and in the batch.

    Args:
        out: a result.
        operands: what the op was given.
        inputs: what the model was given.
    """
    rows = _lost(out)
    if not rows or not any(_are_far(tensor, rows, len(out)) for tensor in operands):
        return ""
    for name, tensor in inputs:
        if _are_far(tensor, rows, len(out)):
            sizes = _sizes(tensor)
            most, usual = float(sizes.max()), float(sizes.median())
            return f"{_listed(rows)} of input {name}, up to {most:.3g}, the usual one {usual:.3g}"
    return ""


def _are_far(tensor: torch.Tensor, rows: list[int], count: int) -> bool:
    """Whether ``tensor`` has ``count`` rows, and each of ``rows`` is far larger than usual."""
    is_batch = readable(tensor) and tensor.dim() > 1 and tensor.numel() > 0 and len(tensor) == count
    if not is_batch:
        return False
    sizes = _sizes(tensor)
    return 0 < _FAR * float(sizes.median()) <= float(sizes[rows].min()) < torch.inf


def _sizes(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in each row."""
    return tensor.detach().flatten(1).abs().amax(1).float()


def _lost(tensor: torch.Tensor) -> list[int]:
    """The rows of ``tensor`` that are not finite; none where all are."""
    if tensor.dim() < 2 or len(tensor) < 2:
        return []
    is_lost = ~torch.isfinite(tensor.detach()).flatten(1).all(1)
    rows: list[int] = is_lost.nonzero().flatten().tolist()
    return [] if len(rows) == len(tensor) else rows


def _listed(rows: list[int]) -> str:
    more = f" and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else ""
    return f"{'rows' if len(rows) > 1 else 'row'} {', '.join(map(str, rows[:SHOWN_ROWS]))}{more}"
