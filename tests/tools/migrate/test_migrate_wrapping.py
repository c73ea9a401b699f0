"""The helper that a migrated script gets: what wraps, copies or traces the model computes as the model does."""

import copy
import io
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ampcompat.tools.migrate.native.helper import mixed_precision

Pair = namedtuple("Pair", "first second")
X = torch.linspace(-1, 1, 12).reshape(3, 4)


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    name: str = "kept"


class ModelOutput(OrderedDict):
    """As that of transformers: entries are attributes."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 2)
        self.seen = []

    def forward(self, x):
        out = self.fc(x)
        self.seen.append(out.dtype)
        return out

    def encode(self, x):
        return self.fc(x)


@pytest.fixture
def net():
    torch.manual_seed(0)
    model = Net()
    with torch.autocast("cpu", torch.float16):
        model.expected = model(X).detach().float()
    assert not torch.equal(model.expected, model.encode(X))
    mixed_precision(model)
    return model


def check(result, net):
    assert result.dtype == torch.float32
    assert torch.equal(result, net.expected)


def test_forward_is_under_autocast_and_returns_float32(net):
    check(net(X), net)
    assert net.seen[-1] == torch.float16
    assert type(net).__name__ == "Net"
    assert isinstance(net, Net)
    assert net.encode(X).dtype == torch.float32
    assert net.fc.weight.dtype == torch.float32


def test_a_deep_copy_is_plain_and_has_weights_of_its_own(net):
    twin = copy.deepcopy(net)
    assert type(twin) is Net
    assert torch.equal(twin(X), net.encode(X))
    with torch.no_grad():
        twin.fc.weight.zero_()
    check(net(X), net)


def test_a_pickle_holds_the_plain_model(net):
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for loaded in (torch.load(buffer, weights_only=False), pickle.loads(pickle.dumps(net))):
        assert type(loaded) is Net
        assert torch.equal(loaded(X), net.encode(X))
    check(net(X), net)


def test_averaged_models_are_plain(net):
    average = torch.optim.swa_utils.AveragedModel(net)
    assert torch.equal(average(X), net.encode(X))


def test_functional_calls_take_the_weights_they_get(net):
    weights = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    assert torch.equal(torch.func.functional_call(net, weights, (X,)), torch.zeros(3, 2))
    check(torch.func.functional_call(net, dict(net.named_parameters()), (X,)), net)


def test_a_compiled_model_is_one_graph(net):
    net.seen = []
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    check(compiled(X), net)


def plain_layers(net):
    layers = torch.nn.Sequential(net.fc)
    mixed_precision(layers)
    return layers


def test_an_exported_model(net):
    check(torch.export.export(plain_layers(net), (X,)).module()(X), net)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*is (deprecated|not supported):DeprecationWarning")
def test_a_traced_model(net):
    check(torch.jit.trace(plain_layers(net), X)(X), net)


def test_a_replica_computes_with_its_own_weights(net):
    replica = net._replicate_for_data_parallel()
    replica.fc = torch.nn.Linear(4, 2)
    assert not torch.equal(replica(X), net.expected)
    assert replica(X).dtype == torch.float32
    check(net(X), net)


@pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast.*is deprecated:FutureWarning")  # checkpoint's, torch 2.4
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_recomputes_under_autocast(net, use_reentrant):
    given = X.clone().requires_grad_()
    net(given).sum().backward()
    expected = net.fc.weight.grad.clone()
    net.zero_grad()
    checkpoint(net, given, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(net.fc.weight.grad, expected)
    assert set(net.seen[1:]) == {torch.float16}


def dtypes(value):
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, dict):
        return [dtypes(one) for one in value.values()]
    if isinstance(value, Output):
        return [dtypes(value.logits)]
    return [dtypes(one) for one in value]


@pytest.mark.parametrize(
    "make",
    [
        lambda t: [t, t],
        lambda t: (t, [t]),
        lambda t: Pair(t, {"a": t}),
        lambda t: {"a": t, "b": (t,)},
        lambda t: OrderedDict(a=t),
        lambda t: ModelOutput(logits=t),
        lambda t: Output(t),
    ],
    ids=["list", "tuple", "namedtuple", "dict", "OrderedDict", "ModelOutput", "dataclass"],
)
def test_tensors_in_containers_become_float32(make):
    class Many(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 2)

        def forward(self, x):
            self.made = make(self.fc(x))
            return self.made

    model = Many()
    mixed_precision(model)
    result = model(X)
    assert type(result) is type(model.made)
    assert "float16" not in str(dtypes(result))
    assert "float32" in str(dtypes(result))
    if isinstance(result, ModelOutput):
        assert result.logits is result["logits"]


def test_tensors_of_other_dtypes_stay():
    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self):
            return torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.int32), None, "text"

    model = Other()
    mixed_precision(model)
    double, integer, nothing, text = model()
    assert (double.dtype, integer.dtype, nothing, text) == (torch.float64, torch.int32, None, "text")


@pytest.mark.parametrize(
    ("options", "enabled", "scale"),
    [
        ({}, True, 65536.0),
        ({"loss_scale": "dynamic"}, True, 65536.0),
        ({"loss_scale": 128}, True, 128.0),
        ({"loss_scale": "128.0"}, True, 128.0),
        ({"loss_scale": 1.0}, False, 1.0),
        ({"enabled": False}, False, 1.0),
        ({"dtype": torch.bfloat16}, False, 1.0),
    ],
)
def test_the_scaler_is_as_asked(options, enabled, scale):
    model = Net()
    scaler = mixed_precision(model, **options)
    assert scaler.is_enabled() == enabled
    assert scaler.get_scale() == scale
    assert (type(model) is Net) == (options.get("enabled") is False)
