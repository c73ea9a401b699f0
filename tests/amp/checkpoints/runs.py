"""A training run with everything in it that a checkpoint must bring back."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import torch
from internals import reset
from seeded import seeded
from torch import nn

from ampcompat import amp

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
}
LOADS = ("initialize", "model", "optimizer", "amp")
ORDERS = list(itertools.permutations(LOADS))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)).relu())


class Run:
    def __init__(self, level: str, optimizer: str, seed: int = 0, initialize: bool = True) -> None:
        torch.manual_seed(seed)
        self.level, self.step_count = level, 0
        self.model = Net()
        groups = [
            {"params": [*self.model.a.parameters(), *self.model.norm.parameters()]},
            {"params": self.model.b.parameters(), "lr": 0.02},
        ]
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        if initialize:
            self.initialize(level)

    def initialize(self, level: str) -> None:
        self.level = level
        self.model, self.optimizer = amp.initialize(
            self.model, self.optimizer, opt_level=level, num_losses=2, verbosity=0
        )

    def step(self) -> None:
        generator = seeded(1000 + self.step_count)
        self.optimizer.zero_grad()
        for loss_id in (0, 1):
            x = torch.randn(8, 4, generator=generator)
            loss = self.model(x).float().pow(2).mean()
            if self.step_count == 2 and loss_id == 1 and self.level in ("O1", "O2"):
                loss = loss * float("inf")
            with amp.scale_loss(loss, self.optimizer, loss_id=loss_id) as scaled:
                scaled.backward()
        nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), 5.0)
        self.optimizer.step()
        self.scheduler.step()
        self.step_count += 1

    def save(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "amp": amp.state_dict(),
                "step": self.step_count,
            },
            buffer,
        )
        return buffer.getvalue()

    def facts(self) -> dict[str, Any]:
        """Everything that must be bitwise the same."""
        return {
            "model": {k: v.clone() for k, v in self.model.state_dict().items()},
            "half": [p.detach().clone() for p in self.model.parameters()],
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scheduler": self.scheduler.state_dict(),
            "amp": amp.state_dict(),
        }


def resumed(saved: bytes, level: str, optimizer: str, order: tuple[str, ...] = LOADS) -> Run:
    """A run in what stands for a fresh process, brought to where ``saved`` was made."""
    reset()
    checkpoint = torch.load(io.BytesIO(saved), weights_only=True)
    run = Run(level, optimizer, seed=99, initialize=False)
    todo = {
        "initialize": lambda: run.initialize(level),
        "model": lambda: run.model.load_state_dict(checkpoint["model"]),
        "optimizer": lambda: run.optimizer.load_state_dict(checkpoint["optimizer"]),
        "amp": lambda: amp.load_state_dict(checkpoint["amp"]),
    }
    for name in order:
        todo[name]()
    run.scheduler.load_state_dict(checkpoint["scheduler"])
    run.step_count = checkpoint["step"]
    return run


def same(a: Any, b: Any, where: str = "") -> None:
    """Bitwise equality of nested structures."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        # NaN is equal to NaN here: at O3 Adam's epsilon is zero in half.
        assert torch.equal(torch.nan_to_num(a, nan=7e4), torch.nan_to_num(b, nan=7e4)), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}[{index}]")
    else:
        assert a == b, where
