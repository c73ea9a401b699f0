"""A training run in which every number is exact in both halves, for tests of what scripts write to weights."""

import torch
from seeded import seeded

from ampcompat import amp

STEPS = 8
LR = 2.0**-6


class Scores(torch.nn.Module):
    """Two layers whose gradients are known: each weight has the same one in every step."""

    def __init__(self, seed=0):
        super().__init__()
        self.codebook = torch.nn.Embedding(4, 4)
        self.head = torch.nn.Linear(4, 2)
        numbers = seeded(seed)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-32, 33, param.shape, generator=numbers) / 64)

    def forward(self, x):
        return self.head.weight.sum() * x + self.head.bias.sum() * x + self.codebook.weight[:2].sum() * x


class Run:
    """A training run: ``write`` is called before or after each step from ``first`` on."""

    def __init__(self, level, kind=torch.optim.SGD, seed=0, **options):
        self.model = Scores(seed)
        self.optimizer = kind(self.model.parameters(), lr=LR, **options)
        self.model, self.optimizer = amp.initialize(
            self.model, self.optimizer, opt_level=level, loss_scale=128.0, verbosity=0
        )

    def step(self):
        self.optimizer.zero_grad()
        with amp.scale_loss(self.model(torch.ones(())).float(), self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()

    def weights(self):
        """What is saved; the model computes with the same, rounded."""
        saved = {name: value.clone() for name, value in self.model.state_dict().items()}
        for name, param in self.model.named_parameters():
            assert torch.equal(param.detach(), saved[name].to(param.dtype)), name
        return saved
