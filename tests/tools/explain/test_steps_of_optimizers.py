"""What steps do to weights and to the optimizer's state, as facts."""

import pytest
import torch
from amp_training import make_step
from explain_kit import explain, told
from torch import nn

from ampcompat import amp


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(10, 4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.embeddings(x))


def total(y):
    return y.float().sum()


def train(make, level="O3", steps=2, model=None, batch=torch.tensor([1, 2]), loss=total):
    torch.manual_seed(0)
    model = model or Words()
    model, optimizer = amp.initialize(model, make(model.parameters()), opt_level=level, verbosity=0)
    explain()
    for _ in range(steps):
        optimizer.zero_grad()
        make_step(optimizer, loss(model(batch)))
    return model, optimizer


def adam(**options):
    return lambda params: torch.optim.Adam(params, **{"lr": 1e-3, **options})


def sgd(lr):
    return lambda params: torch.optim.SGD(params, lr=lr)


def test_adams_eps_at_o3(capsys):
    """The commonest failure of O3: rows without a gradient become 0 / 0."""
    train(adam())
    fault = told(capsys).first
    assert (fault["step"], fault["optimizer"], fault["parameter"]) == (1, "Adam", "embeddings.weight")
    assert (fault["out"]["not_finite"], fault["out"]["elements"], fault["out"]["dtype"]) == (32, 40, "float16")
    assert "eps=1e-08, which is 0 in float16" in fault["options"]
    assert fault["zeros"]["exp_avg_sq"] == 32
    assert fault["growth"] is None


@pytest.mark.parametrize(("level", "options"), [("O3", {"eps": 1e-4}), ("O2", {}), ("O0", {})])
def test_steps_that_lose_nothing(capsys, level, options):
    model, _ = train(adam(**options), level, loss=lambda y: y.float().sum() * 0.1)
    assert all(p.isfinite().all() for p in model.parameters())
    assert told(capsys).faults == []


