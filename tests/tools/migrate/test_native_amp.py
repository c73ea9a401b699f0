"""What ``native_amp.py`` does beside the laws: models, closures, checkpoints, refusals, waits for the device."""

import contextlib
import copy
import dataclasses
import inspect
import io
import pickle
import sys
import warnings

import pytest
import torch
from native_file import native_amp
from seeded import seeded
from torch import nn

import ampcompat.amp
import ampcompat.optimizers


def copy_of_file(monkeypatch):
    """The file as a module that ``import`` finds, with a state of its own."""
    module = native_amp()
    monkeypatch.setitem(sys.modules, "native_amp", module)
    return module


@pytest.fixture
def amp(monkeypatch):
    return copy_of_file(monkeypatch)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.first(x)
        return Output(self.second(hidden), (hidden, {"x": x}))

    def loss(self, x):
        return self.infer(x).pow(2).mean()

    def infer(self, x):
        return self.second(self.first(x))


def start(amp, model=None, make=lambda params: torch.optim.SGD(params, lr=0.1), **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2) if model is None else model
    return amp.initialize(model, make(model.parameters()), verbosity=0, **options)


X = torch.randn(8, 4, generator=seeded(0)) / 8


def train(amp, model, optimizer, size=1.0):
    optimizer.zero_grad()
    with amp.scale_loss(model(X).pow(2).mean() * size, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def scale(amp, loss_id=0):
    return amp._amp_state.loss_scalers[loss_id].loss_scale()


# -- models ------------------------------------------------------------------------------------------------------------
def test_a_model_stays_what_it_is(amp):
    model, _ = start(amp, Net())
    assert isinstance(model, Net)
    assert repr(model) == repr(Net())
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    output = model(X)
    assert [output.logits.dtype, output.hidden[0].dtype] == [torch.float32] * 2
    assert torch.equal(output.logits, output.logits.half().float())


def test_copies_and_pickles_run_under_autocast_with_their_own_weights(amp):
    model, _ = start(amp, Net())
    expected = model(X).logits
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for made in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert type(made) is Net
        assert torch.equal(made(X).logits, expected)
        with torch.no_grad():
            made.second.weight.zero_()
            made.second.bias.zero_()
        assert not made(X).logits.any()
    assert torch.equal(model(X).logits, expected)


def test_replicas_of_data_parallel_run_under_autocast(amp):
    model, _ = start(amp, Net())
    replica = model._replicate_for_data_parallel()
    replica._modules = {name: copy.deepcopy(layer) for name, layer in model._modules.items()}
    assert torch.equal(replica(X).logits, model(X).logits)
    with torch.no_grad():
        replica._modules["second"].weight.zero_()
        replica._modules["second"].bias.zero_()
    assert not replica(X).logits.any()
    if torch.cuda.is_available():  # without a device, nn.DataParallel calls the model itself
        return
    assert torch.equal(nn.DataParallel(model)(X).logits, model(X).logits)


@pytest.mark.parametrize("compiled_first", [False, True])
def test_compiled_models(amp, compiled_first):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = amp.initialize(copy.deepcopy(model))
    if compiled_first:
        model = torch.compile(model, backend="eager", fullgraph=True)
    model, optimizer = amp.initialize(model, optimizer, verbosity=0)
    if not compiled_first:
        model = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(model(X), expected(X))
    train(amp, model, optimizer)
    torch._dynamo.reset()


def test_initialize_again_and_off_again(amp):
    model, optimizer = start(amp, Net())
    half = model(X).logits
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert torch.equal(model(X).logits, half)
    amp.initialize(model, optimizer, enabled=False)
    assert type(model) is Net
    assert not torch.equal(model(X).logits, half)
    with amp.scale_loss(model(X).logits.sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    assert amp.state_dict() == {}


def test_amp_that_is_off_leaves_everything_as_it_is(amp):
    model, optimizer = start(amp, Net(), enabled=False)
    with amp.scale_loss(model(X).logits.sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    assert "forward" not in vars(model)
    assert "step" not in vars(optimizer)


def test_each_call_has_scales_of_its_own(amp):
    one, first = start(amp)
    two, second = start(amp, loss_scale=128.0)
    train(amp, one, first, size=float("inf"))
    train(amp, two, second)
    assert first._amp_stash.loss_scalers[0].loss_scale() == 2.0**15
    assert scale(amp) == 128.0


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"opt_level": "O0"}, None),
        ({"opt_level": "O1"}, torch.float16),
        ({"opt_level": "O3", "keep_batchnorm_fp32": "True", "loss_scale": "128.0"}, torch.float16),
        ({"opt_level": "O5"}, torch.bfloat16),
        ({"opt_level": "O2", "cast_model_type": torch.bfloat16}, torch.bfloat16),
        ({"opt_level": "O1", "patch_torch_functions": False}, None),
        ({"opt_level": "O2", "cast_model_type": torch.float32}, None),
    ],
)
def test_levels(amp, options, dtype):
    model, optimizer = start(amp, **options)
    expected = nn.functional.linear(X, model.weight, model.bias)
    rounded = (
        expected if dtype is None else nn.functional.linear(X.to(dtype), model.weight.to(dtype), model.bias.to(dtype))
    )
    torch.testing.assert_close(model(X), rounded.float(), rtol=2**-7, atol=2**-7)
    assert torch.equal(model(X), expected) == (dtype is None)
    train(amp, model, optimizer)
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("order", [1, -1])
def test_a_criterion_without_weights_runs_where_the_models_do(amp, order):
    model, criterion = nn.Linear(4, 2, device="meta"), nn.MSELoss()
    amp.initialize([model, criterion][::order], verbosity=0)
    assert amp._amp_state.device_type == "meta"
    assert criterion.forward.device_type == "meta"
    amp.initialize([nn.MSELoss()], verbosity=0)
    assert amp._amp_state.device_type == "meta"


