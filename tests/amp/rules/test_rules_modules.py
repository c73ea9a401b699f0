"""Layers whose casts are made of many ops: recurrent nets, attention, reparametrised weights."""

import pytest
import torch
from o1_casts import casts_on
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

pytestmark = [pytest.mark.device, pytest.mark.torch]

HALF, FLOAT = torch.float16, torch.float32
# A net of a few layers in half against float32: half has 11 bits, and the outputs here are of order 1.
CLOSE = {"atol": 5e-3, "rtol": 1e-2}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def grads(net):
    found = [p.grad for p in net.parameters()]
    net.zero_grad()
    return found


def assert_trains_in_half(net, run):
    """``run()``'s output is half and close to float32's; its gradients are float32 and close."""
    plain = run()
    plain.float().square().sum().backward()
    wanted = grads(net)
    with casts_on():
        y = run()
    assert y.dtype is HALF
    torch.testing.assert_close(y.float(), plain, **CLOSE)
    y.float().square().sum().backward()
    for got, want in zip(grads(net), wanted, strict=True):
        assert got.dtype is FLOAT
        torch.testing.assert_close(got, want, atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN, lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layers(layer, packed):
    net = layer(8, 6, num_layers=2, bidirectional=True)
    x = torch.randn(5, 3, 8)

    def run():
        if not packed:
            return net(x)[0]
        return pad_packed_sequence(net(pack_padded_sequence(x, [5, 4, 2]))[0])[0]

    assert_trains_in_half(net, run)


# torch says so on processors with half-precision arithmetic.
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_recurrent_layers_take_states_of_either_dtype():
    net, x = nn.LSTM(8, 6, batch_first=True), torch.randn(3, 5, 8)
    with casts_on():
        for dtype in (HALF, FLOAT):
            y, (h, c) = net(x.to(dtype), (torch.zeros(1, 3, 6), torch.zeros(1, 3, 6)))
            assert y.dtype is h.dtype is c.dtype is HALF
            assert net(x, (h, c))[0].dtype is HALF
        with torch.no_grad():
            assert nn.LSTM(8, 6, proj_size=2)(x)[0].dtype is HALF


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, lambda *a: nn.RNNCell(*a, nonlinearity="relu")])
def test_unrolled_cells(cell):
    net = cell(8, 6)
    x = torch.randn(5, 3, 8)

    def run():
        state = None
        for step in x:
            state = net(step, state)
        return state[0] if isinstance(state, tuple) else state

    assert_trains_in_half(net, run)


def test_the_weight_cache_casts_each_weight_once():
    """An LSTM cell that is called for each of five steps."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Casts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten._to_copy.default and args[0].shape[0] == 24  # 4 gates of 6
            return func(*args, **(kwargs or {}))

    net, x = nn.LSTMCell(8, 6), torch.randn(3, 8)
    with casts_on(cache=True), Casts() as casts:
        state = net(x)
        for _ in range(4):
            state = net(x, state)
    assert casts.count == 4  # two weights, two biases


def test_multihead_attention():
    net = nn.MultiheadAttention(8, 2)
    x = torch.randn(4, 3, 8)
    assert_trains_in_half(net, lambda: net(x, x, x)[0])


@pytest.mark.parametrize("fast_path", [False, True])
def test_transformer_encoder(fast_path):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(3, 4, 8)
    with torch.set_grad_enabled(not fast_path):
        plain = net(x)
        with casts_on():
            y = net(x)
    assert torch.isfinite(y).all()
    torch.testing.assert_close(y.float(), plain, **CLOSE)


@pytest.mark.parametrize(
    "reparametrise",
    [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm],
)
def test_reparametrised_weights(reparametrise):
    net = reparametrise(nn.Linear(8, 6)).eval()
    x = torch.randn(4, 8)
    assert_trains_in_half(net, lambda: net(x))


def test_batch_norm_keeps_its_dtypes():
    """The output has the dtype of the input, and the statistics stay float32."""
    net = nn.BatchNorm1d(8)
    with casts_on():
        y = net(torch.randn(16, 8).half())
    assert y.dtype is HALF
    assert net.running_mean.dtype is FLOAT


def test_a_convolutional_net_trains_in_half():
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.PReLU(), nn.ConvTranspose2d(4, 2, 2, stride=2))
    x = torch.randn(2, 2, 6, 6)
    assert_trains_in_half(net, lambda: net(x))
