"""What the recorder makes of blocks and steps: losses, scales and skips."""

import pytest
import torch
from internals import reset

from ampcompat import amp
from ampcompat.amp.observers import observing
from ampcompat.tools.recording.recorder import Recorder

pytestmark = pytest.mark.torch


def make(level, kind=torch.optim.SGD, model=None, **kwargs):
    torch.manual_seed(0)
    model = model or torch.nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=0.1, **kwargs)
    return amp.initialize(model, optimizer, opt_level=level)


def backward(loss, optimizer, **kwargs):
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled_loss:
        scaled_loss.backward()


def loss_of(model, factor=1.0):
    return model(torch.ones(2, 4)).float().square().mean() * factor


@pytest.fixture
def recorded():
    steps = []
    with observing(Recorder(steps.append, losses=True)):
        yield steps


@pytest.mark.parametrize(("level", "scale"), [("O0", 1.0), ("O1", 65536.0), ("O2", 65536.0), ("O3", 1.0)])
def test_loss_and_scale(recorded, level, scale):
    model, optimizer = make(level)
    loss = loss_of(model)
    backward(loss, optimizer)
    optimizer.step()
    (step,) = recorded
    (after,) = step.scales
    assert (step.step, step.loss, after.scale, step.skipped) == (1, loss.item(), scale, False)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("delay", [False, True])
def test_blocks_accumulate_until_the_step(recorded, level, delay):
    model, optimizer = make(level)
    losses = [loss_of(model, 0.5), loss_of(model, 2.0)]
    backward(losses[0], optimizer, delay_unscale=delay)
    backward(losses[1], optimizer)
    optimizer.step()
    (step,) = recorded
    assert step.losses == [loss.item() for loss in losses]
    assert step.loss == sum(step.losses)


def test_an_overflow_is_a_skipped_step(recorded, capsys):
    model, optimizer = make("O2")
    for factor in (1.0, float("inf"), 1.0):
        backward(loss_of(model, factor), optimizer)
        optimizer.step()
    assert [step.skipped for step in recorded] == [False, True, False]
    assert [step.scales[0].scale for step in recorded] == [65536.0, 32768.0, 32768.0]
    assert capsys.readouterr().out.count("Gradient overflow") == 1


def test_a_skip_that_only_the_device_knows_of_is_asked_for(recorded):
    model, optimizer = make("O1", fused=True)
    backward(loss_of(model, float("inf")), optimizer)
    optimizer.step()
    assert recorded[0].skipped is True


def test_each_step_has_the_losses_of_its_optimizer(recorded):
    models = [torch.nn.Linear(4, 3) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models, optimizers = amp.initialize(models, optimizers, opt_level="O1", num_losses=2, verbosity=0)
    for _ in range(2):
        for index in (1, 0):
            backward(loss_of(models[index], 10.0**index), optimizers[index], loss_id=index)
            optimizers[index].step()
    assert [[one.loss_id for one in step.scales] for step in recorded] == [[1], [0], [1], [0]]
    assert recorded[0].loss > 2 * recorded[1].loss


def test_a_block_of_two_optimizers_counts_for_both(recorded):
    models = [torch.nn.Linear(4, 3) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models, optimizers = amp.initialize(models, optimizers, opt_level="O1", verbosity=0)
    backward(loss_of(models[0]) + loss_of(models[1]), optimizers)
    for optimizer in optimizers:
        optimizer.step()
    assert recorded[0].loss == recorded[1].loss


def test_a_step_without_a_block_has_no_loss(recorded):
    model, optimizer = make("O0")
    loss_of(model).backward()
    optimizer.step()
    assert (recorded[0].losses, recorded[0].loss, recorded[0].scales) == ([], None, [])


def test_losses_with_a_shape(recorded):
    model, optimizer = make("O1", model=torch.nn.EmbeddingBag(5, 3, sparse=True, mode="sum"))
    loss = model(torch.tensor([[1, 1]])).float()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.sum().backward()
    optimizer.step()
    assert recorded[0].loss == pytest.approx(loss.mean().item())


def test_a_step_with_a_closure_is_recorded(recorded):
    model, optimizer = make("O2")

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        backward(loss, optimizer)
        return loss

    loss = optimizer.step(closure)
    assert recorded[0].loss == loss.item()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_recording_changes_no_bit(level):
    def train():
        model, optimizer = make(level, torch.optim.Adam, eps=1e-3)
        for step in range(3):
            optimizer.zero_grad()
            backward(loss_of(model, float("inf") if step == 1 and level in ("O1", "O2") else 1.0), optimizer)
            optimizer.step()
        noise = torch.rand(3)
        weights = [p.detach().clone() for p in amp.master_params(optimizer)]
        reset()
        return [*weights, noise]

    alone = train()
    with observing(Recorder(lambda step: None, losses=True)):
        watched = train()
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))


def test_an_exception_of_the_listener_ends_the_script():
    """The step was made."""
    model, optimizer = make("O2")

    def stop(step):
        raise SystemExit(0)

    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    backward(loss_of(model), optimizer)
    with observing(Recorder(stop, losses=True)), pytest.raises(SystemExit):
        optimizer.step()
    after = list(amp.master_params(optimizer))
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(p, m.half()) for p, m in zip(model.parameters(), after, strict=True))