@pytest.mark.on_cpu
def test_models_on_two_kinds_of_devices_have_their_own_autocast(amp):
    models = [nn.Linear(4, 2, device="meta"), nn.Linear(4, 2)]
    amp.initialize(models, verbosity=0)
    assert [model.forward.device_type for model in models] == ["meta", "cpu"]
    assert amp._amp_state.device_type == "meta"


def test_outputs_of_a_wanted_dtype(amp):
    model, _ = start(amp, Net(), opt_level="O2", cast_model_outputs=torch.float16)
    assert model(X).logits.dtype == torch.float16


class Shared(nn.Module):
    """Passes its first output on to its second."""

    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        features = self.features(x)
        return features, self.head(features)


def test_the_gradient_of_an_output_is_whole(amp):
    """Other outputs come from the tensor that was cast."""
    model, _ = start(amp, Shared())
    features, out = model(X)
    features.retain_grad()
    out.sum().backward()
    expected = model.head.weight.half().sum(0).float().expand(8, 4)
    torch.testing.assert_close(features.grad, expected, rtol=2**-9, atol=2**-9)
    assert model.features.weight.grad.any()


def test_a_gradient_with_respect_to_an_output_that_the_model_used_itself_raises(amp):
    """The output is a copy; what the model computed did not use it. StyleGAN2's path penalty does this."""
    model, _ = start(amp, Shared())
    features, out = model(X)
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(out.sum(), features)


