"""Models under amp on a CUDA device: moving there, a torch that cannot autocast it, replicas, resuming."""

import copy

import pytest
import torch
from seeded import seeded
from torch import nn

from ampcompat import amp
from ampcompat._torch import dispatcher

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def train(model, optimizer, steps, first=0):
    for at in range(first, first + steps):
        x = torch.randn(8, 8, generator=seeded(at)).to("cuda")
        optimizer.zero_grad()
        with amp.scale_loss(model(x).float().pow(2).mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def test_masters_follow_a_move_of_the_model():
    """The model moves to the GPU after ``initialize``."""
    model = net().cpu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    exact = [p.detach().clone() for p in amp.master_params(optimizer)]
    model.to("cuda")
    with pytest.warns(UserWarning, match="The model moved from cpu to cuda:0"):
        model(torch.randn(2, 8, device="cuda"))
    for master, want in zip(amp.master_params(optimizer), exact, strict=True):
        assert master.device.type == "cuda"
        assert torch.equal(master.cpu(), want)
    train(model, optimizer, 2)


@pytest.fixture
def moves_replace_parameters():
    """Have ``model.to`` put other parameters in the places of the model's, as it must on some devices."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.usefixtures("moves_replace_parameters")
def test_a_move_that_replaces_the_parameters_is_refused_at_a_save():
    model = net().cpu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    model.to("cuda")
    with pytest.raises(RuntimeError, match="move the model before the optimizer is made"):
        model.state_dict()


def test_a_device_that_cannot_autocast_is_named(monkeypatch):
    """At O1 it trains in float32; at O2, where the model is half, nothing changes."""
    monkeypatch.delitem(dispatcher._AUTOCAST_KEYS, "cuda")
    model = net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="'cuda', which this torch cannot autocast .* use opt_level='O2'"):
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert model(torch.ones(2, 8, device="cuda")).dtype == torch.float32
    train(model, optimizer, 2)
    model = net().cuda()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    assert model[0](torch.ones(2, 8, device="cuda", dtype=torch.float16)).dtype == torch.float16
    train(model, optimizer, 2)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_resume_with_a_fused_optimizer_is_bitwise(level):
    def made():
        model = net().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        return amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    model, optimizer = made()
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    train(model, optimizer, 3, first=3)
    want = [p.detach().clone() for p in amp.master_params(optimizer)]
    model, optimizer = made()
    for target, part in zip((model, optimizer, amp), saved, strict=True):
        target.load_state_dict(part)
    train(model, optimizer, 3, first=3)
    assert all(torch.equal(a, b) for a, b in zip(amp.master_params(optimizer), want, strict=True))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_data_parallel_after_initialize(level):
    model = net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(8, 8, device="cuda")
    wrapped = nn.DataParallel(model)
    assert torch.equal(wrapped(x), model(x))
    train(wrapped, optimizer, 2)
