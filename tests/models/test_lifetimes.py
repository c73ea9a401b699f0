"""Nothing of ampcompat keeps models and optimizers alive, and nothing of it grows."""

import copy
import gc
import itertools
import sys
import weakref

import pytest
import torch
from internals import end_watch, reset, sizes_of_state, undos
from nets import LEVELS, Net, Routed, batch, made

from ampcompat import amp

pytestmark = pytest.mark.torch


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        with amp.scale_loss(model(batch(step % 3)).float().pow(2).mean(), optimizer) as scaled:
            scaled.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", [Net, Routed])
@pytest.mark.parametrize("level", LEVELS)
def test_dropping_model_and_optimizer_frees_them(level, kind):
    model, optimizer = made(kind, level)
    train(model, optimizer, 2)
    ema = copy.deepcopy(model)
    model.state_dict(), ema.state_dict()
    ema(batch())
    watched = [
        weakref.ref(thing)
        for thing in (model, ema, optimizer, model.head, model.head.weight, next(amp.master_params(optimizer)))
    ]
    del model, optimizer, ema
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_optimizer_may_die_first(level):
    model, optimizer = made(level=level)
    train(model, optimizer, 1)
    gone = weakref.ref(optimizer)
    want = {k: v.clone() for k, v in model.state_dict().items()}
    del optimizer
    gc.collect()
    assert gone() is None
    assert all(torch.equal(v, want[k]) for k, v in model.state_dict().items())
    model(batch())


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_model_may_die_first(level):
    model, optimizer = made(level=level)
    train(model, optimizer, 1)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    for param in amp.master_params(optimizer):
        param.grad = torch.ones_like(param)
    optimizer.step()


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_steps_do_not_grow_memory(level):
    model, optimizer = made(level=level)
    end_watch()
    train(model, optimizer, 10)
    tensors, held, blocks = live_tensors(), sizes_of_state(), [sys.getallocatedblocks()]
    for _ in range(6):
        train(model, optimizer, 60)
        assert live_tensors() == tensors
        assert sizes_of_state() == held
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    # A leak of one small object a step would show as 60 each time; the interpreter's own caches fill up.
    assert min(after - before for before, after in itertools.pairwise(blocks)) < 45


def test_evaluation_checkpoints_and_averages_do_not_grow_memory():
    model, optimizer = made(level="O2")
    ema = copy.deepcopy(model)

    def rounds(count):
        for _ in range(count):
            train(model, optimizer, 1)
            with torch.no_grad():
                for average, value in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
                    average.copy_(average * 0.9 + value * 0.1)
                ema(batch())
            model.load_state_dict(model.state_dict())

    end_watch()
    rounds(5)
    tensors, held = live_tensors(), sizes_of_state()
    rounds(50)
    assert live_tensors() == tensors
    assert sizes_of_state() == held


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_thirty_initializes_leave_as_much_as_one(level):
    def left():
        model, optimizer = made(level=level)
        train(model, optimizer, 2)
        del model, optimizer
        gc.collect()
        return sizes_of_state()  # undos among them

    left()
    before = left()
    for _ in range(28):
        left()
    assert left() == before


@pytest.mark.parametrize("end", ["disabled", "deactivated"])
def test_a_cycle_of_casts_leaves_no_undo_behind(end, torch_state):
    def cycle():
        model, optimizer = made(level="O1")
        if end == "disabled":
            amp.initialize(model, optimizer, enabled=False)
        else:
            amp._amp_state.handle._deactivate()
        assert not torch.is_autocast_enabled("cpu")

    before = torch_state()
    cycle()
    count = undos()
    for _ in range(3):
        cycle()
    assert undos() == count
    made(level="O1")
    reset()
    assert torch_state() == before


def test_initialize_again_and_again_on_the_same_objects():
    model, optimizer = made(level="O2")
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train(model, optimizer, 1)
    hooks = len(model.head._state_dict_hooks)
    for _ in range(50):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert len(model.head._state_dict_hooks) == hooks
    wrapped, depth = optimizer.step, 0
    while hasattr(wrapped, "__wrapped__"):
        wrapped, depth = wrapped.__wrapped__, depth + 1
    assert depth <= 3
