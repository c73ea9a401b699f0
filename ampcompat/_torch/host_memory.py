"""Memory of the host: what becomes of it once it is freed."""

from __future__ import annotations

import functools

import torch

#: Have glibc keep up to 64 MiB of freed memory, as after any program's first free of a block of 32 MiB: allocate one
#: and drop it. Until then glibc keeps twice the largest block that was freed and gives the rest back to the system. A
#: step of training takes that back at once, page fault by page fault, in up to a quarter of the time of a small model's
#: step. No page of the block is touched, so the process holds no more. glibc has no way back; other allocators have no
#: such rule.
keep_freed_memory = functools.partial(torch.UntypedStorage, (32 << 20) - 8192, device="cpu")