class TwoPasses(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        with torch.no_grad():
            target = self.layer(x)
        return (self.layer(x) - target + 1).pow(2).sum()


def test_weights_that_are_first_used_without_gradients_get_some(amp):
    model, optimizer = start(amp, TwoPasses())
    with amp.scale_loss(model(X), optimizer) as scaled:
        scaled.backward()
    assert model.layer.weight.grad.any()


def caught(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return found


@pytest.mark.parametrize("method", ["loss", "infer"])
def test_a_method_that_runs_outside_of_autocast_is_named_once(amp, method):
    """The warning has the line that calls the layer, also after the forward has run and where no loss is scaled."""
    model, _ = start(amp, Net())
    model(X)
    (found,) = caught(lambda: getattr(model, method)(X))
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    assert found.filename == __file__
    assert "self.first(x)" in lines[found.lineno - 1]
    assert "Linear runs in float32 here" in str(found.message)
    assert f"torch.autocast({X.device.type!r}, torch.float16)" in str(found.message)
    assert caught(lambda: getattr(model, method)(X)) == []


@pytest.mark.parametrize("level", ["O0", "O1", "O5"])
def test_what_runs_as_it_is_meant_is_not_named(amp, level):
    model, optimizer = start(amp, Net(), opt_level=level, max_loss_scale=2.0**10)

    def run():
        with amp.scale_loss(model(X).logits.sum(), optimizer) as scaled:
            scaled.backward()
        with torch.autocast(X.device.type, torch.bfloat16):
            model.loss(X)
        with amp.disable_casts():
            model.loss(X)
        torch.utils.checkpoint.checkpoint(model, X, use_reentrant=False).logits.sum().backward()
        copy.deepcopy(model)(X)
        if level == "O0":
            model.loss(X)

    assert caught(run) == []


def test_a_model_that_leaves_amp_is_not_named(amp):
    model, optimizer = start(amp, Net())
    amp.initialize(model, optimizer, enabled=False)
    assert caught(lambda: model.loss(X)) == []


def test_a_model_that_is_loaded_where_amp_is_not_initialized_is_not_named(amp, monkeypatch):
    model, _ = start(amp, Net())
    saved = pickle.dumps(model)
    copy_of_file(monkeypatch)
    loaded = pickle.loads(saved)
    assert caught(lambda: loaded.loss(X)) == []


class Registered(nn.Linear):
    names = []

    def __init_subclass__(cls, kind, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.names.append(kind)


class Registering(Registered, kind="a"):
    def __init__(self):
        super().__init__(4, 2)


def test_no_class_of_the_models_is_made(amp):
    model, optimizer = start(amp, Registering())
    train(amp, model, optimizer)
    assert type(model) is Registering
    assert Registered.names == ["a"]


def test_a_forward_of_the_instance(amp):
    model = Net()
    model.forward = model.second.forward
    start(amp, model)
    half = model.second.half()
    assert torch.equal(model(X), nn.functional.linear(X.half(), half.weight, half.bias).float())


def test_outputs_can_be_saved(amp):
    model, _ = start(amp, Shared())
    file = io.BytesIO()
    outputs = model(X)
    torch.save(outputs, file)
    file.seek(0)
    for loaded, output in zip(torch.load(file, weights_only=True), outputs, strict=True):
        assert torch.equal(loaded, output)


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Multiplying(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 2))

    def forward(self, x):
        return Multiply.apply(self.layer(x), self.weight)


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_backward_of_mixed_dtypes_names_the_fix(amp, level):
    model, optimizer = start(amp, Multiplying(), opt_level=level)
    with pytest.raises(RuntimeError, match="same dtype.*decorate its forward with torch.amp.custom_fwd"):
        train(amp, model, optimizer)


# -- optimizers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("before", [True, False])
def test_schedulers_are_content(amp, before):
    """Also where the first step is skipped."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    made = [torch.optim.lr_scheduler.StepLR(optimizer, 1)] if before else []
    model, optimizer = amp.initialize(model, optimizer, verbosity=0)
    made = made or [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
    for size in (float("inf"), 1.0):
        train(amp, model, optimizer, size)
        made[0].step()
    assert made[0].get_last_lr() == [pytest.approx(0.01)]


def test_a_skipped_step_is_said_once(amp, capsys):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    train(amp, model, optimizer, size=float("inf"))
    assert capsys.readouterr().out.splitlines() == [
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0",
    ]
    assert torch.equal(model.weight, before)
    train(amp, model, optimizer)
    assert not torch.equal(model.weight, before)


def test_an_overflow_skips_one_step_whatever_is_cleared_before_it(amp):
    model, optimizer = start(amp, max_loss_scale=2.0**10)
    before = model.weight.detach().clone()
    for size in (float("inf"), 1.0):
        model.zero_grad()
        backward(amp, model, optimizer, size)
    optimizer.step()
    assert torch.equal(model.weight, before)
    optimizer.step()
    assert not torch.equal(model.weight, before)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**9, "unskipped": 1}}


@pytest.mark.parametrize("iterable", [dict.values, lambda made: iter(made.values()), lambda made: set(made.values())])
def test_optimizers_of_any_iterable(amp, iterable):
    models = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 2)}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    amp.initialize(models.values(), optimizers.values(), verbosity=0, max_loss_scale=2.0**10)
    loss = models["b"](models["a"](X)).sum()
    with amp.scale_loss(loss, iterable(optimizers)) as scaled:
        scaled.backward()
    assert 0 < models["a"].weight.grad.abs().max() < 100


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Embedding(5, 3, sparse=True)

    def forward(self, x):
        return self.layer(x)


def test_sparse_gradients(amp):
    """Accumulated, delayed, and skipped after an overflow."""
    model, optimizer = start(amp, Embedded())
    words, weight = torch.tensor([1, 1, 2]), model.layer.weight
    before = weight.detach().clone()
    for delay in (False, True, False):
        with amp.scale_loss(model(words).sum(), optimizer, delay_unscale=delay) as scaled:
            scaled.backward()
    assert torch.equal(weight.grad.to_dense()[:, 0], torch.tensor([0.0, 6.0, 3.0, 0.0, 0.0]))
    optimizer.step()
    torch.testing.assert_close(weight[1], before[1] - 0.6)
    before = weight.detach().clone()
    optimizer.zero_grad()
    with amp.scale_loss(model(words).sum() * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert torch.equal(weight, before)


def test_cleared_within_the_block(amp):
    model, optimizer = start(amp)
    for _ in range(2):
        with amp.scale_loss(model(X).sum(), optimizer) as scaled:
            optimizer.zero_grad()
            scaled.backward()
    once = model.weight.grad.clone()
    optimizer.zero_grad()
    with amp.scale_loss(model(X).sum(), optimizer) as scaled:
        scaled.backward()
    assert torch.equal(model.weight.grad, once)


def test_two_copies_of_the_file_are_noticed(amp, monkeypatch):
    model, optimizer = start(amp)
    other = copy_of_file(monkeypatch)
    with pytest.raises(RuntimeError, match="scale_loss before initialize; call amp.initialize of this module"):
        train(other, model, optimizer)


def test_an_optimizer_that_initialize_was_not_given_is_refused(amp):
    model, _ = start(amp)
    later = torch.optim.Adam(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="a Adam that initialize was not given; pass it to amp.initialize"):
        train(amp, model, later)


def test_a_copy_of_an_optimizer_is_plain(amp):
    model, optimizer = start(amp)
    train(amp, model, optimizer, size=float("inf"))
    plain = copy.deepcopy(optimizer)
    assert not hasattr(plain, "_amp_stash")
    plain.step()


def test_bounds_of_the_scale(amp):
    model, optimizer = start(amp, min_loss_scale=2.0**15, max_loss_scale=2.0**16)
    for expected in (2.0**15, 2.0**15):
        train(amp, model, optimizer, size=float("inf"))
        assert scale(amp) == expected
    amp._amp_state.loss_scalers[0]._scale_seq_len = 1
    for expected in (2.0**16, 2.0**16):
        train(amp, model, optimizer, size=2.0**-10)
        assert scale(amp) == expected


def closure_of(amp, model, optimizer, sizes):
    def closure():
        optimizer.zero_grad()
        loss = model(X).pow(2).mean() * next(sizes)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    return closure


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.LBFGS])
def test_closures(amp, make):
    model, optimizer = start(amp, make=lambda params: make(params, lr=0.1), max_loss_scale=2.0**10)
    before = model.weight.detach().clone()
    optimizer.step(closure=closure_of(amp, model, optimizer, iter([1.0] * 50)))
    after = model.weight.detach().clone()
    assert not torch.equal(after, before)
    assert optimizer.step(closure_of(amp, model, optimizer, iter([1.0] * 50))).isfinite()
    assert not torch.equal(model.weight, after)


def test_an_overflow_in_a_closure_raises(amp):
    model, optimizer = start(amp, make=torch.optim.LBFGS, max_loss_scale=2.0**10)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="in the closure of a step; pass a static loss_scale"):
        optimizer.step(closure_of(amp, model, optimizer, iter([float("inf")])))
    assert torch.equal(model.weight, before)


def backward(amp, model, optimizer, size=1.0, **options):
    with amp.scale_loss(model(X).pow(2).mean() * size, optimizer, **options) as scaled:
        scaled.backward()


def test_gradients_that_overflowed_stay_until_they_are_cleared(amp):
    """As under GradScaler: scripts print their norm and decide by it, after the step and after the next block."""
    model, optimizer = start(amp, max_loss_scale=2.0**10)
    before = model.weight.detach().clone()
    for size in (float("inf"), 1.0):
        backward(amp, model, optimizer, size)
        assert not model.weight.grad.isfinite().any()
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**9, "unskipped": 1}}
    optimizer.step()
    assert not model.weight.grad.isfinite().any()
    assert torch.equal(model.weight, before)
    train(amp, model, optimizer)
    assert not torch.equal(model.weight, before)


def test_each_overflow_of_an_accumulation_halves_the_scale(amp):
    model, optimizer = start(amp, max_loss_scale=2.0**10)
    for size in (1.0, float("inf"), 1.0, float("inf")):
        backward(amp, model, optimizer, size)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**8, "unskipped": 0}}


def test_gradients_that_overflowed_and_are_brought_back_after_they_were_cleared(amp, capsys):
    """As PCGrad does: it clears the gradients of each loss, and writes what it has made of copies of all."""
    model, optimizer = start(amp, max_loss_scale=2.0**10)
    amp._amp_state.verbosity = 1
    before = model.weight.detach().clone()
    copies = []
    for size in (float("inf"), 1.0):
        optimizer.zero_grad()
        backward(amp, model, optimizer, size)
        copies.append(model.weight.grad.clone())
    model.weight.grad = sum(copies)
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert "Skipping step, loss scaler 0 reducing loss scale to 512.0" in capsys.readouterr().out
    optimizer.zero_grad()
    model.weight.grad = copies[1]
    optimizer.step()
    assert not torch.equal(model.weight, before)


def plain_gradients(model, sizes):
    """What plain torch accumulates."""
    model.zero_grad()
    for size in sizes:
        (model(X).pow(2).mean() * size).backward()
    grads = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    return grads


@pytest.mark.parametrize("delay", ["delay_unscale", "delay_overflow_check", None])
def test_accumulated_gradients_are_those_of_plain_torch(amp, delay):
    model, optimizer = start(amp, max_loss_scale=2.0**10, opt_level="O0", loss_scale="dynamic")
    sizes = (1.0, 0.5, 0.25)
    expected = plain_gradients(model, sizes)
    amp._amp_state.loss_scalers[0]._scale_seq_len = 1
    for size in sizes:
        backward(amp, model, optimizer, size, **({} if delay is None else {delay: size != 0.25}))
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.grad, grad)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_the_last_block_of_an_accumulation_holds_the_whole_sum(amp, level):
    """Scripts average it over all ranks there by hand; here the other rank has nothing."""
    model, optimizer = start(amp, max_loss_scale=2.0**10, opt_level=level, loss_scale="dynamic")
    found = []
    for divisor in (1, 2):
        for delay in (True, True, False):
            with amp.scale_loss(model(X).pow(2).mean(), optimizer, delay_unscale=delay) as scaled:
                scaled.backward()
                if not delay:
                    model.weight.grad.data.div_(divisor)
        found.append(model.weight.grad.clone())
        optimizer.zero_grad()
    assert torch.equal(found[1], found[0] / 2)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_older_gradients_that_the_block_clears_are_gone(amp, set_to_none):
    """They are cleared to None, as ``zero_grad`` does. Zeros in place are not seen: they come back at the end."""
    model, optimizer = start(amp, max_loss_scale=2.0**10, opt_level="O0", loss_scale="dynamic")
    once, twice = plain_gradients(model, (1.0,)), plain_gradients(model, (1.0, 1.0))
    backward(amp, model, optimizer)
    with amp.scale_loss(model(X).pow(2).mean(), optimizer) as scaled:
        optimizer.zero_grad(set_to_none)
        scaled.backward()
    assert torch.equal(model.weight.grad, once[0] if set_to_none else twice[0])


def test_gradients_that_are_differentiated_are_added_up(amp):
    model, optimizer = start(amp, max_loss_scale=2.0**10, opt_level="O0", loss_scale="dynamic")
    expected = plain_gradients(model, (1.0, 1.0))
    for _ in range(2):
        with amp.scale_loss(model(X).pow(2).mean(), optimizer) as scaled, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, of a cycle
            scaled.backward(create_graph=True)
    assert torch.equal(model.weight.grad.detach(), expected[0])
    optimizer.zero_grad()


def test_a_delayed_overflow_is_counted_once_by_the_next_block(amp, capsys):
    model, optimizer = start(amp, max_loss_scale=2.0**10)
    amp._amp_state.verbosity = 1
    before = model.weight.detach().clone()
    backward(amp, model, optimizer, float("inf"), delay_unscale=True)
    assert scale(amp) == 2.0**10
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert "reducing loss scale to 512.0" in capsys.readouterr().out
    optimizer.zero_grad()
    backward(amp, model, optimizer)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**9, "unskipped": 0}}
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_an_end_that_raises_leaves_no_gradient(amp, monkeypatch):
    model, optimizer = start(amp, max_loss_scale=2.0**10)
    backward(amp, model, optimizer)
    before = model.weight.detach().clone()

    def fail(*args):
        raise RuntimeError("out of memory")

    block = amp.scale_loss(model(X).pow(2).mean(), optimizer)
    scaled = block.__enter__()
    scaled.backward()
    monkeypatch.setattr(torch, "_foreach_mul_", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        block.__exit__(None, None, None)
    monkeypatch.undo()
    assert model.weight.grad is None
    optimizer.step()
    assert torch.equal(model.weight, before)
    train(amp, model, optimizer)
    assert not torch.equal(model.weight, before)


def test_a_script_that_clears_within_the_block_goes_on_after_an_overflow(amp):
    model, optimizer = start(amp, max_loss_scale=2.0**10)
    before = model.weight.detach().clone()
    for size in (float("inf"), 1.0):
        with amp.scale_loss(model(X).pow(2).mean() * size, optimizer) as scaled:
            optimizer.zero_grad()
            scaled.backward()
        optimizer.step()
    assert model.weight.isfinite().all()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("value", [1.0, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtypes", [[torch.bfloat16], [torch.float16, torch.float32, torch.bfloat16]])
def test_gradients_in_half_are_unscaled_and_looked_at(amp, monkeypatch, dtypes, value):
    """On CUDA, the kernel that GradScaler uses has no bfloat16."""

    def refuse(*args):
        raise RuntimeError('"_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for bfloat16')

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", refuse)
    params = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes] + [nn.Parameter(torch.ones(0))]
    optimizer = torch.optim.SGD(params, lr=1.0)
    amp.initialize(nn.Linear(4, 2), optimizer, opt_level="O0", loss_scale="dynamic", max_loss_scale=8.0, verbosity=0)
    factor = torch.tensor([0.5, value, 0.5])
    with amp.scale_loss(sum((param[: len(factor)] * factor[: len(param)]).sum() for param in params), optimizer) as s:
        s.backward()
    for param in params[:-1]:
        torch.testing.assert_close(param.grad.float(), factor, equal_nan=True, rtol=0, atol=0)
    assert scale(amp) == (8.0 if value == 1.0 else 4.0)
    optimizer.step()
    assert (params[0][0].item() == 0.5) == (value == 1.0)


# -- waits for the device ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "waits"), [({}, 1), ({"loss_scale": 128.0}, 0), ({"opt_level": "O0"}, 0), ({"opt_level": "O5"}, 0)]
)
def test_a_block_and_a_step_wait_for_the_device_once(amp, options, waits, monkeypatch):
    model, optimizer = start(amp, **options)
    train(amp, model, optimizer)
    loss = model(X).sum()
    count = []
    for name in ("item", "__bool__", "__float__", "tolist", "cpu"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *args, real=real, **kw: count.append(1) or real(*args, **kw))
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert len(count) == waits


# -- checkpoints -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_checkpoints_of_amp_go_on(amp, level):
    """A run under ampcompat is saved, in apex's format, and goes on under the file; weights are float32 in it."""
    torch.manual_seed(0)
    theirs = nn.Linear(4, 2)
    theirs, optimizer = ampcompat.amp.initialize(
        theirs, torch.optim.Adam(theirs.parameters(), lr=0.01), opt_level=level, verbosity=0
    )
    for size in (float("inf"), 1.0, 1.0):
        train(ampcompat.amp, theirs, optimizer, size)
    file = io.BytesIO()
    torch.save(
        {"model": theirs.state_dict(), "optimizer": optimizer.state_dict(), "amp": ampcompat.amp.state_dict()}, file
    )
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model, ours = start(amp, make=lambda params: torch.optim.Adam(params, lr=0.5), opt_level=level)
    model.load_state_dict(saved["model"])
    ours.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 2}}
    assert ours.param_groups[0]["lr"] == 0.01
    train(ampcompat.amp, theirs, optimizer)
    train(amp, model, ours)
    assert amp.state_dict() == dict(ampcompat.amp.state_dict())
    torch.testing.assert_close(model.weight, theirs.state_dict()["weight"], rtol=2**-9, atol=2**-9)


