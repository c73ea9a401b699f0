"""Levels x overrides x optimizers x loss patterns: trains, right dtypes, masters tied after every step."""

import pytest
import torch
import torch.nn.functional as F
from amp_training import assert_masters_agree, batch, net

from ampcompat import amp

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.3),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "Adam": lambda p: torch.optim.Adam(p, lr=2e-2, eps=1e-4),  # 1e-8 is zero in half at O3
    "AdamW": lambda p: torch.optim.AdamW(p, lr=2e-2, eps=1e-4),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=2e-2, eps=1e-4, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.2, eps=1e-4),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=5e-3, eps=1e-4),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
}
HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
#: level, overrides, dtype of the linear weights, of batch norm's, and whether there are masters
SETTINGS = {
    "O0": ("O0", {}, FULL, FULL, False),
    "O0 dynamic": ("O0", {"loss_scale": "dynamic"}, FULL, FULL, False),
    "O0 static": ("O0", {"loss_scale": 128.0}, FULL, FULL, False),
    "O1": ("O1", {}, FULL, FULL, False),
    "O1 static": ("O1", {"loss_scale": "128.0"}, FULL, FULL, False),
    "O1 without casts": ("O1", {"patch_torch_functions": False}, FULL, FULL, False),
    "O2": ("O2", {}, HALF, FULL, True),
    "O2 static": ("O2", {"loss_scale": 128.0}, HALF, FULL, True),
    "O2 half batch norm": ("O2", {"keep_batchnorm_fp32": "False"}, HALF, HALF, True),
    "O2 without masters": ("O2", {"master_weights": False, "loss_scale": 128.0}, HALF, FULL, False),
    "O2 bfloat16": ("O2", {"cast_model_type": BF16}, BF16, FULL, True),
    "O2 no cast": ("O2", {"cast_model_type": False}, FULL, FULL, False),
    "O2 half outputs": ("O2", {"cast_model_outputs": HALF}, HALF, FULL, True),
    "O3": ("O3", {}, HALF, HALF, False),
    "O3 float batch norm": ("O3", {"keep_batchnorm_fp32": True}, HALF, FULL, False),
    "O3 with masters": ("O3", {"master_weights": True}, HALF, HALF, True),
    "O3 dynamic": ("O3", {"loss_scale": "dynamic"}, HALF, HALF, False),
    "O4": ("O4", {}, FULL, FULL, False),
    "O5": ("O5", {}, BF16, FULL, True),
    "O5 dynamic": ("O5", {"loss_scale": "dynamic"}, BF16, FULL, True),
}


def losses(model, pattern):
    """The losses of one step, each to be backpropagated by itself."""
    x, y = batch(3)
    if pattern == "accumulation":
        return [lambda part=part: F.cross_entropy(model(x[part::2]).float(), y[part::2]) / 2 for part in range(2)]
    first = [lambda: F.cross_entropy(model(x).float(), y)]
    return first if pattern == "one loss" else [*first, lambda: model(x).float().pow(2).mean() * 0.01]


def one_step(model, optimizer, pattern):
    """One step; returns the sum of its losses."""
    totals = []

    def closure():
        optimizer.zero_grad()
        total = torch.zeros(())
        for index, make in enumerate(losses(model, pattern)):
            loss = make()
            total += loss.detach()
            with amp.scale_loss(loss, optimizer, loss_id=index if pattern == "two losses" else 0) as big:
                big.backward()
        totals.append(float(total))
        return total

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    return totals[0]


@pytest.mark.cover(2)
@pytest.mark.parametrize("pattern", ["one loss", "two losses", "accumulation"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_trains(setting, kind, pattern):
    level, overrides, linear, batchnorm, has_masters = SETTINGS[setting]
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    amp.initialize(model, optimizer, opt_level=level, num_losses=2, verbosity=0, **overrides)
    seen = []
    for _ in range(6):
        seen.append(one_step(model, optimizer, pattern))
        if has_masters:
            assert_masters_agree(model)
    assert seen[-1] < seen[0] * 0.97
    assert not amp.step_was_skipped(optimizer)
    assert {p.dtype for m in (model.a, model.b) for p in m.parameters()} == {linear}
    assert {p.dtype for p in model.bn.parameters()} == {model.bn.running_mean.dtype} == {batchnorm}
    stepped = {p.dtype for p in amp.master_params(optimizer)}
    assert stepped == ({FULL} if has_masters else {linear, batchnorm})
    assert all(torch.isfinite(p).all() for p in amp.master_params(optimizer))
