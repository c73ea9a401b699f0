"""Trainings whose steps lose weights, under explain, for its tests."""

import torch
from amp_training import make_step
from internals import observers
from torch import nn

from ampcompat import amp


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(10, 4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.embeddings(x))


def train(
    make, level="O3", steps=2, model=Words, batch=torch.tensor([1, 2]), loss=lambda y: y.float().sum(), **options
):
    torch.manual_seed(0)
    model = model()
    model, optimizer = amp.initialize(model, make(model.parameters()), opt_level=level, verbosity=0, **options)
    if not observers():
        amp.explain_overflows()
    for _ in range(steps):
        optimizer.zero_grad()
        make_step(optimizer, loss(model(batch)))
    return model, optimizer


def adam(**options):
    return lambda params: torch.optim.Adam(params, **{"lr": 1e-3, **options})