def test_scales_of_all_calls_are_saved_and_loaded(amp):
    """The latest call first, then earlier ones whose optimizers live: a teacher may come after its student."""
    student, optimizer = start(amp)
    second, other = start(amp, loss_scale=128.0)
    start(amp, max_loss_scale=4.0)  # dropped at once
    amp.initialize(nn.Linear(4, 2), opt_level="O1", loss_scale=32.0, verbosity=0)
    train(amp, student, optimizer, size=float("inf"))
    train(amp, second, other)
    saved = {
        "loss_scaler0": {"loss_scale": 32.0, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 128.0, "unskipped": 1},
        "loss_scaler2": {"loss_scale": 2.0**15, "unskipped": 0},
    }
    assert amp.state_dict() == saved
    train(amp, student, optimizer, size=float("inf"))
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved
    assert optimizer._amp_stash.loss_scalers[0].loss_scale() == 2.0**15


def test_an_optimizer_that_is_initialized_again_has_the_scales_of_that_call(amp):
    model, optimizer = start(amp)
    amp.initialize(model, optimizer, loss_scale=64.0, verbosity=0)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 0}}


FUSED = {
    "FusedAdam": ({"lr": 0.01, "weight_decay": 0.1}, lambda params: torch.optim.AdamW(params, weight_decay=0.0)),
    "FusedAdam, not decoupled": ({"lr": 0.01, "adam_w_mode": False}, torch.optim.Adam),
    "FusedAdagrad": ({"lr": 0.01, "weight_decay": 0.1}, torch.optim.Adagrad),
    "FusedSGD": ({"lr": 0.01, "momentum": 0.9}, lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.9)),
}


