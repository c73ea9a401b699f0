"""Writes the checkpoints of other libraries that the tests load, in the form in which those libraries write them.

``python tests/data/make_checkpoints.py``; Lightning's come from ``record_lightning.py``, written by Lightning itself.
The apex ones follow the last apex that had ``amp``: its scripts saved
``amp.state_dict()`` (an OrderedDict of plain numbers), a model's ``state_dict()`` whose half weights were widened to
float32, the optimizer's with float32 state, and, in NVIDIA's BERT, ``list(amp.master_params(optimizer))``.
"""

from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent


def net() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))


def apex_amp() -> OrderedDict:
    return OrderedDict(
        loss_scaler0={"loss_scale": 32768.0, "unskipped": 17}, loss_scaler1={"loss_scale": 131072.0, "unskipped": 3}
    )


def nvidia_bert() -> dict:
    """Apex O2: half weights, float32 masters in the optimizer, saved after three steps."""
    model = net()
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=0.01)
    model.half()
    for seed in range(3):
        torch.manual_seed(seed)
        model.zero_grad()
        model(torch.randn(8, 4).half()).float().pow(2).mean().mul(1024.0).backward()
        for master, half in zip(masters, model.parameters(), strict=True):
            master.grad = half.grad.float() / 1024.0
        optimizer.step()
        with torch.no_grad():
            for master, half in zip(masters, model.parameters(), strict=True):
                half.copy_(master)
    return {
        "model": OrderedDict((name, value.float()) for name, value in model.state_dict().items()),
        "optimizer": optimizer.state_dict(),
        "master params": masters,
        "amp": OrderedDict(loss_scaler0={"loss_scale": 1024.0, "unskipped": 3}),
        "files": [],
        "epoch": 0,
    }


def grad_scaler() -> dict:
    """A native scaler's own words after 24 steps, of which three overflowed."""
    scaler = torch.amp.GradScaler("cpu")
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    for step in range(24):
        optimizer.zero_grad()
        scaler.scale((param * (float("inf") if step < 3 else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.state_dict()


if __name__ == "__main__":
    for make in (apex_amp, nvidia_bert, grad_scaler):
        torch.save(make(), HERE / f"{make.__name__}.pt")
