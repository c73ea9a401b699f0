"""What observers of amp are told of blocks and steps, and that observing changes no bit."""

import types

import pytest
import torch
from internals import reset

from ampcompat import amp
from ampcompat.amp.observers import notify, observers, observing


class Watcher:
    def __init__(self):
        self.events = []

    def on_scale_loss(self, loss, scaler, optimizers):
        self.events.append(("loss", loss.item(), scaler.loss_scale(), len(optimizers)))

    def on_gradients(self, scaler, optimizers):
        grads = [p.grad for o in optimizers for p in amp.master_params(o)]
        self.events.append(("gradients", grads[0].dtype, grads[0].isfinite().all().item()))

    def on_step(self, optimizer, skipped):
        self.events.append(("step", skipped))


def train(level, steps=2, poison=(), **kwargs):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **kwargs)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).float().square().mean() * (float("inf") if step in poison else 1.0)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_every_block_and_step_is_told(level):
    watcher = Watcher()
    with observing(watcher):
        train(level)
    assert [event[0] for event in watcher.events] == ["loss", "gradients", "step"] * 2
    assert [event[1] for event in watcher.events if event[0] == "step"] == [False, False]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_is_observed(level):
    """Observers see its gradients unscaled and not finite, and its step as skipped."""
    watcher = Watcher()
    with observing(watcher):
        train(level, poison={1})
    assert watcher.events[4] == ("gradients", torch.float32, False)
    assert watcher.events[5] == ("step", True)


def test_a_step_with_a_closure_is_told_once():
    watcher = Watcher()
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)

    def closure():
        loss = model(torch.ones(2, 4)).sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        return loss

    with observing(watcher):
        optimizer.step(closure)
    assert [event[0] for event in watcher.events] == ["loss", "gradients", "step"]


def test_a_step_that_only_the_device_knows_of_is_told_as_none():
    watcher = Watcher()
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with observing(watcher):
        with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert watcher.events[-1] == ("step", None)


def test_a_delayed_block_notifies_as_others_do():
    watcher = Watcher()
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with (
        observing(watcher),
        amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer, delay_unscale=True) as scaled_loss,
    ):
        scaled_loss.backward()
    assert [event[0] for event in watcher.events] == ["loss", "gradients"]


@pytest.mark.parametrize("has_failed", [False, True])
def test_the_end_of_a_block_is_told(has_failed):
    heard = []
    watcher = types.SimpleNamespace(
        on_scaled_loss=lambda block, scaled: heard.append(block),
        on_block_end=lambda block, has_failed: heard.append(has_failed),
        on_failure=heard.append,
    )
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    error = ZeroDivisionError() if has_failed else None
    with observing(watcher):
        block = amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer)
        block.__enter__().backward()
        block.__exit__(type(error) if error else None, error)
    assert heard == ([block, True, error] if has_failed else [block, False])


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_watching_changes_no_bit(level):
    unwatched = train(level)
    reset()
    with observing(Watcher()):
        watched = train(level)
    assert all(torch.equal(a, b) for a, b in zip(unwatched, watched, strict=True))


def test_observers_may_lack_methods():
    """They are removed when their block ends."""
    with observing(object()):
        notify("on_step", None, False)
    assert observers() == []


def test_a_reset_forgets_observers():
    observers().append(Watcher())
    reset()
    assert observers() == []


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_callback_that_raises_comes_after_the_step(level):
    """The step was made and used its gradients, so that a loop which catches the exception trains on unchanged."""
    weights = train(level, steps=3)

    class Raises:
        def on_step(self, optimizer, skipped):
            raise ZeroDivisionError

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with observing(Raises()):
        for _ in range(3):
            optimizer.zero_grad()
            with amp.scale_loss(model(torch.ones(2, 4)).float().square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
    assert all(map(torch.equal, model.parameters(), weights))
    optimizer.step()  # of a step that is over, nothing is left
    if level == "O2":
        assert all(map(torch.equal, model.parameters(), weights))