@pytest.mark.parametrize("name", FUSED)
def test_checkpoints_of_fused_optimizers_go_on(amp, name):
    options, make = FUSED[name]
    fused = getattr(ampcompat.optimizers, name.partition(",")[0])
    theirs = nn.Linear(4, 2)
    theirs, optimizer = ampcompat.amp.initialize(
        theirs, fused(theirs.parameters(), **options), opt_level="O1", verbosity=0, max_loss_scale=2.0**10
    )
    for _ in range(3):
        train(ampcompat.amp, theirs, optimizer)
    model, ours = start(amp, make=make, opt_level="O1", max_loss_scale=2.0**10)
    model.load_state_dict(theirs.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    ours.load_state_dict(saved)
    assert saved["param_groups"] == optimizer.state_dict()["param_groups"]
    for _ in range(2):
        train(ampcompat.amp, theirs, optimizer)
        train(amp, model, ours)
    # Two implementations of one formula; a wrong step count moves Adam's weights by a tenth of lr.
    torch.testing.assert_close(model.weight, theirs.weight, rtol=1e-5, atol=1e-6)
    again = make(model.parameters())
    again.load_state_dict(ours.state_dict())
    if "Adam" in name:
        assert float(again.state_dict()["state"][0]["step"]) == 5


def test_states_that_do_not_fit(amp):
    start(amp, num_losses=2)
    for whole in ({"model": {}}, {"epoch": 1, "amp": {}}, {"amp": {}, "epoch": 1}):
        with pytest.raises(RuntimeError, match=r"'(model|epoch|amp)' .* checkpoint\['amp'\]"):
            amp.load_state_dict(whole)
    with pytest.warns(UserWarning, match="has 1 loss scales, initialize made 2"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}})
    assert (scale(amp, 0), scale(amp, 1)) == (8.0, 2.0**16)


