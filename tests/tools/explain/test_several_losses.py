"""Every figure is that of the loss whose step was lost: an optimizer may have several, each with its own scaler."""

import pytest
import torch
from amp_training import last_words
from torch import nn

from ampcompat import amp
from ampcompat.tools.explain import explain_overflows


def train(losses, level="O1", steps=40, scales=None, optimizers=1, model=None, **options):
    """Train on several losses, each a function of the model's output; the second has the last optimizer.

    Returns:
        The explanations, and the verdict.
    """
    torch.manual_seed(0)
    models = [model or nn.Linear(8, 8) for _ in range(optimizers)]
    made = [torch.optim.SGD(one.parameters(), lr=1e-6) for one in models]
    models, made = amp.initialize(models, made, opt_level=level, num_losses=len(losses), verbosity=0, **options)
    for scaler, scale in zip(amp._amp_state.loss_scalers, scales or (), strict=False):
        scaler._loss_scale = scale
    explain_overflows()
    for step in range(1, steps + 1):
        for one in made:
            one.zero_grad()
        for loss_id, loss in enumerate(losses):
            at = min(loss_id, optimizers - 1)
            with amp.scale_loss(loss(models[at](torch.full((4, 8), 0.1)), step), made[at], loss_id=loss_id) as scaled:
                scaled.backward()
        for one in made:
            one.step()


def told(capsys):
    *held, verdict = last_words()
    return capsys.readouterr().err, [one.text() for one in held], verdict


def small(y, step):
    return y.float().mean() * 1e-2


def overflows_until_2(y, step):
    return y.float().sum() * 2**12


@pytest.mark.parametrize("optimizers", [1, 2])
def test_the_scale_that_came_down_is_named(capsys, optimizers):
    train([small, overflows_until_2], level="O2", optimizers=optimizers)
    scales = [entry["loss_scale"] for entry in amp.state_dict().values()]
    assert scales[0] == 65536.0
    assert scales[1] <= 4.0
    _, _, verdict = told(capsys)
    assert f"while the loss scale of loss 1 came down to {scales[1]:g}: that is normal." in verdict.head


def test_each_scale_that_came_down_is_named(capsys):
    train([overflows_until_2, overflows_until_2], level="O2", optimizers=2)
    first, second = [entry["loss_scale"] for entry in amp.state_dict().values()]
    _, _, verdict = told(capsys)
    of_first, of_second = f"of loss 0 came down to {first:g}", f"of loss 1 came down to {second:g}"
    assert f"while the loss scale {of_first}, and that {of_second}: that is normal." in verdict.head


def test_a_gradient_is_unscaled_by_the_scale_of_the_loss_that_overflows(capsys):
    """The other's stays at 65536."""
    train([small, lambda y, step: y.float().sum() * 1e7], level="O2", steps=20)
    err, _, _ = told(capsys)
    assert "even without the loss scale the gradient is 1e+07" in err


def test_the_scale_of_the_other_loss_is_no_sign_of_a_fault(capsys):
    """The first scaler was restored below one; the second comes down as it should."""
    train([lambda y, step: y.float().mean(), overflows_until_2], level="O2", scales=[0.25])
    err, _, verdict = told(capsys)
    assert "ampcompat explain" not in err
    assert "that is normal" in verdict.head


def test_the_hint_names_the_scale_of_the_loss(capsys):
    """A loss that is not finite, after a step was made with it: the figures are those of its own block."""
    train([small, lambda y, step: y.float().sum()], level="O2", steps=4, scales=[2.0**4, 2.0**20])
    _, held, _ = told(capsys)
    assert "without the loss scale of 131072 the gradient is" in held[0]


def test_gradients_of_an_earlier_overflow_are_no_overflow_of_a_loss(capsys):
    """The script never clears gradients: each later step is skipped for what the first overflow has left."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-3), opt_level="O1", verbosity=0)
    explain_overflows()
    for step in range(30):
        x = torch.full((4, 8), 1e6 if step == 3 else 0.1)
        with amp.scale_loss(model(x).float().mean() * 1e-3, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    err, _, verdict = told(capsys)
    assert "gradients that overflowed in an earlier step were not cleared" in err
    assert "hint      call optimizer.zero_grad() after a skipped step" in err
    assert "outside" not in err
    assert "the cause of 26 of these is gradients of an earlier overflow that were not cleared" in verdict.head


def too_large_1e7(y, step):
    return (y.float() * 1e7).sum()


def too_large_1e8(y, step):
    return (y.float() * 1e8).sum()


def test_each_optimizer_has_gradients_of_its_own(capsys):
    """Both overflow at any scale, one in each model."""
    train([too_large_1e7, too_large_1e8], level="O2", optimizers=2)
    text, _, verdict = told(capsys)
    assert text.count("a gradient is too large for float16") == 2
    assert len(verdict.content["causes"]) == 2
    assert verdict.content["causes"][0]["cause"] != verdict.content["causes"][1]["cause"]
