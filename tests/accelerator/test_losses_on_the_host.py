"""A loss on the CPU has its scale there: flags of the device reach it before they are read."""

import pytest
import torch
from emulated_cuda import Log, late_copies
from torch import nn

from ampcompat import _torch, amp

pytestmark = [pytest.mark.device, pytest.mark.skipif(torch.version.cuda != "emulated", reason="needs --emulate-cuda")]

#: In which of the backward passes the loss overflows.
OVERFLOWS = (1, 3)


def trained(level, **block):
    """Weights and scale after steps of a model on the device, whose loss is moved to the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    x = torch.randn(4, 6).cuda()
    for number in range(6):
        loss = model(x).float().square().mean().cpu()
        with amp.scale_loss(loss * (float("inf") if number in OVERFLOWS else 1.0), optimizer, **block) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [param.detach().cpu() for param in amp.master_params(optimizer)]
    return amp._amp_state.loss_scalers[0].loss_scale(), weights


@pytest.fixture
def host_copies(monkeypatch):
    """The copies that were started with an event, which says when they have arrived."""
    made = []

    class Counted(_torch.HostCopy):
        def __init__(self, values):
            super().__init__(values)
            made.append(self)

    monkeypatch.setattr(_torch, "HostCopy", Counted)
    return made


def late(call):
    """What ``call`` returns where a copy to pinned memory holds NaN until its event says that it has come."""
    with late_copies(10**6):
        return call()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("block", "last_scale"),
    [({}, 2.0**14), ({"delay_unscale": True}, 2.0**16)],
)
def test_steps_are_those_of_copies_that_arrive_at_once(host_copies, level, block, last_scale):
    with Log() as log:
        scale, weights = trained(level, **block)
    assert scale == last_scale
    pinned = [entry for entry in log.of("copy") if entry.name == "device to host, pinned"]
    assert len(pinned) == len(host_copies)
    late_scale, late_weights = late(lambda: trained(level, **block))
    assert late_scale == scale
    assert all(map(torch.equal, late_weights, weights))


def scales_on_several_devices():
    """A scale on the device unscales a gradient on the CPU, in its graph too, and is copied to a loss there."""
    scaler = amp.scaler.LossScaler("dynamic", init_scale=4.0)
    scaler.copy_on(torch.device("cuda", 0))  # the scale is made there
    grads = [torch.full((2,), 8.0, device=device) for device in ("cpu", "cuda")]
    scaler.unscale_grads(grads)
    copied = scaler.copy_on(torch.device("cpu")).item()
    return copied, grads[0].tolist(), float(scaler.found_inf.flag())


def test_a_scale_on_the_device_is_there_before_the_cpu_reads_it():
    assert late(scales_on_several_devices) == (4.0, [2.0, 2.0], 0.0)


def test_flags_of_several_devices_are_there_before_the_cpu_reads_them():
    flags = [torch.zeros((), device="cpu"), torch.ones((), device="cuda")]
    assert late(lambda: _torch.any_of(flags).item()) == 1.0


def test_nothing_waits_for_a_copy_between_devices():
    flags = [torch.zeros((), device="cuda:0"), torch.ones((), device="cuda:1"), torch.ones((), device="cpu")]
    with Log() as log:
        _torch.any_of(flags)
    assert not log.syncs
