"""FusedAdam under amp beside torch's fused AdamW with masters kept by hand: the part of a step after ``backward``."""

import torch

from ampcompat import amp
from ampcompat.optimizers import FusedAdam
from tests.internals import reset

from . import hardware
from .workers import Ratio

LAYERS = 16
WIDTHS = {"cpu": 256, "cuda": 2048}


def _model(device):
    torch.manual_seed(0)
    width = WIDTHS[device]
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS))).to(device)


def _now(device):
    if device == "cuda":
        torch.cuda.synchronize()
    return hardware.clock(device)()


def _by_hand(device):
    """Convert half gradients, unscale, step, copy to half."""
    model = _model(device).half()
    halves = list(model.parameters())
    masters = [torch.nn.Parameter(p.detach().float()) for p in halves]
    optimizer, scaler = torch.optim.AdamW(masters, lr=1e-3, fused=True), torch.amp.GradScaler(device)
    grads = [torch.randn_like(p) for p in halves]
    loss = torch.ones((), device=device)

    def turn():
        scaler.scale(loss)
        start = _now(device)
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad.float()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(halves, masters)
        optimizer.zero_grad()
        return _now(device) - start

    return turn


def _under_amp(device):
    model = _model(device)
    model, optimizer = amp.initialize(model, FusedAdam(model.parameters(), lr=1e-3), opt_level="O2", verbosity=0)
    grads = [(p, torch.randn_like(p)) for p in model.parameters()]
    loss = torch.ones((), device=device)

    def turn():
        block = amp.scale_loss(loss, optimizer)
        block.__enter__()
        for param, grad in grads:
            param.grad = grad
        start = _now(device)
        block.__exit__(None, None, None)
        optimizer.step()
        optimizer.zero_grad()
        return _now(device) - start

    return turn


def fused_adam_ratio(turns, device):
    """From half gradients to half weights: seconds with FusedAdam at O2 over those by hand."""
    reset()
    ours, theirs = _under_amp(device), _by_hand(device)
    for _ in range(8):  # the first steps compare masters by value
        ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(turns)]
    reset()
    return Ratio.of(*zip(*pairs, strict=True))
