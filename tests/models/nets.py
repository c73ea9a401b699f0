"""Models and levels that the tests of this folder share; programs that load a pickled model import them from here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from seeded import seeded
from torch import nn

from ampcompat import amp

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
CAST_LEVELS = ["O2", "O3", "O5"]
MASTER_LEVELS = ["O2", "O5"]


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU())
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Child(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Routed(Net):
    """Sends its forward through an attribute of the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.implementation

    def implementation(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


def batch(seed: int = 0, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 4, generator=seeded(seed))


def made(kind: Callable[[], nn.Module] = Net, level: str = "O2", lr: float = 0.1, **options: object) -> tuple:
    """A model of ``kind`` under amp, whose weights are the same each time, and its optimizer."""
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **options})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, seed: int = 0) -> None:
    """Train for ``steps``, the first with the batch of ``seed``; the gradients of the last stay."""
    for step in range(steps):
        optimizer.zero_grad()
        with amp.scale_loss(model(batch(seed + step)).float().pow(2).mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
