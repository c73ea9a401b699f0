"""Steps that an overflow cost a level: ``assert_opt_level_parity`` has the reference skip the same."""

import pytest
import torch

from ampcompat import amp
from ampcompat.amp.observers import observing
from ampcompat.testing import assert_opt_level_parity
from ampcompat.tools.recording.recorder import Recorder
from ampcompat.tools.recording.skips import Skips


# -- skipping what another run skipped ---------------------------------------------------------------------------------
def build(level="O0", **kwargs):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **kwargs)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def train(model, optimizer, steps=5, leave_out=()):
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), 0.1 * number)).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        if number not in leave_out:
            optimizer.step()
    return model.weight.detach().clone()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_skipping_steps_leaves_others_bitwise_equal(level, fused):
    """The other steps equal the steps of a run that leaves the skipped ones out."""
    expected = train(*build(level, fused=fused), leave_out=(1, 2, 4))
    steps = []
    recorder = Recorder(steps.append, losses=True)
    with observing(recorder), observing(Skips(recorder, (1, 2, 4))):
        found = train(*build(level, fused=fused))
    assert [one.step for one in steps if one.skipped] == [1, 2, 4]
    assert torch.equal(found, expected)


def test_a_scheduler_between_and_a_second_optimizer():
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    models, optimizers = amp.initialize(models, optimizers, opt_level="O0", verbosity=0)
    steps = []
    recorder = Recorder(steps.append, losses=True)
    with observing(recorder), observing(Skips(recorder, (2,))):
        for _ in range(2):
            loss = sum(model(torch.ones(2, 4)).square().mean() for model in models)
            with amp.scale_loss(loss, optimizers) as scaled:
                scaled.backward()
            for optimizer in optimizers:
                optimizer.step()
            schedulers = [torch.optim.lr_scheduler.StepLR(one, 1) for one in optimizers]
    assert [(one.step, one.skipped) for one in steps] == [(1, False), (2, True), (3, False), (4, False)]
    assert schedulers


def test_a_step_with_a_closure():
    model, optimizer = build()
    steps = []
    recorder = Recorder(steps.append, losses=True)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    with observing(recorder), observing(Skips(recorder, (2,))):
        for _ in range(3):
            optimizer.step(closure)
    assert [one.skipped for one in steps] == [False, True, False]


# -- the assertion -------------------------------------------------------------------------------------------------
def with_overflows(level, factor=1.0):
    """A training whose first two steps overflow unless the loss scale is one."""
    model, optimizer = build(level)
    losses = []
    for number in range(6):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), 0.1 + 0.1 * number)).float().square().mean()
        loss = loss * (factor if level != "O0" and number == 4 else 1.0)
        with amp.scale_loss(loss, optimizer) as scaled:
            (scaled * (float("inf") if level != "O0" and number < 2 else 1.0)).backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def test_the_assertion_gives_the_reference_the_same_skips():
    losses = assert_opt_level_parity(with_overflows, ("O1", "O2"))
    assert losses["O1"][2] > 1.02 * losses["O0"][2]  # the plain reference has made two steps more


def test_a_loss_that_is_off_fails_for_all_that():
    with pytest.raises(AssertionError, match=" at step 5, O0's "):
        assert_opt_level_parity(lambda level: with_overflows(level, 1.5), ("O1",))
