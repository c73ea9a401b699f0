"""Trainings under ``amp.report``, for its tests."""

import torch
from amp_training import initialized, make_step
from torch import nn

from ampcompat import amp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.norm(torch.relu(self.inner(x))))


def train(level, steps=4, bad=(), traced=2, **options):
    """Train a small net; the batches of the steps numbered ``bad`` are not finite."""
    torch.manual_seed(0)
    report = amp.report(steps=traced)
    model, optimizer = initialized(Net(), level, **options)
    for number in range(steps):
        x = torch.randn(8, 16)
        if number in bad:
            x[0, 0] = float("inf")
        optimizer.zero_grad()
        make_step(optimizer, model(x).float().pow(2).mean())
    return model, report


def one_step(model, x, level, outside=lambda y: y, **options):
    """The report of one step on ``x``; ``model`` makes the model after ``report()``, as under the runner."""
    report = amp.report(steps=1)
    model, optimizer = initialized(model(), level, **options)
    make_step(optimizer, outside(model(x)).float().mean())
    return report
