"""Gradients that are 0 in half stall a run without an overflow: they are told as numbers."""

import pytest
import torch
from amp_training import make_step
from explain_kit import explain, told
from torch import nn

from ampcompat import amp
from ampcompat.tools.explain.underflow import MANY


def at_end(capsys, level, scale=None, steps=30, factor=1e-3, at=0, **options):
    """What is told at the end; the scale is restored from a checkpoint before the step numbered ``at``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    explain()
    for step in range(steps):
        if step == at and scale is not None:
            amp.load_state_dict({"loss_scaler0": {"loss_scale": scale, "unskipped": 0}})
        optimizer.zero_grad()
        make_step(optimizer, model(torch.randn(4, 8)).float().mean() * factor)
    return told(capsys).counts["at_end"]


@pytest.mark.parametrize(
    ("level", "options"),
    [
        ("O1", {"scale": 2.0**-24}),
        ("O2", {"scale": 2.0**-24, "at": 20}),  # that a checkpoint brought
        ("O3", {"factor": 1e-6}),
        ("O3", {"factor": 1e-9}),
    ],
)
def test_a_scale_at_which_gradients_vanish(capsys, level, options):
    (told_at_end,) = at_end(capsys, level, **options)
    assert f"loss scale of {options.get('scale', 1.0):g}" in told_at_end


@pytest.mark.parametrize(
    ("level", "options"),
    [
        ("O1", {}),
        ("O2", {}),
        ("O3", {"factor": 1.0}),  # at a scale of 1, with gradients of a usual size
        ("O0", {"factor": 1e-9}),
        ("O5", {"factor": 1e-9}),  # bfloat16 reaches as far as float32
        ("O2", {"scale": 0.5, "factor": 1.0}),
    ],
)
def test_healthy_runs_are_left_alone(capsys, level, options):
    assert at_end(capsys, level, **options) == []


def trained(loss, model=None, steps=MANY + 1, after=lambda model: None, **options):
    torch.manual_seed(0)
    model = model or nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, **{"opt_level": "O2", "verbosity": 0, **options})
    explain()
    for step in range(steps):
        optimizer.zero_grad()
        with amp.scale_loss(loss(model, step), optimizer) as scaled:
            scaled.backward()
        after(model)
        optimizer.step()


def clip(model):
    """Clip by a norm whose squares are inf in float16."""
    grads = [param.grad for param in model.parameters()]
    norm = sum(grad.pow(2).sum() for grad in grads).sqrt()
    for grad in grads:
        grad.mul_(1 / (norm + 1e-6))


def test_gradients_that_a_clip_has_made_zero(capsys):
    trained(
        lambda model, step: model(torch.full((4, 8), 500.0)).float().mean(),
        after=clip,
        opt_level="O3",
        loss_scale=1.0,
    )
    assert told(capsys).counts["at_end"]


def test_each_optimizer_has_gradients_of_its_own(capsys):
    """A GAN whose discriminator has won: the generator's gradients are 0, and the discriminator steps last."""
    torch.manual_seed(0)
    models = [nn.Linear(8, 1), nn.Linear(8, 1)]
    optimizers = [torch.optim.SGD(models[0].parameters(), lr=0.1), torch.optim.Adam(models[1].parameters())]
    models, optimizers = amp.initialize(models, optimizers, opt_level="O1", num_losses=2, verbosity=0)
    explain()
    for _ in range(MANY):
        for optimizer in optimizers:
            optimizer.zero_grad()
        make_step(optimizers[0], (models[0](torch.randn(4, 8)).float() * 0).mean() + 1, loss_id=0)
        make_step(optimizers[1], models[1](torch.randn(4, 8)).float().mean(), loss_id=1)
    (told_at_end,) = told(capsys).counts["at_end"]
    assert f"step {MANY} of optimizer 0 (SGD)" in told_at_end


def test_a_step_of_zeros_now_and_then_is_not_told(capsys):
    trained(lambda model, step: model(torch.ones(4, 8)).float().mean() * (0.0 if step in (0, 5) else 1e-2), steps=6)
    assert told(capsys).counts["at_end"] == []


def test_a_sum_that_is_inf_and_divides_leaves_gradients_of_0(capsys):
    """A Dice loss in half: it stays at 1, and no value is lost."""

    class Dice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8192)

        def forward(self, x):
            shares = torch.sigmoid(self.fc(x))
            return 1 - 2 * shares[:, :9].sum() / shares.sum()

    trained(lambda model, step: model(torch.randn(32, 8)), model=Dice())
    assert told(capsys).counts["at_end"]


def test_a_loss_of_0_has_nothing_left_to_learn(capsys):
    """A hinge loss, once the margin is kept."""

    def hinge(model, step):
        x = torch.randn(8, 8).sign()
        return torch.relu(0.1 - x[:, :1] * model(x).float()).mean()

    trained(hinge, steps=60)
    assert told(capsys).counts["at_end"] == []


def test_zeros_of_an_embedding_are_no_underflow(capsys):
    """Rows that no batch has read have no gradient at any scale."""
    model = nn.Sequential(nn.Embedding(500, 8), nn.Linear(8, 1))
    trained(lambda model, step: model(torch.tensor([1, 2])).float().mean(), model=model, steps=8, loss_scale=1.0)
    assert told(capsys).counts["at_end"] == []