# -- functions ---------------------------------------------------------------------------------------------------------
def test_functions_cast_their_arguments_under_autocast(amp):
    start(amp)
    seen = []

    def note(x, more=()):
        seen.append((x.dtype, *(y.dtype for y in more)))

    half = X.half()
    for cast in (amp.half_function, amp.float_function):
        cast(note)(X, more=[half])
        with torch.autocast(X.device.type, torch.float16):
            cast(note)(X, more=[half])
    plain, low, full = (torch.float32, torch.float16), (torch.float16,) * 2, (torch.float32,) * 2
    assert seen == [plain, low, plain, full]


def test_registered_functions(amp, monkeypatch):
    start(amp)
    holder = type("holder", (), {"multiply": staticmethod(torch.matmul), "Layer": type("Layer", (nn.ReLU,), {})})
    amp.register_float_function(holder, "multiply")
    amp.register_float_function(holder, "Layer")
    with torch.autocast(X.device.type, torch.float16):
        assert holder.multiply(X, X.t()).dtype == torch.float32
        assert holder.Layer()(X.half()).dtype == torch.float32
        with amp.disable_casts():
            assert torch.matmul(X, X.t()).dtype == torch.float32
    assert isinstance(holder.Layer, type)


def test_disable_casts_around_a_call_of_the_model(amp):
    """As around an evaluation in float32: the model's forward, which is under autocast, stays out of it."""
    inside = []

    class Model(nn.Linear):
        def forward(self, x):
            inside.append(super().forward(x).dtype)
            return super().forward(x)

    model, optimizer = Model(4, 2), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    model, _ = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    x = torch.ones(2, 4)
    model(x)
    with amp.disable_casts():
        model(x)
    amp.disable_casts()(model)(x)
    model(x)
    assert inside == [torch.float16, torch.float32, torch.float32, torch.float16]


