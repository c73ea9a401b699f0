"""Half weights that are laid out anew after ``initialize``: masters, their gradients and optimizer state stay alike.

Fused optimizers go through raw memory: where strides of a param, its gradient and its state differ, elements are mixed
up without an error, in plain torch as well.
"""

import pytest
import torch
from amp_training import make_step
from internals import is_due, masters_of
from seeded import seeded
from torch import nn

from ampcompat import amp, optimizers

pytestmark = [pytest.mark.device, pytest.mark.torch]

LEVELS = ["O2", "O5"]
STEPS = 6

MAKE = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.05, fused=True),
    "AMSGrad": lambda params: torch.optim.Adam(params, lr=0.05, fused=True, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, fused=True),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=0.05),
    "FusedSGD": lambda params: optimizers.FusedSGD(params, lr=0.05, momentum=0.9),
    "FusedLAMB": lambda params: optimizers.FusedLAMB(params, lr=0.05),
    "FusedNovoGrad": lambda params: optimizers.FusedNovoGrad(params, lr=0.05),
    "FusedAdagrad": lambda params: optimizers.FusedAdagrad(params, lr=0.05),
}


class Products(nn.Module):
    """Multiplies element by element: its gradients do not depend on how weights are laid out."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)
        self.linear = nn.Linear(4, 6)

    def forward(self, x):
        biases = self.conv.bias.sum() + self.linear.bias.sum()
        return (self.conv.weight * x).sum() + (self.linear.weight * x.flatten()[:4]).sum() + biases


def started(level, make):
    torch.manual_seed(0)
    model = Products()
    model, optimizer = amp.initialize(model, make(model.parameters()), opt_level=level, verbosity=0, loss_scale=8.0)
    return model, optimizer


def train(model, optimizer, seed, passes=1):
    for at in range(passes):
        x = torch.randn(4, 3, 2, 2, generator=seeded(10 * seed + at))
        with amp.scale_loss(model(x).float(), optimizer) as scaled:
            scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


def channels_last(model):
    model.to(memory_format=torch.channels_last)


def there_and_back(model):
    model.to(memory_format=torch.channels_last)
    model(torch.ones(4, 3, 2, 2))
    model.to(memory_format=torch.contiguous_format)


def transposed(model):
    for param in model.parameters():
        param.data = param.data.transpose(0, -1).contiguous().transpose(0, -1)


MOVES = [channels_last, there_and_back, transposed]


def takes_fused_adagrad():
    """Whether torch has fused Adagrad on this device: on CUDA since 2.12 or 2.13, while 2.11 raises."""
    param = torch.nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    optimizer = torch.optim.Adagrad([param], fused=True)
    try:
        optimizer.step()
    except RuntimeError as error:
        if "`fused=True` requires" not in str(error):
            raise
        return False
    return True


@pytest.mark.cover(2)
@pytest.mark.parametrize("when", [0, 3])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("level", LEVELS)
def test_other_strides_train_the_same_numbers(level, make, move, passes, when):
    if make is MAKE["Adagrad"] and not takes_fused_adagrad():
        pytest.skip("this torch has no fused Adagrad on the device")
    ends = []
    for moves in (False, True):
        model, optimizer = started(level, make)
        for step in range(STEPS):
            if moves and step == when:
                move(model)
            train(model, optimizer, step, passes)
        ends.append([p.detach().clone() for p in amp.master_params(optimizer)])
    for straight, moved in zip(*ends, strict=True):
        assert torch.equal(straight, moved)


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_that_a_script_lays_out_itself(level):
    """``p.grad = ...`` takes any strides."""
    ends = []
    for turn in (False, True):
        model, optimizer = started(level, MAKE["Adam"])
        with amp.scale_loss(model(torch.ones(4, 3, 2, 2)).float(), optimizer) as scaled:
            grads = torch.autograd.grad(scaled, list(model.parameters()))
            for param, grad in zip(model.parameters(), grads, strict=True):
                wide = torch.arange(grad.numel()).view(grad.shape).to(grad)
                param.grad = wide.transpose(0, -1).contiguous().transpose(0, -1) if turn else wide
        optimizer.step()
        ends.append([p.detach().clone() for p in amp.master_params(optimizer)])
    for straight, turned in zip(*ends, strict=True):
        assert torch.equal(straight, turned)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_that_leaves_amp_keeps_its_optimizers_layout(level):
    """Its state was made for the master."""
    ends = []
    for moves in (False, True):
        model, optimizer = started(level, MAKE["Adam"])
        train(model, optimizer, 0)
        if moves:
            model.to(memory_format=torch.channels_last)
        amp.initialize(model, optimizer, enabled=False)
        for step in range(2):
            model(torch.randn(4, 3, 2, 2, generator=seeded(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.detach().clone() for p in model.parameters()])
    for straight, moved in zip(*ends, strict=True):
        assert torch.equal(straight, moved)


#: Weights whose strides say more than their elements need.
ODD = {
    "rows cut from wider ones": lambda: torch.randn(1, 5)[:, :4],
    "one row of a wider matrix": lambda: torch.randn(3, 8)[1:2, :4],
    "empty, transposed": lambda: torch.randn(0, 5).t(),
    "empty, of four": lambda: torch.randn(4, 0),
    "one column": lambda: torch.randn(4, 5)[:, :1],
    "no dimensions": lambda: torch.randn(4)[2],
    "a dimension of one with a stride": lambda: torch.randn(8).as_strided((4, 1, 2), (2, 7, 1)),
    "expanded": lambda: torch.randn(1, 4).expand(4, 4),
}


class Scaled(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return (self.weight * x).sum()


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("level", LEVELS)
def test_odd_strides_train_and_are_followed(level, kind):
    torch.manual_seed(0)
    weight = ODD[kind]()
    want = weight.clone()
    model = Scaled(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
    for _ in range(2):
        make_step(optimizer, model(torch.tensor(2.0**-6)))
        optimizer.zero_grad()
    assert torch.equal(model.state_dict()["weight"], want - 2 * 2.0**-6)
    model.weight.data.fill_(0.5)
    model(torch.ones(()))
    assert torch.equal(next(amp.master_params(optimizer)), torch.full_like(want, 0.5))


@pytest.mark.parametrize("level", LEVELS)
def test_weights_that_are_not_numbers_are_written_by_nobody(level):
    """Rounding makes other bits of them in other strides, which are no reason to write into a graph."""
    model = Scaled(torch.randn(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with torch.no_grad():
        next(amp.master_params(optimizer)).copy_(-torch.full((4, 4), float("nan")))
    transposed(model)
    model(torch.ones(()))
    x = torch.ones((), requires_grad=True)
    (model(x) + model(x)).backward()


# -- weights of RNNs, which cuDNN wants in one buffer ------------------------------------------------------------------
class Flattened(nn.LSTM):
    """Notes the dtypes of weights that are flattened, and moves them, as cuDNN does."""

    def __init__(self):
        self.seen = None
        super().__init__(4, 4)
        self.seen = []

    def flatten_parameters(self):
        if self.seen is not None:
            self.seen.append({weight.dtype for weight in self._flat_weights})
            for weight in self._flat_weights:
                weight.data = weight.data.clone()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = Flattened()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_an_rnn_is_flattened_once_for_each_cast(level):
    model = Recurrent()
    exact = model.state_dict()
    exact = {name: value.clone() for name, value in exact.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    half = torch.bfloat16 if level == "O5" else torch.float16
    assert model.rnn.seen == [{half}]
    assert not any(is_due(master) for master in masters_of(model))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model.rnn.seen == [{half}]
    plain = amp.unwrap(model)
    assert plain.rnn.seen[-1] == {torch.float32}
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert model.rnn.seen == [{half}, {torch.float32}]
    if level != "O3":
        assert all(torch.equal(value, exact[name]) for name, value in model.state_dict().items())


def test_an_rnn_that_is_not_cast_is_left_as_it_is():
    for options in ({"opt_level": "O1"}, {"opt_level": "O2", "keep_fp32": nn.LSTM}):
        model = Recurrent()
        amp.initialize(model, verbosity=0, **options)
        assert model.rnn.seen == []
