"""What the processes of a run share."""

from __future__ import annotations

from typing import Any

import torch


def store_for(name: str) -> Any:
    """The store that the default process group was made with, for keys of ``name``: any rank reads and writes it."""
    store = torch.distributed.distributed_c10d._get_default_store()
    return torch.distributed.distributed_c10d.PrefixStore(name, store)
