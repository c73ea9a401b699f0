"""FusedAdam under amp beside torch's fused AdamW with masters kept by hand: the part of a step after ``backward``."""

import time

import torch

from ampcompat import amp
from ampcompat._state import state
from ampcompat.optimizers import FusedAdam

from .workers import Ratio

LAYERS, WIDTH = 16, 256


def _halves():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _by_hand():
    """Convert half gradients, unscale, step, copy to half."""
    model = _halves().half()
    halves = list(model.parameters())
    masters = [torch.nn.Parameter(p.detach().float()) for p in halves]
    optimizer, scaler = torch.optim.AdamW(masters, lr=1e-3, fused=True), torch.amp.GradScaler("cpu")
    grads = [torch.randn_like(p) for p in halves]

    def turn():
        scaler.scale(torch.ones(()))
        start = time.perf_counter()
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad.float()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(halves, masters)
        optimizer.zero_grad()
        return time.perf_counter() - start

    return turn


def _under_amp():
    model = _halves()
    model, optimizer = amp.initialize(model, FusedAdam(model.parameters(), lr=1e-3), opt_level="O2", verbosity=0)
    grads = [(p, torch.randn_like(p)) for p in model.parameters()]

    def turn():
        block = amp.scale_loss(torch.ones(()), optimizer)
        block.__enter__()
        for param, grad in grads:
            param.grad = grad
        start = time.perf_counter()
        block.__exit__(None, None, None)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return turn


def fused_adam_ratio(turns):
    """From half gradients to half weights: seconds with FusedAdam at O2 over those by hand; on the CPU."""
    state.reset()
    ours, theirs = _under_amp(), _by_hand()
    for _ in range(8):  # the first steps compare masters by value
        ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(turns)]
    state.reset()
    return Ratio.of(*zip(*pairs, strict=True))
