"""Memory of the host: whether it may be used again, and what becomes of it once it is freed."""

from __future__ import annotations

import functools
import sys
from itertools import repeat
from operator import attrgetter

import torch

_ADDRESS = attrgetter("_cdata")


def _counts_of_one() -> tuple[int, int, int]:
    """Count what torch counts of a tensor with one name: its owners, and its storage's names and owners."""
    one, plain = torch.empty(1, device="cpu"), object()
    storage = one.untyped_storage()
    names = sys.getrefcount(storage) - sys.getrefcount(plain)  # beyond those of any other object
    return one._use_count(), names, torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


_OWNERS, _STORAGE_NAMES, _STORAGE_OWNERS = _counts_of_one()  # they differ between versions of torch


#: Have glibc keep up to 64 MiB of freed memory, as after any program's first free of a block of 32 MiB: allocate one
#: and drop it. Until then glibc keeps twice the largest block that was freed and gives the rest back to the system. A
#: step of training takes that back at once, page fault by page fault, in up to a quarter of the time of a small model's
#: step. No page of the block is touched, so the process holds no more. glibc has no way back; other allocators have no
#: such rule.
keep_freed_memory = functools.partial(torch.UntypedStorage, (32 << 20) - 8192, device="cpu")


def float32_like(halves: list[torch.Tensor], kept: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """A float32 tensor laid out like each of ``halves``, which are dense: that of ``kept`` if nothing else holds it."""
    return [
        old
        if old is not None and half.is_cpu and old.stride() == half.stride()
        else torch.empty_like(half, dtype=torch.float32)
        for old, half in zip(_unheld(kept) if kept else repeat(None), halves, strict=False)
    ]


def _unheld(tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """``tensors``, with None in the place of those whose memory anything else holds than the caller's list.

    Arrays and shared files hold theirs unseen: such memory cannot be resized.
    """
    # By columns: this is the price of every gradient.
    held = [one for one in tensors if one is not None]
    storages = list(map(torch.Tensor.untyped_storage, held))
    other = object()  # has a name and a list, as each tensor has two lists
    *_, two = map(sys.getrefcount, [other])
    alone = (two, _OWNERS, two - 1 + _STORAGE_NAMES, _STORAGE_OWNERS, True)
    rows = zip(
        map(sys.getrefcount, held),
        map(torch.Tensor._use_count, held),  # type: ignore[attr-defined]
        map(sys.getrefcount, storages),
        map(torch._C._storage_Use_Count, map(_ADDRESS, storages)),
        map(torch.UntypedStorage.resizable, storages),
        strict=True,
    )
    free = iter(list(map(alone.__eq__, rows)))  # counted before the next line names one of them again
    return [one if one is not None and next(free) else None for one in tensors]
