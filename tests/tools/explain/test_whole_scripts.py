"""Loops as scripts have them: what lies outside of the model is named, and healthy ones are left alone."""

import pytest
import torch
import torch.nn.functional as F
from amp_training import make_step
from explain_kit import explain, told
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ampcompat import amp


def sgd(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr=lr)


@pytest.mark.filterwarnings("ignore:SGD.step\\(\\) with gradients that a scale_loss block has left:UserWarning")
def test_an_optimizer_that_amp_was_not_given(capsys):
    torch.manual_seed(9)
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32))
    critic = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    of_generator, of_critic = sgd(generator, 1e-2), sgd(critic, 1e-2)
    [generator, critic], of_generator = amp.initialize([generator, critic], of_generator, opt_level="O1", verbosity=0)
    explain()
    for _ in range(6):
        real, fake = torch.randn(32, 32) + 1, generator(torch.randn(32, 8))
        of_critic.zero_grad()
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        with amp.scale_loss(loss, of_generator) as scaled:
            scaled.backward()
        of_critic.step()
        of_generator.zero_grad()
        make_step(of_generator, F.softplus(-critic(fake)).mean())
    seen = told(capsys)
    assert seen.first["warned"] == ["steps of an optimizer that amp.initialize was not given"]
    assert seen.last["op"] == "parameter 0.weight of Sequential"
    assert seen.counts["spoiled_at"] == 0  # no optimizer of amp's holds it
    assert max(seen.counts["told"].values()) <= 6


def test_an_average_of_weights_that_divides_by_0(capsys):
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    model, optimizer = amp.initialize(model, sgd(model), opt_level="O2", verbosity=0)
    explain()
    for step in range(8):
        optimizer.zero_grad()
        make_step(optimizer, F.cross_entropy(model(torch.randn(32, 10)), torch.arange(32) % 3))
        if step == 4:
            correction = torch.tensor(1 - 0.99**0)
            model.load_state_dict({name: value / correction for name, value in model.state_dict().items()})
    seen = told(capsys)
    assert [(fault["step"], fault["op"]) for fault in seen.faults] == [(6, "parameter 0.weight of Sequential")]
    assert seen.first["inputs"][0]["not_finite"] == 320  # its master


def test_a_damaged_sample(capsys):
    torch.manual_seed(15)
    x = torch.randn(48, 3, 8, 8)
    x[20, 1, 4, 4] = float("nan")
    loader = DataLoader(TensorDataset(x, torch.arange(48) % 5), batch_size=16)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    model, optimizer = amp.initialize(model, sgd(model), opt_level="O1", verbosity=0)
    explain()
    for _ in range(2):
        for batch, target in loader:
            optimizer.zero_grad()
            make_step(optimizer, F.cross_entropy(model(batch), target))
    seen = told(capsys)
    assert [(fault["kind"], fault["out"]["rows"]) for fault in seen.faults[:1]] == [("input", [4])]
    assert [fault["out"]["rows"] for fault in seen.faults[1:]] in ([], [[4]], [[20]])  # by what makes a batch


class Classifier(nn.Module):
    """Masks by -inf and by the least number, and an infinity that where() takes away."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        h = self.embed(x)
        scores = self.query(h) @ self.key(h).transpose(1, 2)
        scores = scores.masked_fill(torch.ones(6, 6).triu(1) > 0, -torch.inf)
        h = scores.softmax(-1) @ h
        legal = torch.arange(20) > 0
        logits = self.out(h).masked_fill(~legal, torch.finfo(h.dtype).min)
        inverse = torch.where(x == 0, 0.0, 1 / x)
        return logits.float() * (1 + 1e-3 * inverse[..., None].clamp(max=1))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_healthy_transformer(capsys, level):
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    explain()
    for _ in range(12):
        for part in range(2):
            x = torch.randint(0, 20, (4, 6))
            loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten().clamp_min(1)) / 2
            with amp.scale_loss(loss, optimizer, delay_unscale=part == 0) as scaled:
                scaled.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    seen = told(capsys)
    assert (seen.faults, seen.unknown, seen.counts["at_end"]) == ([], [], [])


def test_a_healthy_pair_of_networks(capsys):
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    models, optimizers = amp.initialize(
        [generator, critic], [sgd(generator), sgd(critic)], opt_level="O1", num_losses=3, verbosity=0
    )
    explain()
    for _ in range(20):
        real, fake = torch.randn(16, 16), models[0](torch.randn(16, 8))
        optimizers[1].zero_grad()
        for loss_id, loss in enumerate((F.softplus(-models[1](real)), F.softplus(models[1](fake.detach())))):
            with amp.scale_loss(loss.mean(), optimizers[1], loss_id=loss_id) as scaled:
                scaled.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        make_step(optimizers[0], F.softplus(-models[1](fake)).mean(), loss_id=2)
    seen = told(capsys)
    assert (seen.faults, seen.unknown, seen.counts["at_end"]) == ([], [], [])
