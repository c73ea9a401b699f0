"""``torch.compile`` of a training step: one graph of forward and loss, and the same numbers as eager code."""

import copy

import pytest
import torch
import torch.nn.functional as F
from seeded import seeded

from ampcompat import _torch, amp

pytestmark = [pytest.mark.device, pytest.mark.torch]

LEVELS = ["O0", "O1", "O2", "O3"]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def data(at):
    generator = seeded(at)
    return torch.randn(4, 8, generator=generator), torch.randint(0, 4, (4,), generator=generator)


@pytest.fixture
def plain():
    torch.manual_seed(0)
    yield Net()
    torch._dynamo.reset()


def started(plain, level):
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def weights(optimizer):
    return [p.detach().clone() for p in amp.master_params(optimizer)]


@pytest.mark.rotate(2)
@pytest.mark.parametrize("level", LEVELS)
def test_steps_with_a_compiled_loss_are_the_eager_ones(plain, level):
    """Forward and loss are one graph; ``backward()`` is a graph break of torch's own."""

    def trained(compiled):
        model, optimizer = started(plain, level)

        def loss_of(x, y):
            return F.cross_entropy(model(x), y)

        if compiled:
            loss_of = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
        for at in range(6):
            with amp.scale_loss(loss_of(*data(at)), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(optimizer)

    for ours, theirs in zip(trained(True), trained(False), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(
    _torch.TORCH.release < (2, 5), reason="torch 2.4 compiles no whole step, and rounds plain torch's otherwise too"
)
@pytest.mark.filterwarnings("ignore")  # dynamo warns of what it leaves to Python, torch's own code included
@pytest.mark.parametrize("level", [at if at == "O2" else pytest.param(at, marks=pytest.mark.slow) for at in LEVELS])
def test_a_compiled_training_step_is_the_eager_one(plain, level):
    def trained(compiled):
        model, optimizer = started(plain, level)

        def step(x, y):
            with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()

        if compiled:
            step = torch.compile(step, backend="aot_eager")
        for at in range(6):
            step(*data(at))
        return weights(optimizer)

    for ours, theirs in zip(trained(True), trained(False), strict=True):
        assert torch.equal(ours, theirs)


def counted(step, steps=5):
    """Graphs and graph breaks after the second step and after the last, of ``step`` compiled whole."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled, found = torch.compile(step, backend="eager"), []  # dynamo counts, whatever compiles its graphs
    for at in range(steps):
        compiled(*data(at))
        found.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    return found[1], found[-1]


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
}


@pytest.mark.skipif(_torch.TORCH.release < (2, 5), reason="torch 2.4 compiles no whole step")
@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.cover(1)
@pytest.mark.parametrize("level", ["O4", "O5"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_compiled_step_has_no_extra_graph_breaks(plain, make, level):
    """A whole step under amp breaks no more often than one under native autocast, and is compiled once."""
    model = copy.deepcopy(plain)
    optimizer = OPTIMIZERS[make](model.parameters())

    def native(x, y):
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def under_amp(x, y):
        with amp.scale_loss(F.cross_entropy(model(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    _, (_, allowed) = counted(native)
    model = copy.deepcopy(plain)
    model, optimizer = amp.initialize(model, OPTIMIZERS[make](model.parameters()), opt_level=level, verbosity=0)
    after_two, after_all = counted(under_amp)
    assert after_all == after_two, "compiled again after the second step"
    assert after_all[1] <= allowed
