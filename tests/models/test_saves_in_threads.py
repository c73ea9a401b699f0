"""A checkpoint that another thread writes while the model trains: training does not notice, as in plain torch."""

import os
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from internals import copies_lock
from nets import MASTER_LEVELS
from seeded import seeded

from ampcompat import amp

STEPS = 40


@pytest.fixture(autouse=True)
def threads_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@contextmanager
def saving_in_a_thread(model):
    """Save ``model`` again and again in another thread; raise what fails there."""
    done = threading.Event()
    failures = []
    saved = []

    def save():
        try:
            while not done.is_set():
                saved.append({name: value.sum() for name, value in model.state_dict().items()})
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert not failures
    assert saved


class Net(torch.nn.Module):
    """Weights, a buffer in half, and a frozen layer, whose master the first save makes."""

    def __init__(self):
        super().__init__()
        generator = seeded(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(12))
        self.register_buffer("count", torch.zeros(16))
        for param in self.parameters():
            with torch.no_grad():
                param.copy_(torch.randn(param.shape, generator=generator) / 4)
        self.layers[0].requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


def as_it_is(model, optimizer):
    pass


def clips_weights(model, optimizer):
    for param in model.parameters():
        param.data.clamp_(-0.25, 0.25)


def decays_masters(model, optimizer):
    with torch.no_grad():
        for master in amp.master_params(optimizer):
            master.mul_(0.99)


def trained(level, writes, context):
    model = Net()
    optimizer = torch.optim.Adam((param for param in model.parameters() if param.requires_grad), lr=2.0**-7)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    x = torch.randn(4, 16, generator=seeded(1))
    with context(model):
        for _ in range(STEPS):
            with amp.scale_loss(model(x).float().pow(2).mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            writes(model, optimizer)
    return [param.detach().clone() for param in (*model.parameters(), *amp.master_params(optimizer))]


@contextmanager
def not_saving(model):
    yield


@pytest.mark.parametrize("writes", [as_it_is, clips_weights, decays_masters])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_training_does_not_notice(level, writes):
    want = trained(level, writes, not_saving)
    got = trained(level, writes, saving_in_a_thread)
    assert all(map(torch.equal, got, want))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_that_is_forked_during_a_save_does_not_wait_for_it():
    """A worker of a DataLoader goes on without the thread that was saving."""
    is_saving = threading.Event()
    is_forked = threading.Event()

    def save():
        with copies_lock:
            is_saving.set()
            is_forked.wait()

    thread = threading.Thread(target=save)
    thread.start()
    is_saving.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if copies_lock.acquire(timeout=5) else 1)
    is_forked.set()
    thread.join()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