LINEAR = {
    "an update that leaves float16": (sgd(6e4), torch.full((1, 2), 4.0), total, "weight"),
    "state that leaves float16": (adam(eps=1e-4), torch.ones(1, 2), lambda y: total(y) * 1e4, "exp_avg_sq"),
    "a learning rate of inf": (sgd(float("inf")), torch.ones(1, 2), total, "weight"),
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_lost(capsys, name):
    make, batch, loss, what = LINEAR[name]
    train(make, steps=1, model=nn.Linear(2, 2), batch=batch, loss=loss)
    fault = told(capsys).first
    assert (fault["what"], fault["parameter"], fault["out"]["not_finite"]) == (what, "weight", 4)
    assert ("lr=inf" in fault["options"]) == ("inf" in name)


def test_the_step_is_numbered_and_the_group_named(capsys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in model], lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    explain()
    for step in range(4):
        optimizer.param_groups[1]["lr"] = 6e4 if step == 2 else 0.0
        make_step(optimizer, model(torch.full((1, 2), 9.0)).float().sum())
        optimizer.zero_grad()
    (fault,) = told(capsys).faults
    assert (fault["step"], fault["group"], fault["parameter"][0]) == (3, 1, "1")


def test_a_master_beyond_float16_at_o2(capsys):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    train(sgd(4e5), "O2", 3, model, torch.ones(1, 2), lambda y: (y.float() + 1).pow(2).mean() / 4)
    (fault,) = told(capsys).faults  # the skipped steps that follow are its doing
    assert (fault["what"], fault["out"]["dtype"]) == ("half weight", "float16")


@pytest.mark.parametrize(("level", "rate"), [("O1", 1e38), ("O2", 1e6)])
def test_the_step_is_the_one_that_wrote_it_whenever_it_is_read(capsys, level, rate):
    """Row 3 is written by step 2, and read first in step 5, after an overflow of another kind."""

    class Boosted(Words):
        boost = 1e9

        def forward(self, x):
            return self.fc(self.embeddings(x) * self.boost)

    torch.manual_seed(0)
    model = Boosted()
    parts = [{"params": model.embeddings.parameters()}, {"params": model.fc.parameters()}]
    model, optimizer = amp.initialize(model, torch.optim.SGD(parts, lr=1e-3), opt_level=level, verbosity=0)
    explain()
    for step, word in enumerate((1, 3, 1, 1, 3), start=1):
        optimizer.param_groups[0]["lr"] = rate if step == 2 else 1e-3
        with amp.scale_loss(model(torch.tensor([word])).float().sum() * 1e-2, optimizer) as scaled:
            scaled.backward()
        if step == 2:
            for p in amp.master_params(optimizer):
                p.grad = p.grad.sign() * 10
        optimizer.step()
        optimizer.zero_grad()
        model.boost = 1.0
    overflow, written = told(capsys).faults
    assert overflow["step"] == 1
    assert (written["step"], written["parameter"], written["out"]["not_finite"]) == (2, "embeddings.weight", 4)


@pytest.mark.parametrize(("level", "fused"), [("O0", False), ("O1", True), ("O2", False), ("O3", False)])
def test_a_gradient_that_the_script_wrote_after_the_block(capsys, level, fused):
    """The block's own gradients were finite; with a fused optimizer only the device knows that the step was made."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused or None)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    explain()
    for step in (1, 2):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled:
            scaled.backward()
        if step == 2:
            next(iter(amp.master_params(optimizer))).grad[0, 1] = float("nan")
        optimizer.step()
    fault = told(capsys).last
    assert (fault["step"], fault["out"]["not_finite"]) == (2, 1)
    assert fault["beside"]["grad"] == 1


@pytest.mark.parametrize("read", [True, False])
def test_a_weight_that_no_step_wrote(capsys, read):
    """Whether the loss overflows for it or not, the next step is not to blame."""
    model, loss = nn.Linear(2, 2), lambda y: y.float().square().mean() * 0.01
    model, optimizer = train(sgd(0.1), "O1", 2, model, torch.ones(1, 2), loss)
    with torch.no_grad():
        model.bias[0] = float("inf")
    make_step(optimizer, loss(model(torch.ones(1, 2))[:, 0 if read else 1]))
    assert [fault["kind"] for fault in told(capsys).faults] == (["parameter"] if read else [])


def test_a_weight_that_was_known_to_be_lost_is_no_later_steps_fault(capsys):
    """The script has written it through ``data``, which no version tells, and not each batch reads it."""
    model = nn.Embedding(4, 2)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0, loss_scale="dynamic"
    )
    explain()
    for step in range(12):
        if step == 4:
            model.weight.data[0] = float("nan")
        optimizer.zero_grad()
        make_step(optimizer, model(torch.tensor([step % 2, 2])).sum() * 1e-2)
    seen = told(capsys)
    assert [fault["kind"] for fault in seen.faults] == ["parameter"]
    assert seen.counts["lost"] == {"loss": 4}


def test_a_fault_after_good_weights_were_loaded_is_told_too(capsys):
    """A script that goes back to its last checkpoint when the loss is NaN."""

    class Spoils(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if step == 1:
                return torch.log(y * 0)
            return torch.acos(y * 0 + 2) if step == 4 else y

    model = Spoils(2, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", verbosity=0)
    explain()
    good = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().mean()
        make_step(optimizer, loss)
        if not torch.isfinite(loss):
            model.load_state_dict(good)
    assert [fault["op"] for fault in told(capsys).faults] == ["log", "acos"]


def test_infinities_before_the_first_step_are_ignored(capsys):
    """A mask of ``-inf`` is a parameter of the model."""

    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.mask = nn.Parameter(torch.tensor([0.0, 0.0, float("-inf")]))

        def forward(self, x):
            return (super().forward(x) + self.mask).softmax(-1)[:, :2]

    train(sgd(0.1), "O1", 3, Masked(), torch.ones(1, 3), lambda y: y.square().sum() * 1e-3)
    assert told(capsys).faults == []


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_weights_that_were_never_stepped(capsys, level):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    train(sgd(0.1), level, 3, model, torch.ones(1, 2))
    (fault,) = told(capsys).faults
    assert (fault["kind"], fault["op"]) == ("parameter", "parameter weight of Linear")


def test_gradients_of_an_earlier_overflow(capsys):
    """The script never clears gradients: what the first overflow has left loses each later step."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-3), opt_level="O1", verbosity=0)
    explain()
    for step in range(10):
        x = torch.full((4, 8), 1e6 if step == 3 else 0.1)
        with amp.scale_loss(model(x).float().mean() * 1e-3, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert told(capsys).faults[1]["had_old_gradients"]
