"""Training steps whose kernels are counted: plain float32, torch's own AMP, masters written by hand, and ampcompat."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ampcompat import amp

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-4),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
}
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
WARM_UP = 20  # the first sixteen blocks are watched for mistakes, and optimizers make their state


class Residual(nn.Module):
    """``count`` parameters, in linear layers with biases around which the input is added."""

    def __init__(self, count, width=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count // 2))
        with torch.no_grad():
            for param in self.parameters():
                param.div_(count)  # the sum of a thousand layers would overflow in half

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


@dataclass
class Case:
    """What is trained.

    Attributes:
        model: Makes the model, on the CPU.
        data: Makes its input and the classes of its output, on the CPU.
        optimizer: A name in OPTIMIZERS.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    optimizer: str = "AdamW"

    def made(self):
        torch.manual_seed(0)
        model = self.model().cuda()
        x, y = self.data()
        return model, x.cuda(), y.cuda()

    def optimizer_of(self, params):
        return OPTIMIZERS[self.optimizer](params)


def residual(count, optimizer="AdamW", width=16, rows=8):
    return Case(lambda: Residual(count, width), lambda: (torch.randn(rows, width), torch.arange(rows)), optimizer)


def float32(case):
    model, x, y = case.made()
    optimizer = case.optimizer_of(model.parameters())

    def step():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def native(case):
    model, x, y = case.made()
    optimizer, scaler = case.optimizer_of(model.parameters()), torch.amp.GradScaler("cuda")

    def step():
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def masters_by_hand(case):
    """A half model, but for its batch norms, and float32 masters, copied by ``foreach`` in either direction."""
    model, x, y = case.made()
    model.half()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    halves = [param for param in model.parameters() if param.dtype == torch.float16]
    masters = [nn.Parameter(half.detach().float()) for half in halves]
    wide = [param for param in model.parameters() if param.dtype == torch.float32]
    optimizer, scaler = case.optimizer_of([*masters, *wide]), torch.amp.GradScaler("cuda")

    def step():
        loss = F.cross_entropy(model(x.half()).float(), y)
        scaler.scale(loss).backward()
        grads = [torch.empty_like(master) for master in masters]
        torch._foreach_copy_(grads, [half.grad for half in halves])
        for half, master, grad in zip(halves, masters, grads):
            master.grad, half.grad = grad, None
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(halves, masters)
        optimizer.zero_grad()

    return step


def under_amp(level):
    def make(case):
        model, x, y = case.made()
        model, optimizer = amp.initialize(model, case.optimizer_of(model.parameters()), opt_level=level, verbosity=0)

        def step():
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


VARIANTS = {
    "float32": float32,
    "autocast + GradScaler": native,
    "masters by hand": masters_by_hand,
    **{level: under_amp(level) for level in LEVELS},
}


def warmed_up(variant, case):
    """A step of ``variant`` after its first ones."""
    step = VARIANTS[variant](case)
    for _ in range(WARM_UP):
        step()
    return step
