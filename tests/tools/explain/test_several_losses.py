"""Every figure belongs to the loss whose step was lost: an optimizer may have several, each with its own scaler."""

import pytest
import torch
from explain_kit import explain, told
from torch import nn

from ampcompat import amp


def train(losses, level="O1", steps=40, scales=None, optimizers=1, model=None, **options):
    """Train on several losses, each a function of the model's output; the second has the last optimizer."""
    torch.manual_seed(0)
    models = [model or nn.Linear(8, 8) for _ in range(optimizers)]
    made = [torch.optim.SGD(one.parameters(), lr=1e-6) for one in models]
    models, made = amp.initialize(models, made, opt_level=level, num_losses=len(losses), verbosity=0, **options)
    for scaler, scale in zip(amp._amp_state.loss_scalers, scales or (), strict=False):
        scaler._loss_scale = scale
    explain()
    for step in range(1, steps + 1):
        for one in made:
            one.zero_grad()
        for loss_id, loss in enumerate(losses):
            at = min(loss_id, optimizers - 1)
            with amp.scale_loss(loss(models[at](torch.full((4, 8), 0.1)), step), made[at], loss_id=loss_id) as scaled:
                scaled.backward()
        for one in made:
            one.step()


def small(y, step):
    return y.float().mean() * 1e-2


def overflows_until_2(y, step):
    return y.float().sum() * 2**12


@pytest.mark.parametrize("optimizers", [1, 2])
def test_the_scale_that_came_down_is_named(capsys, optimizers):
    train([small, overflows_until_2], level="O2", optimizers=optimizers, steps=20)
    first, second = [entry["loss_scale"] for entry in amp.state_dict().values()]
    seen = told(capsys)
    assert seen.faults == []
    assert seen.counts["scales"] == {" of loss 0": [65536.0, first], " of loss 1": [65536.0, second]}
    assert first == 65536.0
    assert second <= 4.0


def test_a_gradient_is_unscaled_by_the_scale_of_the_loss_that_overflows(capsys):
    """The other's stays at 65536."""
    train([small, lambda y, step: y.float().sum() * 1e7], level="O2", steps=20)
    fault = told(capsys).first
    assert fault["float32"] / fault["scale"] == pytest.approx(1e7)


def test_the_scale_of_the_other_loss_is_no_sign_of_a_fault(capsys):
    """The first scaler was restored below one; the second comes down as it should."""
    train([lambda y, step: y.float().mean(), overflows_until_2], level="O2", scales=[0.25])
    assert told(capsys).faults == []


def test_each_optimizer_has_gradients_of_its_own(capsys):
    """Both overflow at any scale, one in each model."""
    train([lambda y, step: (y.float() * 1e7).sum(), lambda y, step: (y.float() * 1e8).sum()], level="O2", optimizers=2)
    assert [fault["see"] for fault in told(capsys).faults] == [["gradient"], ["gradient"]]
