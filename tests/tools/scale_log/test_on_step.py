"""``amp.on_step``: the records that a callback gets, and when it ends."""

import pytest
import torch
from internals import observers, reset
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompat import _torch, amp
from ampcompat.amp.scaler import LossScaler
from ampcompat.tools.scale_log import StepRecord

INF = float("inf")


def build(level="O1", num_losses=1, fused=False, **kwargs):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    return amp.initialize(model, optimizer, opt_level=level, num_losses=num_losses, verbosity=0, **kwargs)


def block(model, optimizer, loss_id=0, factor=1.0, **kwargs):
    loss = model(torch.ones(2, 4)).float().square().mean() * factor
    with amp.scale_loss(loss, optimizer, loss_id=loss_id, **kwargs) as scaled:
        scaled.backward()


def train(model, optimizer, factors):
    for factor in factors:
        optimizer.zero_grad()
        block(model, optimizer, factor=factor)
        optimizer.step()


def trains(*factors):
    return lambda model, optimizer: train(model, optimizer, factors)


def grows(model, optimizer):
    amp._amp_state.loss_scalers[0]._scale_seq_len = 2
    train(model, optimizer, [1.0] * 4)


def overflows_in_one_of_two_losses(model, optimizer):
    block(model, optimizer, loss_id=2)
    block(model, optimizer, loss_id=0, factor=INF)
    optimizer.step()


def accumulates(model, optimizer):
    block(model, optimizer)
    block(model, optimizer)
    optimizer.step()


def leaves_the_scale_to_the_next_block(model, optimizer):
    block(model, optimizer, delay_unscale=True)
    optimizer.step()


def steps_with_a_closure(model, optimizer):
    optimizer.step(lambda: block(model, optimizer))


def puts_a_scaler_there_by_hand(model, optimizer):
    amp._amp_state.loss_scalers[:] = [LossScaler(4.0)]
    train(model, optimizer, [1.0])


AN_OVERFLOW = [(1, 0, 2.0**16, False, 1), (2, 0, 2.0**15, True, 0), (3, 0, 2.0**15, False, 1)]
#: What is initialized, what a script does, and the records: step, loss_id, scale for the next loss, skipped, clean.
RECORDS = {
    "O1": ({"level": "O1"}, trains(1.0, INF, 1.0), AN_OVERFLOW),
    "O2": ({"level": "O2"}, trains(1.0, INF, 1.0), AN_OVERFLOW),
    "O0": ({"level": "O0"}, trains(1.0, 1.0), [(1, 0, 1.0, False, 0), (2, 0, 1.0, False, 0)]),
    "O3": ({"level": "O3"}, trains(1.0, 1.0), [(1, 0, 1.0, False, 0), (2, 0, 1.0, False, 0)]),
    "O4": ({"level": "O4"}, trains(1.0, 1.0), [(1, 0, 1.0, False, 0), (2, 0, 1.0, False, 0)]),
    "a static scale": ({"loss_scale": 128.0}, trains(1.0, 1.0), [(1, 0, 128.0, False, 1), (2, 0, 128.0, False, 2)]),
    "a growth is in the record of its step": (
        {},
        grows,
        [(1, 0, 2.0**16, False, 1), (2, 0, 2.0**17, False, 0), (3, 0, 2.0**17, False, 1), (4, 0, 2.0**18, False, 0)],
    ),
    "each loss scaler of a step has one": (
        {"num_losses": 3},
        overflows_in_one_of_two_losses,
        [(1, 0, 2.0**15, True, 0), (1, 2, 2.0**16, True, 1)],
    ),
    "accumulated passes have one": ({}, accumulates, [(1, 0, 2.0**16, False, 2)]),
    "a scale that the next block moves": ({}, leaves_the_scale_to_the_next_block, [(1, 0, 2.0**16, False, 0)]),
    "a closure": ({"level": "O2"}, steps_with_a_closure, [(1, 0, 2.0**16, False, 1)]),
    "a scaler put there by hand": ({}, puts_a_scaler_there_by_hand, [(1, 0, 4.0, False, 1)]),
}


@pytest.mark.parametrize("name", RECORDS)
def test_the_records_of_a_script(name):
    options, script, records = RECORDS[name]
    seen = []
    amp.on_step(seen.append)
    script(*build(**options))
    assert seen == [StepRecord(*record) for record in records]
    last = seen[-1]
    assert amp.state_dict()[f"loss_scaler{last.loss_id}"]["loss_scale"] == last.scale


