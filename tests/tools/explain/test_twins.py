"""What is computed in float32 beside the run: it is what float32 gives, and the run stays bitwise what it was."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampcompat.tools.explain.places import Places
from ampcompat.tools.explain.probe import Probe

BIG = torch.tensor([300.0, -2.0, 0.5, 400.0], dtype=torch.float16)


@pytest.fixture
def probe():
    places = Places([])
    with places, Probe(places) as probe:
        yield probe


@pytest.mark.on_cpu
@pytest.mark.parametrize(
    "then",
    [
        lambda y: y * 1e-3,
        lambda y: y.view(2, 2).t()[1:],
        lambda y: y[1:].mul_(3.0),
        lambda y: torch.cat([y, y]).sum(),
        lambda y: F.layer_norm(y, (4,)),
        lambda y: y.float().softmax(0),
        lambda y: y.clone().copy_(y.flip(0)),
    ],
)
def test_a_twin_is_what_float32_gives(probe, then):
    result = then(BIG * BIG)
    twin = probe.twins.of(result)
    with probe.paused():
        assert torch.equal(twin, then(BIG.float() * BIG.float()))


@pytest.mark.on_cpu
def test_ops_beyond_half_are_noted_until_the_value_is_small(probe):
    y = BIG * BIG
    z = y * 2.0
    (z * 1e-3).add(1.0)
    (event,) = probe.events
    assert [(one.op, one.takes, one.gives) for one in event.beyond] == [
        ("mul", 160000.0, 320000.0),
        ("mul", 320000.0, 320.0),
    ]
    with probe.paused():
        assert torch.isinf(z[0])


@pytest.mark.on_cpu
def test_what_a_float32_tensor_held_before_is_not_known(probe):
    total = torch.ones(4)
    total.add_((BIG * BIG).float())
    assert probe.twins.of(total) is None


@pytest.mark.on_cpu
def test_memory_that_is_used_again_has_no_twin(probe):
    y = BIG * BIG
    y.fill_(1.0)
    assert probe.twins.of(y) is None


@pytest.mark.on_cpu
def test_running_statistics_are_written_once(probe):
    """The schema of a batch norm does not say that it writes them."""
    norm, plain = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    for one in (norm, plain):
        nn.init.constant_(one.weight, 6e4)
    x = torch.randn(8, 4, dtype=torch.float16)
    assert torch.isinf(norm(x)).any()
    with probe.paused():
        plain(x)
    assert probe.events
    assert torch.equal(norm.running_var, plain.running_var)


@pytest.mark.on_cpu
def test_random_numbers_stay_those_of_the_run(probe):
    torch.manual_seed(0)
    F.rrelu((BIG * BIG).float(), training=True)
    drawn = torch.rand(4)
    with probe.paused():
        torch.manual_seed(0)
        F.rrelu((BIG * BIG).float(), training=True)
        assert torch.equal(drawn, torch.rand(4))


@pytest.mark.on_cpu
def test_what_is_made_of_inf_and_finite_has_a_twin(probe):
    """As the factor by which a norm divides: of inf it is 0, and what is multiplied by it is lost twice."""
    y = BIG * BIG
    scale = torch.rsqrt(y.float().pow(2).mean())
    scaled = y.float() * scale
    twin = probe.twins.of(scaled)
    with probe.paused():
        wide = BIG.float() * BIG.float()
        assert scale == 0
        assert torch.equal(twin, wide * torch.rsqrt(wide.pow(2).mean()))
