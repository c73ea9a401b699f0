"""The MLP's autograd function as NVIDIA's DLRM uses it: ``MlpFunction.forward`` and ``.backward`` in one of its own."""

import gc
import pickle
import weakref

import pytest
import torch
from amp_training import make_step
from torch import nn

from ampcompat import amp
from ampcompat.mlp import MLP, MlpFunction, mlp_function

pytestmark = pytest.mark.device

SIZES = [6, 8, 3]
ACTIVATIONS = ["none", "relu", "sigmoid"]
HERE = torch.empty(0).device.type


def own_function(cast_inputs):
    """A function in the manner of DLRM's, which sees to casts, and to nothing else, itself."""

    class OwnFunction(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=torch.empty(0).device.type, cast_inputs=cast_inputs)
        def forward(ctx, *args, **kwargs):
            return MlpFunction.forward(ctx, *args, **kwargs)

        @staticmethod
        @torch.amp.custom_bwd(device_type=torch.empty(0).device.type)
        def backward(ctx, *args, **kwargs):
            return MlpFunction.backward(ctx, *args, **kwargs)

    return OwnFunction


class OwnMLP(MLP):
    cast_inputs = None

    def forward(self, input):
        function = own_function(self.cast_inputs)
        return function.apply(self.bias, self.activation, input, *self.weights, *self.biases)


def layers_like(mlp, activation):
    """Torch's layers with the same parameters."""
    after = {"none": nn.Identity, "relu": nn.ReLU, "sigmoid": nn.Sigmoid}[activation]
    parts = []
    for i, weight in enumerate(mlp.weights):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(mlp.bias), dtype=weight.dtype)
        with torch.no_grad():
            linear.weight.copy_(weight)
            if mlp.bias:
                linear.bias.copy_(mlp.biases[i])
        parts += [linear, after()]
    return nn.Sequential(*parts)


def gradients(module, x, grad, weights, biases):
    out = module(x)
    return out, torch.autograd.grad(out, [x, *weights, *biases], grad)


@pytest.mark.cover(2)
@pytest.mark.parametrize("kind", [MLP, OwnMLP])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_values_and_gradients_are_those_of_torchs_layers(dtype, activation, bias, kind):
    torch.manual_seed(0)
    mlp = kind(SIZES, bias, activation).to(dtype)
    plain = layers_like(mlp, activation)
    x, grad = torch.randn(5, 6).to(dtype).requires_grad_(), torch.randn(5, 3).to(dtype)
    linears = [part for part in plain if isinstance(part, nn.Linear)]
    ours, got = gradients(mlp, x, grad, mlp.weights, mlp.biases)
    theirs, wanted = gradients(plain, x, grad, [p.weight for p in linears], [p.bias for p in linears if bias])
    assert ours.dtype == dtype
    # The same products, summed in another order.
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for a, b in zip((ours, *got), (theirs, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def losses(model, scaler, cast):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    found = []
    for step in range(6):
        torch.manual_seed(step)
        x = torch.randn(16, 6)
        with torch.autocast(x.device.type, cast, enabled=cast is not None):
            out = model(x)
        loss = (out.float() - x[:, :3].sigmoid()).pow(2).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("cast", [None, torch.float16, torch.bfloat16], ids=str)
def test_dlrms_training_is_that_of_torchs_layers(cast):
    torch.manual_seed(0)
    mlp = OwnMLP(SIZES, activation="sigmoid")
    mlp.cast_inputs = cast
    plain = layers_like(mlp, "sigmoid")
    scaler = torch.amp.GradScaler(HERE, init_scale=128.0, enabled=cast is not None)
    ours, theirs = losses(mlp, scaler, cast), losses(plain, scaler, cast)
    assert ours[-1] < ours[0]
    # With casts the sums of gradients are rounded to half; torch casts each weight's gradient back by itself.
    rel = {None: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[cast]
    assert ours == pytest.approx(theirs, rel=rel)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("kind", [MLP, OwnMLP])
def test_it_trains_at_every_level(kind, level):
    def run(make):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
        found = []
        for step in range(6):
            torch.manual_seed(step)
            x = torch.randn(16, 6)
            loss = (model(x).float() - x[:, :3].sigmoid()).pow(2).mean()
            make_step(optimizer, loss)
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    ours = run(lambda: kind(SIZES, activation="sigmoid"))
    theirs = run(lambda: layers_like(MLP(SIZES, activation="sigmoid"), "sigmoid"))
    assert ours[-1] < ours[0]
    assert ours == pytest.approx(theirs, rel=1e-5 if level == "O0" else 5e-3)  # half's rounding, in other places


def test_neither_method_casts_and_the_function_does():
    """As in apex, whose kernels were called by ``MlpFunction`` and given half by ``mlp_function``."""
    torch.manual_seed(0)
    mlp = MLP(SIZES)
    x = torch.randn(5, 6)
    args = (mlp.bias, mlp.activation, x, *mlp.weights, *mlp.biases)
    with torch.autocast(x.device.type, torch.bfloat16):
        assert MlpFunction.apply(*args).dtype is torch.float32
        assert mlp_function(*args).dtype is torch.bfloat16
        assert mlp(x).dtype is torch.bfloat16


def test_a_graph_can_be_used_twice_and_is_freed_with_its_result():
    mlp = MLP(SIZES)
    out = MlpFunction.apply(mlp.bias, mlp.activation, torch.randn(5, 6), *mlp.weights, *mlp.biases)
    first = torch.autograd.grad(out.sum(), mlp.weights, retain_graph=True)
    second = torch.autograd.grad(out.sum(), mlp.weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    gc.disable()
    try:
        gone = weakref.ref(out)
        del out
        assert gone() is None
    finally:
        gc.enable()


def test_its_gradients_have_no_gradients():
    mlp = MLP(SIZES, activation="sigmoid")
    x = torch.randn(5, 6, requires_grad=True)
    out = MlpFunction.apply(mlp.bias, mlp.activation, x, *mlp.weights, *mlp.biases)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out).requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    (grad,) = torch.autograd.grad(mlp(x).sum(), x, create_graph=True)
    grad.sum().backward()  # the module's have


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((1, "relu", torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4)), "1 for relu"),
        ((1, 1, torch.zeros(2, 3), torch.zeros(4, 3)), "2 tensors with bias=1"),
        ((0, 1, torch.zeros(2, 3)), "1 tensors with bias=0"),
    ],
)
def test_what_is_refused(args, words):
    for function in (mlp_function, MlpFunction.apply):
        with pytest.raises(TypeError, match=words):
            function(*args)


def test_an_mlp_that_apex_saved_whole():
    """Its instances hold their parameters in lists, too, and choose the activation by a number."""
    torch.manual_seed(0)
    mlp = MLP(SIZES, activation="sigmoid")
    vars(mlp).update(weights=mlp.weights, biases=mlp.biases, bias=1, activation=2)
    x, loaded = torch.randn(5, 6), pickle.loads(pickle.dumps(mlp))
    assert torch.equal(loaded(x), layers_like(mlp, "sigmoid")(x))
    assert repr(loaded) == "MLP(MLP sizes: [6, 8, 3], Bias=1, activation=2)"