def test_steps_are_counted_over_all_optimizers():
    """A step without a block is counted and gives no record."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    models, optimizers = amp.initialize(models, optimizers, opt_level="O1", num_losses=2, verbosity=0)
    seen = []
    amp.on_step(seen.append)
    block(models[0], optimizers[0])
    optimizers[0].step()
    optimizers[0].zero_grad()
    optimizers[0].step()
    block(models[1], optimizers[1], loss_id=1)
    optimizers[1].step()
    assert [(one.step, one.loss_id) for one in seen] == [(1, 0), (3, 1)]


def test_a_callback_added_later_counts_as_the_first_one_does():
    first, second = [], []
    amp.on_step(first.append)
    model, optimizer = build()
    train(model, optimizer, [1.0, INF])
    amp.on_step(second.append)
    train(model, optimizer, [1.0])
    assert [one.step for one in first] == [1, 2, 3]
    assert second == first[2:]


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_steps_made_before_the_first_callback_count(level):
    model, optimizer = build(level)
    train(model, optimizer, [1.0, 1.0])
    seen = []
    amp.on_step(seen.append)
    train(model, optimizer, [1.0])
    assert [one.step for one in seen] == [3]


def test_each_call_of_initialize_counts_its_own_steps():
    seen = []
    amp.on_step(seen.append)
    train(*build(), [1.0, 1.0])
    train(*build(), [1.0])
    assert [one.step for one in seen] == [1, 2, 1]


# -- ends ----------------------------------------------------------------------------------------------------------
def test_remove_ends_one_callback_and_leaves_the_others():
    model, optimizer = build()
    first, second = [], []
    handle = amp.on_step(first.append)
    amp.on_step(second.append)
    train(model, optimizer, [1.0])
    handle.remove()
    handle.remove()
    train(model, optimizer, [1.0])
    assert (len(first), len(second)) == (1, 2)


def test_the_handle_is_a_context_manager():
    model, optimizer = build()
    seen = []
    with amp.on_step(seen.append):
        train(model, optimizer, [1.0])
    train(model, optimizer, [1.0])
    assert len(seen) == 1
    assert not observers()


def test_a_reset_ends_all():
    amp.on_step(print)
    reset()
    assert not observers()


def test_step_raises_what_a_callback_raises():
    """The step was made."""

    def fail(record):
        raise KeyError(record.step)

    model, optimizer = build()
    amp.on_step(fail)
    before = model.weight.detach().clone()
    with pytest.raises(KeyError, match="1"):
        train(model, optimizer, [1.0])
    assert not torch.equal(model.weight, before)


# -- host syncs ----------------------------------------------------------------------------------------------------
class Reads(TorchDispatchMode):
    """Counts the ops that wait for a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("fused", [False, True])
def test_no_host_sync_is_added_and_no_bit_changes(level, fused):
    counts, weights = [], []
    for watched in (False, True):
        reset()
        model, optimizer = build(level, fused=fused)
        if watched:
            amp.on_step(lambda record: None)
        with Reads() as reads:
            train(model, optimizer, [1.0, 1.0])
        counts.append(reads.count)
        weights.append(model.weight.detach().clone())
    assert counts[0] == counts[1]
    assert torch.equal(*weights)


class SlowCopy(_torch.HostCopy):
    """A copy that arrives when the test says so."""

    there = False
    waited = 0

    def arrived(self):
        return SlowCopy.there

    def read(self):
        SlowCopy.waited += not SlowCopy.there
        return super().read()


def test_late_numbers_come_with_a_later_step(monkeypatch):
    """Numbers that have not arrived on the host are handed over in order, without waiting for the device."""
    monkeypatch.setattr(_torch, "HostCopy", SlowCopy)
    monkeypatch.setattr(SlowCopy, "there", False)
    monkeypatch.setattr(SlowCopy, "waited", 0)
    model, optimizer = build(fused=True)  # it skips on the device: the host does not know
    seen = []
    handle = amp.on_step(seen.append)
    train(model, optimizer, [1.0, INF])
    assert (seen, SlowCopy.waited) == ([], 0)
    SlowCopy.there = True
    train(model, optimizer, [1.0])
    assert [(one.step, one.skipped, one.scale) for one in seen] == [
        (1, False, 2.0**16),
        (2, True, 2.0**15),
        (3, False, 2.0**15),
    ]
    SlowCopy.there = False
    train(model, optimizer, [INF])
    assert len(seen) == 3
    handle.remove()  # waits
    assert (seen[3].skipped, seen[3].scale) == (True, 2.0**14)


def test_another_observer_may_have_asked_the_device():
    """As explain does after each step: then the host knows."""
    amp.explain_overflows()
    seen = []
    amp.on_step(seen.append)
    train(*build(fused=True), [1.0, INF])
    assert [one.skipped for one in seen] == [False, True]


@pytest.mark.parametrize("wrong", [None, 3, "wandb", object()])
def test_what_cannot_be_called_is_refused(wrong):
    with pytest.raises(TypeError, match=r"amp.on_step got \w+ - it takes a function of one record"):
        amp.on_step(wrong)
    assert not observers()
