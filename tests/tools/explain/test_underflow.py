"""A loss scale so low that gradients vanish in half stalls a run without an overflow: the verdict says so."""

import re

import pytest
import torch
from amp_training import last_words, make_step
from torch import nn

from ampcompat import amp
from ampcompat.tools.explain import explain_overflows
from ampcompat.tools.explain.lost import WINDOW


def verdict(level, scale=None, steps=60, factor=1e-3, at=0, **options):
    """Train; the scale is restored from a checkpoint before the step numbered ``at``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    explain_overflows()
    for step in range(steps):
        if step == at and scale is not None:
            amp.load_state_dict({"loss_scaler0": {"loss_scale": scale, "unskipped": 0}})
        optimizer.zero_grad()
        make_step(optimizer, model(torch.randn(4, 8)).float().mean() * factor)
    return last_words()[-1]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("at", [0, 40])
def test_a_scale_that_a_checkpoint_brought(level, at):
    found = verdict(level, 2.0**-24, at=at)
    since = "from the first step on" if at == 0 else f"since step {at + 1}"
    assert re.search(
        r"^none of 60 steps was skipped, but \d+ % of the gradients of step 60 were 0 in float16: the loss scale was"
        rf" 5\.96046e-08 {since}, too low for them \(a new dynamic one begins at 65536\)\.$",
        found.head,
    ), found.head
    assert found.content["underflow"]["since"] == at + 1
    assert found.content["underflow"]["scale"] == 2.0**-24
    assert 0.5 < found.content["underflow"]["share"] <= 1


def test_a_static_scale_of_one_under_small_losses():
    found = verdict("O3", factor=1e-6)
    assert "of the gradients of step 60 were 0 in float16" in found.head
    assert "the loss scale was 1 from the first step on" in found.head


def test_a_static_scale_of_one_at_which_all_gradients_vanish():
    assert "100 % of the gradients of step 60 were 0 in float16" in verdict("O3", factor=1e-9).head


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
def test_healthy_runs_are_left_alone(level, options):
    assert verdict(level, **options).head == "none of 60 steps was skipped."


@pytest.mark.parametrize("scale", [1.0, "dynamic"])
def test_gradients_that_a_clip_has_made_zero(scale):
    """The squares of its norm are inf in float16, and what it multiplies by is 0: the loss scale has no part in it."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", loss_scale=scale, verbosity=0)
    explain_overflows()
    for _ in range(30):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.full((4, 8), 500.0)).float().mean(), optimizer) as scaled:
            scaled.backward()
        clip(model.parameters())
        optimizer.step()
    assert re.search(
        r"skipped.*, but the gradients of step 30 were all 0, though they reached 500 when their block ended: look at"
        r" what scales them after it, such as a clip by a norm whose squares are inf in float16\.$",
        last_words()[-1].head,
    )


def test_a_step_of_zeros_long_after_another_is_no_clip():
    """A loss that does not depend on the weights, at the first step and at the last."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-6), opt_level="O1", verbosity=0)
    explain_overflows()
    for step in range(6):
        optimizer.zero_grad()
        make_step(optimizer, model(torch.ones(4, 8)).float().mean() * (0.0 if step in (0, 5) else 1e-2))
    assert last_words()[-1].head == "none of 6 steps was skipped."


def test_a_sum_that_is_inf_and_divides_leaves_gradients_of_0():
    """A Dice loss in half: it stays at 1, and no value is lost."""
    torch.manual_seed(0)

    class Dice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8192)

        def forward(self, x):
            shares = torch.sigmoid(self.fc(x))
            return 1 - 2 * shares[:, :9].sum() / shares.sum()

    model = Dice()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    explain_overflows()
    for _ in range(WINDOW + 1):  # the first is skipped
        optimizer.zero_grad()
        make_step(optimizer, model(torch.randn(32, 8)))
    assert last_words()[-1].head.endswith(
        "that is normal, but the gradients of the last 20 steps were all 0: the loss does not depend on the weights"
        " there, as where a sum that is inf in float16 divides it."
    )


@pytest.mark.parametrize(("scale", "factor"), [("dynamic", 0.0), (128.0, 1e-12)])
def test_gradients_of_0_alone_may_be_a_matter_of_a_low_scale(scale, factor):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=scale, verbosity=0)
    explain_overflows()
    for _ in range(40):
        optimizer.zero_grad()
        make_step(optimizer, model(torch.randn(4, 8)).float().pow(2).mean() * factor + 1)
    low = "the loss scale, 128, is too low for them, or " if scale == 128 else ""
    assert f"but the gradients of the last 40 steps were all 0: {low}the loss does not" in last_words()[-1].head


def test_a_loss_of_0_has_nothing_left_to_learn():
    """A hinge loss, once the margin is kept."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), opt_level="O2", verbosity=0)
    explain_overflows()
    for _ in range(60):
        x = torch.randn(8, 8).sign()
        optimizer.zero_grad()
        make_step(optimizer, torch.relu(0.1 - x[:, :1] * model(x).float()).mean())
    assert last_words()[-1].head.endswith(("was skipped.", "that is normal."))


def clip(params):
    grads = [param.grad for param in params]
    norm = sum(grad.pow(2).sum() for grad in grads).sqrt()
    for grad in grads:
        grad.mul_(1 / (norm + 1e-6))


def test_a_scale_that_lost_steps_have_brought_down_is_no_news(capsys):
    """A batch that gives NaN at any scale is the cause; the low scale is what comes of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    explain_overflows()
    for step in range(100):
        optimizer.zero_grad()
        x = torch.randn(4, 8)
        make_step(optimizer, model(x).float().mean() * (torch.nan if step % 10 else 1e-3))
    verdict = last_words()[-1]
    assert verdict.content["underflow"]["share"] > 0.1
    assert re.fullmatch(r"90 of 100 steps were skipped; the cause is \S+ \(mul\)\.", verdict.head), verdict.head


def test_zeros_of_an_embedding_are_no_underflow():
    """Rows that no batch has read have no gradient at any scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=1.0)
    explain_overflows()
    for _ in range(8):
        optimizer.zero_grad()
        make_step(optimizer, model(torch.tensor([1, 2])).float().mean())
    assert last_words()[-1].head == "none of 8 steps was skipped."
