"""``torch.jit.trace`` of an initialized model: masters are looked at beside the trace, not in it."""

import pytest
import torch
from amp_training import assert_masters_agree, masters, same
from seeded import seeded
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from ampcompat import amp

LEVELS = ["O0", "O1", "O2", "O3", "O5"]
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning"),
]


def start(level):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def step(run, optimizer, seed=0):
    generator = seeded(seed)
    x, y = torch.randn(4, 6, generator=generator), torch.randint(0, 5, (4,), generator=generator)
    loss = nn.functional.cross_entropy(run(x).float(), y)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


BEFORE = {
    "fresh": lambda model, optimizer: None,
    "trained": lambda model, optimizer: [step(model, optimizer, at) for at in range(10)],
    "saved": lambda model, optimizer: [step(model, optimizer), model.state_dict()],
    "loaded": lambda model, optimizer: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}),
    "moved": lambda model, optimizer: [p.detach().mul_(0.5) for p in model.parameters()],
}


@pytest.mark.rotate(2)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("level", LEVELS)
def test_a_model_is_traced_at_any_time(level, before):
    model, optimizer = start(level)
    BEFORE[before](model, optimizer)
    model.eval()
    x = torch.randn(4, 6)
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model(x))
    assert "aten::equal" not in {node.kind() for node in traced.inlined_graph.nodes()}
    if level in ("O2", "O5"):
        assert_masters_agree(model)


@pytest.mark.parametrize("level", LEVELS)
def test_the_traced_model_trains_as_the_model(level):
    ends = []
    for trace in (True, False):
        model, optimizer = start(level)
        x = torch.randn(4, 6, generator=seeded(9))
        run = torch.jit.trace(model, x, strict=False, check_trace=False) if trace else model
        if not trace:
            model(x)  # the trace has moved the statistics of the batch norm once
        for at in range(4):
            step(run, optimizer, at)
        ends.append(masters(optimizer))
    assert same(*ends)


@pytest.mark.parametrize("level", LEVELS)
def test_fx_traces_a_fresh_model(level):
    model, _ = start(level)
    model.eval()
    x = torch.randn(4, 6)
    graph = make_fx(model)(x)
    assert torch.equal(graph(x), model(x))
