"""Memory of the host: what becomes of it once it is freed."""

from __future__ import annotations

import torch

_LARGEST_HEAP_BLOCK = (32 << 20) - 8192  # glibc's limit, less what an allocation adds to it


def keep_freed_memory() -> None:
    """Have glibc keep up to 64 MiB of freed memory, as after any program's first free of a block of 32 MiB.

    Allocates one and drops it. Until then glibc keeps twice the largest block that was freed and gives the rest back
    to the system. A step of training takes that back at once, page fault by page fault, in up to a quarter of the time
    of a small model's step. No page of the block is touched, so the process holds no more. glibc cannot be told to undo
    it; other allocators have no such rule.
    """
    torch.UntypedStorage(_LARGEST_HEAP_BLOCK, device="cpu")  # type: ignore[no-untyped-call]
