"""Gather what each rank has counted when a run ends, through the store that its process group was made with.

Every rank writes its counts into the store, and rank 0 waits for all. The store outlives the group.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch

from ampcompat import _torch
from ampcompat.tools.core import rank, world_size
from ampcompat.tools.explain.counts import Counts

#: How long rank 0 waits for the others to end.
PATIENCE = timedelta(seconds=10)


class Ranks:
    """The ranks of a run: this one, until its process group is seen."""

    def __init__(self) -> None:
        self.count = world_size()
        self._store: Any = None
        self._rank = rank()

    @property
    def is_first(self) -> bool:
        """Whether the counts are for this one to tell."""
        return self._rank == 0

    def look(self) -> None:
        """Keep the store of the process group, if there is a group."""
        distributed = torch.distributed
        if self._store is None and distributed.is_available() and distributed.is_initialized():
            self.count = world_size()
            self._rank = rank()
            self._store = _torch.store_for("ampcompat explain")

    def gather(self, own: Counts) -> dict[int, Counts]:
        """The counts of all ranks on rank 0, as far as they come; elsewhere the ``own`` ones."""
        self.look()
        found = {self._rank: own}
        if self._store is None or self.count < 2:
            return found
        with contextlib.suppress(RuntimeError):  # a rank that failed may have taken the store with it
            if self._rank:
                self._store.set(str(self._rank), json.dumps(asdict(own)))
                return found
            others = [str(other) for other in range(1, self.count)]
            with contextlib.suppress(RuntimeError):
                self._store.wait(others, PATIENCE)
            came = [other for other in others if self._store.check([other])]
            found |= {int(other): Counts(**json.loads(self._store.get(other))) for other in came}
        return found
