"""All random number generators: their states, and one seed for all."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch


class RandomState(NamedTuple):
    """Hold the states of the generators that a forward may draw from; numpy's is None where it is not imported."""

    python: tuple[object, ...]
    numpy: Sequence[object] | None
    cpu: torch.Tensor
    cuda: list[tuple[torch.device, torch.Tensor]]


def random_state(devices: list[torch.device]) -> RandomState:
    """The state of every generator that a forward may draw from. No host sync."""
    numpy = sys.modules.get("numpy")
    return RandomState(
        random.getstate(),
        numpy.random.get_state() if numpy is not None else None,
        torch.get_rng_state(),
        [(device, torch.cuda.get_rng_state(device)) for device in devices],
    )


def set_random_state(state: RandomState) -> None:
    """Put back what :func:`random_state` read."""
    python, numpy, cpu, cuda = state
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)
    torch.set_rng_state(cpu)
    for device, one in cuda:
        torch.cuda.set_rng_state(one, device)


def seed_all() -> None:
    """Seed Python, torch, and numpy where it has been imported, with 0."""
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