# -- refusals ----------------------------------------------------------------------------------------------------------
def test_what_is_refused(amp):
    model, optimizer = nn.Linear(4, 2), torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="scale_loss before initialize"), amp.scale_loss(X, optimizer):
        pass
    for call in (amp.state_dict, lambda: amp.load_state_dict({})):
        with pytest.raises(RuntimeError, match="before initialize"):
            call()
    with pytest.raises(RuntimeError, match="'01' is not one of O0, .* the letter O"):
        amp.initialize(model, optimizer, opt_level="01")
    assert "forward" not in vars(model)
    assert not hasattr(optimizer, "_amp_stash")


def test_a_step_and_a_block_inside_of_a_block_are_refused(amp):
    model, optimizer = start(amp, max_loss_scale=2.0**10)
    with amp.scale_loss(model(X).sum(), optimizer) as scaled:
        scaled.backward()
        with pytest.raises(RuntimeError, match="still scaled"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="still scaled"), amp.scale_loss(model(X).sum(), optimizer):
            pass
    assert model.weight.grad.isfinite().all()
    optimizer.step()


@pytest.mark.parametrize("size", [1.0, float("inf")])
def test_an_exception_in_a_block_leaves_what_the_block_has_added(amp, size):
    """An overflow in it skips the step; the scale moves with the next block."""
    model, optimizer = start(amp, max_loss_scale=2.0**10, opt_level="O0", loss_scale="dynamic")
    before = model.weight.detach().clone()
    expected = plain_gradients(model, (1.0, size))
    backward(amp, model, optimizer)
    with contextlib.suppress(KeyError), amp.scale_loss(model(X).pow(2).mean() * size, optimizer) as scaled:
        scaled.backward()
        raise KeyError
    torch.testing.assert_close(model.weight.grad, expected[0], equal_nan=True, rtol=0, atol=0)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**10, "unskipped": 1}}
    optimizer.step()
    assert torch.equal(model.weight, before) == (size != 1.0)
    train(amp, model, optimizer)
    assert scale(amp) == (2.0**10 if size == 1.0 else 2.0**9)


def test_a_scale_whose_count_is_past_the_window_grows(amp):
    model, optimizer = start(amp, Net())
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 5000}})
    with amp.scale_loss(model(X).logits.sum(), optimizer) as scaled:
        scaled.backward()
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 16.0, "unskipped": 0}}
