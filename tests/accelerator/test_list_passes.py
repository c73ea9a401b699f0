"""Passes over lists of tensors on a device: none goes from tensor to tensor, and copies in float32 come in chunks."""

import pytest
import torch
from emulated_cuda import Log
from torch import nn

from ampcompat import amp, optimizers
from ampcompat._torch import chunks

pytestmark = [pytest.mark.device, pytest.mark.skipif(torch.version.cuda != "emulated", reason="needs --emulate-cuda")]

MAKERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    **{
        name: lambda params, name=name: getattr(optimizers, name)(params, lr=0.01)
        for name in ("FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad")
    },
}


class Training:
    """Blocks and steps of a model with norms and convolutions."""

    def __init__(self, level, make=MAKERS["SGD"], **options):
        torch.manual_seed(0)
        convolutions = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        model = nn.Sequential(*convolutions, nn.Flatten(), nn.LayerNorm(32), nn.Linear(32, 4)).cuda()
        self.model, self.optimizer = amp.initialize(
            model, make(model.parameters()), opt_level=level, verbosity=0, **options
        )
        self.x = torch.randn(4, 4, 2, 2, device="cuda")

    def backward(self):
        with amp.scale_loss(self.model(self.x).float().square().mean(), self.optimizer) as scaled:
            scaled.backward()

    def accumulated_step(self):
        self.backward()
        self.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()


def scales_each(entry):
    """Whether each tensor has a factor of its own, as LAMB's and NovoGrad's: torch takes such lists one by one."""
    return len(entry.numels) == 2 and set(entry.numels[1]) == {1}


@pytest.mark.parametrize("options", [{}, {"loss_scale": 1.0}], ids=["scaled", "at a scale of one"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("make", MAKERS)
def test_no_list_is_taken_tensor_by_tensor(make, level, options):
    training = Training(level, MAKERS[make], **options)
    with Log() as log:
        for _ in range(3):
            training.accumulated_step()
    slow = [entry for entry in log.of("kernel") if entry.is_slow and not scales_each(entry)]
    assert not slow


@pytest.mark.parametrize("scale", ["dynamic", 128.0])
@pytest.mark.parametrize("make", MAKERS)
def test_a_scale_in_bfloat16_without_masters(make, scale):
    """CUDA's kernel that unscales takes no bfloat16, and the emulated device refuses it: float32 copies go through."""
    training = Training("O5", MAKERS[make], master_weights=False, loss_scale=scale)
    with Log() as log:
        for _ in range(3):
            training.accumulated_step()
    slow = [entry for entry in log.of("kernel") if entry.is_slow and not scales_each(entry)]
    assert not slow
    assert any("_amp_foreach" in entry.name for entry in log.of("kernel"))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_weights_in_another_layout_than_their_masters_have_lists_of_their_own(level):
    training = Training(level)
    training.model.to(memory_format=torch.channels_last)
    training.x = training.x.to(memory_format=torch.channels_last)
    with Log() as log:
        for _ in range(3):
            training.accumulated_step()
    slow = [entry for entry in log.of("kernel") if entry.is_slow]
    assert {numel for entry in slow for numel in entry.numels[0]} <= {8 * 4 * 3 * 3, 8 * 8}


@pytest.mark.parametrize("options", [{}, {"loss_scale": 1.0}], ids=["scaled", "at a scale of one"])
def test_gradients_are_added_in_chunks(options, monkeypatch):
    """What a block converts to float32 at once does not grow with the model."""
    counts = []
    for chunk in (64, 2**24):
        monkeypatch.setattr(chunks, "CHUNK", chunk)
        training = Training("O2", **options)
        training.backward()
        with Log() as log:
            training.backward()
        counts.append(sum(entry.name == "aten::_foreach_add_.List" for entry in log.of("kernel")))
    assert counts[0] > counts[1] == 2  # of masters, and of parameters that stay float32
