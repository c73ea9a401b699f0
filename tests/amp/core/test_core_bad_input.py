"""Wrong calls: each is refused with what was passed, the rule and the fix, and changes nothing."""

import re

import pytest
import torch
import torch.nn as nn
from amp_training import Net, net, sgd, train
from internals import is_anything_initialized, view, warnings_given

from ampcompat import amp


class Scene:
    """A plain model and optimizer, and a pair that was initialized at O2, stepped, and has accumulated gradients."""

    def __init__(self):
        self.model, self.optimizer = net(0), None
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.half = net(1)
        self.half.half()
        self.model2, self.optimizer2 = net(2).eval(), None  # its own forward changes no statistics
        self.optimizer2 = sgd(self.model2)

    def initialize(self):
        amp.initialize(self.model2, self.optimizer2, opt_level="O2", num_losses=2, verbosity=0)
        self.accumulate()
        self.optimizer2.step()
        self.optimizer2.zero_grad()
        self.accumulate()

    def accumulate(self):
        with amp.scale_loss(self.loss2(), self.optimizer2) as scaled:
            scaled.backward()

    def loss2(self):
        return self.model2(torch.ones(4, 6)).float().pow(2).mean() * 0.01

    def snapshot(self, torch_state):
        """Everything that a refused call must leave alone."""
        seen = {"torch": torch_state(), "warned": warnings_given()}
        for name in ("model", "half", "model2"):
            model = getattr(self, name)
            seen[name] = (type(model), sorted(model.__dict__), [sorted(m.__dict__) for m in model.modules()])
            tensors = [*model.parameters(), *model.buffers()]
            seen[f"{name} tensors"] = [(id(t), t.dtype, t.tolist()) for t in tensors]
            # A half gradient is spent once a block has folded it into its master's.
            kept = [p for p in model.parameters() if name != "model2" or p.dtype == torch.float32]
            seen[f"{name} gradients"] = [None if p.grad is None else p.grad.tolist() for p in kept]
        for name in ("optimizer", "optimizer2"):
            optimizer = getattr(self, name)
            groups = [(id(g), id(g["params"]), [id(p) for p in g["params"]]) for g in optimizer.param_groups]
            seen[name] = (groups, sorted(optimizer.__dict__), optimizer.step, optimizer.zero_grad)
            params = list(amp.master_params(optimizer))
            seen[f"{name} masters"] = [(p.dtype, p.tolist()) for p in params]
            seen[f"{name} gradients"] = [None if p.grad is None else p.grad.tolist() for p in params]
        seen["amp state"] = view()
        seen["scalers"] = amp.state_dict()
        return seen


def init(**kwargs):
    return lambda s: amp.initialize(s.model, s.optimizer, **{"verbosity": 0, **kwargs})


def enter(loss, optimizers, **kwargs):
    """Run a scale_loss block that backpropagates."""

    def call(s):
        with amp.scale_loss(loss(s), optimizers(s), **kwargs) as scaled:
            scaled.backward()

    return call


def lazy(s):
    return amp.initialize(nn.Sequential(nn.LazyLinear(2)), [], verbosity=0)


def inference(s):
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    return amp.initialize(model, [], verbosity=0)


def in_block(call):
    """Do something in the middle of a block that has not yet gone backward."""

    def run(s):
        with amp.scale_loss(s.loss2(), s.optimizer2):
            call(s)

    return run


def meta(s):
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    return amp.initialize(model, sgd(model), opt_level="O2", verbosity=0)


def without_with(s):
    amp.scale_loss(s.loss2(), s.optimizer2).backward()


def stepped(s):
    return s.loss2()


BAD = float("nan")
opt2 = lambda s: s.optimizer2  # noqa: E731

#: name: (call, exception, message)
BEFORE = {
    "level with a zero": (init(opt_level="01"), RuntimeError, "level '01'.*Did you mean 'O1', with the letter O"),
    "level as a number": (init(opt_level=1), RuntimeError, "level 1 - .*Did you mean 'O1'.*Pass one"),
    "level 0 as a number": (init(opt_level=0), RuntimeError, "level 0 - .*Did you mean 'O0'"),
    "level in lower case": (init(opt_level="o2"), RuntimeError, "level 'o2' - .*Did you mean 'O2'"),
    "level unknown": (init(opt_level="O7"), RuntimeError, "'O7' - options are 'O0', 'O1'.*Pass one of these"),
    "level None": (init(opt_level=None), RuntimeError, "level None - options are"),
    "O1 with half weights": (
        init(opt_level="O1", cast_model_type=torch.float16),
        RuntimeError,
        "cast_model_type=torch.float16 at O1 - .* - use opt_level='O2'",
    ),
    "O1 with keep_batchnorm_fp32": (
        init(opt_level="O1", keep_batchnorm_fp32=True),
        RuntimeError,
        "keep_batchnorm_fp32=True at O1 - .* must be None - leave it out",
    ),
    "O1 with master_weights": (
        init(opt_level="O1", master_weights=True),
        RuntimeError,
        "master_weights=True at O1 - .* - leave it out, or use opt_level='O2'",
    ),
    "O2 with patches": (
        init(opt_level="O2", patch_torch_functions=True),
        RuntimeError,
        "patch_torch_functions=True at O2 - .* - select opt_level='O1' or 'O4' instead",
    ),
    "flag misspelt": (
        init(opt_level="O2", keep_batchnorm_fp32="true"),
        ValueError,
        "keep_batchnorm_fp32='true' - it must be True, False, .* - pass one of these",
    ),
    "flag a tensor": (
        init(opt_level="O2", master_weights=torch.ones(2)),
        ValueError,
        "master_weights=tensor.* - it must",
    ),
    "dtype as a string": (
        init(opt_level="O2", cast_model_type="float16"),
        TypeError,
        "cast_model_type='float16' - it must be torch.float16, .* - pass the dtype object itself",
    ),
    "dtype True": (init(opt_level="O2", cast_model_type=True), TypeError, "cast_model_type=True - it must be"),
    "scale misspelt": (
        init(loss_scale="dynamical"),
        ValueError,
        "loss_scale='dynamical' - it must be 'dynamic' or a positive number .* - pass loss_scale='dynamic' if unsure",
    ),
    "scale 0": (init(loss_scale=0), ValueError, "loss_scale=0 - it must be"),
    "scale not a number": (init(loss_scale=BAD), ValueError, "loss_scale=nan - it must be"),
    "scale infinite": (init(loss_scale=float("inf")), ValueError, "loss_scale=inf - it must be"),
    "scale beyond float32": (init(loss_scale=1e39), ValueError, re.escape("loss_scale=1e+39 - it must be")),
    "scale that float32 rounds to 0": (init(loss_scale="1e-46"), ValueError, "loss_scale='1e-46' - it must be"),
    "scale True": (init(loss_scale=True), ValueError, "loss_scale=True - it must be"),
    "scale a list": (init(loss_scale=[128.0]), ValueError, r"loss_scale=\[128.0\] - it must be"),
    "fewer than no losses": (
        init(num_losses=-1),
        ValueError,
        "num_losses=-1 - it must be an integer from 0 on - pass how many losses",
    ),
    "losses a list": (init(num_losses=[1, 2]), ValueError, r"num_losses=\[1, 2\] - it must be an integer"),
    "minimum 0": (init(min_loss_scale=0), ValueError, "min_loss_scale=0 - it must be a positive number - pass a power"),
    "maximum None": (init(max_loss_scale=None), ValueError, "max_loss_scale=None - it must be a positive number"),
    "minimum above maximum": (
        init(min_loss_scale=64.0, max_loss_scale=32.0),
        ValueError,
        "min_loss_scale=64.0 with max_loss_scale=32.0 - .* - swap or drop one",
    ),
    "outputs a string": (
        init(cast_model_outputs="float32"),
        TypeError,
        "cast_model_outputs='float32' - it must be a floating torch.dtype or None - pass torch.float32",
    ),
    "outputs of integers": (
        init(cast_model_outputs=torch.int64),
        TypeError,
        "cast_model_outputs=torch.int64 - it must",
    ),
    "verbosity a word": (init(verbosity="quiet"), TypeError, "verbosity='quiet' - it must be an integer - pass 0"),
    "verbosity None": (init(verbosity=None), TypeError, "verbosity=None - it must be an integer - pass 0"),
    "no such keyword": (init(level="O1"), TypeError, "unexpected keyword argument 'level'"),
    "model None": (
        lambda s: amp.initialize(None, s.optimizer),
        TypeError,
        "got an object of type NoneType as a model - models must be a torch.nn.Module.* - pass the module itself",
    ),
    "model a class": (
        lambda s: amp.initialize(Net, s.optimizer),
        TypeError,
        "got the class Net as a model - models must",
    ),
    "second model wrong": (
        lambda s: amp.initialize([s.model, 3], s.optimizer, opt_level="O2"),
        TypeError,
        "got an object of type int as a model",
    ),
    "arguments swapped": (
        lambda s: amp.initialize(s.optimizer, s.model),
        TypeError,
        "an object of type SGD as a model",
    ),
    "optimizer a class": (
        lambda s: amp.initialize(s.model, torch.optim.SGD),
        TypeError,
        "got the class SGD as an optimizer - optimizers must be a torch.optim.Optimizer .* - pass the optimizer itself",
    ),
    "second optimizer wrong": (
        lambda s: amp.initialize(s.model, [s.optimizer, None], opt_level="O2"),
        TypeError,
        "got an object of type NoneType as an optimizer",
    ),
    "level where the optimizer belongs": (
        lambda s: amp.initialize(s.model, "O1"),
        TypeError,
        "type str as an optimizer",
    ),
    "half model": (
        lambda s: amp.initialize(s.half, s.optimizer, opt_level="O2"),
        RuntimeError,
        r"parameter 'weight' of a Linear is torch.float16 already - .* - do not call .half\(\)",
    ),
    "bfloat16 layer": (
        lambda s: amp.initialize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()), []),
        RuntimeError,
        "is torch.bfloat16 already",
    ),
    "model wrapped": (
        # Two ids: where there is one GPU, it would move the model there.
        lambda s: amp.initialize(nn.DataParallel(s.model, [0, 0]), s.optimizer),
        RuntimeError,
        "already wrapped in DataParallel - .* - call amp.initialize first and wrap what it returns",
    ),
    "models in a generator": (
        lambda s: amp.initialize((m for m in [s.model]), s.optimizer),
        TypeError,
        "type generator as a model - models must be a torch.nn.Module, or a list",
    ),
    "optimizers in a generator": (
        lambda s: amp.initialize(s.model, (o for o in [s.optimizer]), opt_level="O2"),
        TypeError,
        "type generator as an optimizer - optimizers must be .*, or a list",
    ),
    "meta model": (
        meta,
        RuntimeError,
        "parameter 'weight' of a Linear is on the meta device - .* - move it with to_empty",
    ),
    "lazy model": (lazy, RuntimeError, "of a LazyLinear is uninitialized - .* - run one forward pass"),
    "inference model": (inference, RuntimeError, "made under torch.inference_mode - .* - make the model outside of it"),
    "block before initialize": (
        enter(lambda s: torch.ones(()), lambda s: s.optimizer),
        RuntimeError,
        "Invoked 'with amp.scale_loss', but amp has not been initialized - .*amp.initialize.* must come first",
    ),
    "master_params of a list": (
        lambda s: amp.master_params([s.optimizer]),
        TypeError,
        "master_params got list - it takes an optimizer - pass the optimizer that amp.initialize returned",
    ),
    "sync_masters of an optimizer": (
        lambda s: amp.sync_masters(s.optimizer),
        TypeError,
        "sync_masters got SGD - it takes a model - pass the module",
    ),
    "register a name that is not there": (
        lambda s: amp.register_half_function(torch, "einsumm"),
        ValueError,
        "No function named 'einsumm' in module torch - .* - check the spelling",
    ),
    "register what is not a function": (
        lambda s: amp.register_half_function(torch, "float32"),
        ValueError,
        "'float32' in module torch is a dtype - .* a function or a class - check the name",
    ),
    "decorate None": (
        lambda s: amp.half_function(None),
        TypeError,
        "half_function got an object of type NoneType - it decorates a function or a class - pass",
    ),
    "init with a scale of 0": (lambda s: amp.init(loss_scale=0), ValueError, "loss_scale=0 - it must be"),
}

GOOD = {"loss_scale": 128.0, "unskipped": 3}
loads = lambda value: lambda s: amp.load_state_dict(value)  # noqa: E731
damaged = "a positive finite number and a count are needed - the checkpoint is damaged"

AFTER = {
    "foreign optimizer": (
        enter(stepped, lambda s: s.optimizer),
        RuntimeError,
        r"got a SGD that was not given to amp.initialize - .* - pass the optimizer to amp.initialize",
    ),
    "optimizer None": (
        enter(stepped, lambda s: None),
        TypeError,
        "got NoneType as optimizers - it takes an optimizer or",
    ),
    "optimizer a model": (enter(stepped, lambda s: s.model2), TypeError, "got Net as optimizers - it takes"),
    "optimizers a dict": (
        enter(stepped, lambda s: {"o": s.optimizer2}),
        TypeError,
        "got dict as optimizers - it takes",
    ),
    "arguments of a block swapped": (enter(opt2, stepped), TypeError, "got Tensor as optimizers"),
    "loss a number": (enter(lambda s: 0.5, opt2), TypeError, "got float as the loss - .* - pass the loss itself"),
    "loss None": (enter(lambda s: None, opt2), TypeError, "got NoneType as the loss - it must be a floating tensor"),
    "loss of integers": (enter(lambda s: torch.ones(2).long(), opt2), TypeError, "tensor of torch.int64 as the loss"),
    "loss without grad": (
        enter(lambda s: s.loss2().detach(), opt2),
        RuntimeError,
        "does not require grad and does not have a grad_fn",
    ),
    "loss of two numbers": (
        enter(lambda s: torch.stack([s.loss2()] * 2), opt2),
        RuntimeError,
        "grad can be implicitly created only for scalar outputs",
    ),
    "loss_id too large": (
        enter(stepped, opt2, loss_id=2),
        IndexError,
        r"loss_id=2 - amp.initialize\(num_losses=2\) made scalers 0 to 1 - pass one of these, or a larger num_losses",
    ),
    "loss_id too small": (
        enter(stepped, opt2, loss_id=-3),
        IndexError,
        "loss_id=-3 - .* made scalers 0 to 1 - pass one",
    ),
    "loss_id a string": (
        enter(stepped, opt2, loss_id="G"),
        IndexError,
        "loss_id='G' - .* made scalers 0 to 1 - pass one",
    ),
    "loss_id a tensor": (
        enter(stepped, opt2, loss_id=torch.tensor(0.0, device="cpu")),
        IndexError,
        r"loss_id=tensor\(0.\) - .*",
    ),
    "loss complex": (
        enter(lambda s: torch.ones((), dtype=torch.complex64), opt2),
        TypeError,
        "tensor of torch.complex64 as the loss - it must be a floating tensor",
    ),
    "optimizers with something else in a generator": (
        enter(stepped, lambda s: (one for one in [s.optimizer2, 3])),
        TypeError,
        "got list as optimizers - it takes an optimizer or a list of them",
    ),
    "no with": (without_with, AttributeError, "no attribute 'backward'"),
    "block in a block of the same optimizer": (
        in_block(enter(stepped, opt2)),
        RuntimeError,
        "scale_loss inside a scale_loss block of the same optimizer - .* - close the first block",
    ),
    "step in a block": (
        in_block(lambda s: s.optimizer2.step()),
        RuntimeError,
        r"optimizer.step\(\) inside its scale_loss block - gradients are still multiplied .* - leave the block first",
    ),
    "step with a closure in a block": (
        in_block(lambda s: s.optimizer2.step(lambda: s.loss2())),
        RuntimeError,
        r"optimizer.step\(\) inside its scale_loss block",
    ),
    "initialize in a block": (
        in_block(lambda s: amp.initialize(s.model2, s.optimizer2, opt_level="O2", verbosity=0)),
        RuntimeError,
        "amp.initialize inside a scale_loss block of this SGD - .* - close the block first",
    ),
    "disable in a block": (
        in_block(lambda s: amp.initialize(s.model2, s.optimizer2, enabled=False)),
        RuntimeError,
        "amp.initialize inside a scale_loss block of this SGD - .* - close the block first",
    ),
    "load an optimizer's state": (
        lambda s: amp.load_state_dict(s.optimizer2.state_dict()),
        RuntimeError,
        r"Unexpected key\(s\) in state_dict: \"param_groups\", \"state\"",
    ),
    "wrong level after a good call": (
        lambda s: amp.initialize(s.model2, s.optimizer2, opt_level="O9"),
        RuntimeError,
        "Unexpected optimization level 'O9'",
    ),
    "half layer in an initialized model": (
        lambda s: amp.initialize(nn.Sequential(s.model2, s.half), s.optimizer2, opt_level="O2"),
        RuntimeError,
        "is torch.float16 already",
    ),
    "load a list": (
        loads([GOOD]),
        TypeError,
        r"load_state_dict got list - it takes the dict .* - for a checkpoint, pass checkpoint\['amp'\]",
    ),
    "load None": (loads(None), TypeError, "load_state_dict got NoneType"),
    "load a whole checkpoint": (
        loads({"model": {}, "amp": {"loss_scaler0": GOOD}}),
        RuntimeError,
        r"Unexpected key\(s\) in state_dict: \"amp\", \"model\" - .* - pass what .* checkpoint\['amp'\]",
    ),
    "load half an entry": (
        loads({"loss_scaler0": {"loss_scale": 2.0}}),
        ValueError,
        "must be a dict with 'loss_scale'",
    ),
    "load a scale of 0": (loads({"loss_scaler0": {"loss_scale": 0.0, "unskipped": 0}}), ValueError, damaged),
    "load a second scale that is NaN": (
        loads({"loss_scaler0": GOOD, "loss_scaler1": {"loss_scale": BAD, "unskipped": 0}}),
        ValueError,
        "loss_scaler1 has loss_scale=nan, unskipped=0 - " + damaged,
    ),
    "load a scale that float32 rounds to 0": (
        loads({"loss_scaler0": GOOD, "loss_scaler1": {"loss_scale": 1e-46, "unskipped": 0}}),
        ValueError,
        "loss_scaler1 has loss_scale=1e-46, unskipped=0 - " + damaged,
    ),
    "load a scale beyond float32": (
        loads({"loss_scaler0": GOOD, "loss_scaler1": {"loss_scale": 1e39, "unskipped": 0}}),
        ValueError,
        re.escape("loss_scaler1 has loss_scale=1e+39, unskipped=0 - ") + damaged,
    ),
    "load a scale of words": (loads({"loss_scaler0": {"loss_scale": "big", "unskipped": 0}}), ValueError, damaged),
    "load a negative count": (loads({"loss_scaler0": {"loss_scale": 2.0, "unskipped": -1}}), ValueError, damaged),
    "load a damaged GradScaler": (
        loads({"scale": 0.0, "_growth_tracker": 0}),
        ValueError,
        "GradScaler has loss_scale=0.0",
    ),
    "state_dict into a list": (
        lambda s: amp.state_dict([]),
        TypeError,
        "state_dict got list as destination - it must be a dict or None - leave it out",
    ),
    "closure that is not a function": (lambda s: s.optimizer2.step(3), TypeError, "'int' object is not callable"),
    "param group without params": (lambda s: s.optimizer2.add_param_group({"lr": 1.0}), KeyError, "params"),
    "param group twice": (
        lambda s: s.optimizer2.add_param_group({"params": [s.model2.bn.weight]}),
        ValueError,
        "some parameters appear in more than one parameter group",
    ),
    "half param group twice": (
        lambda s: s.optimizer2.add_param_group({"params": [s.model2.a.weight]}),
        ValueError,
        "some parameters appear in more than one parameter group",
    ),
}


def check(call, error, message, scene, capsys, torch_state):
    before = scene.snapshot(torch_state)
    capsys.readouterr()
    with pytest.raises(error) as caught:
        call(scene)
    assert type(caught.value) is error
    text = " ".join(str(caught.value).split())
    assert re.search(message, text), text
    assert scene.snapshot(torch_state) == before
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", BEFORE)
def test_refused_before_anything_was_initialized(name, capsys, torch_state):
    check(*BEFORE[name], Scene(), capsys, torch_state)
    assert not is_anything_initialized()


@pytest.mark.rotate(3)
@pytest.mark.parametrize("name", [name for name in (*BEFORE, *AFTER) if name != "block before initialize"])
@pytest.mark.on_cpu
def test_refused_beside_a_running_model(name, capsys, torch_state):
    scene = Scene()
    scene.initialize()
    check(*(BEFORE | AFTER)[name], scene, capsys, torch_state)
    # The running model goes on as if nothing had been called.
    twin = Scene()
    twin.initialize()
    for one in (scene, twin):
        one.accumulate()
        one.optimizer2.step()
    assert [p.tolist() for p in scene.model2.parameters()] == [p.tolist() for p in twin.model2.parameters()]


@pytest.mark.parametrize(
    ("enabled", "level", "meant"),
    [("O2", "O1", "O2"), ("02", "O1", "O2"), ("o3", "O1", "O3"), ("O1", "O2", "O1"), ("O9", "O9", None)],
)
def test_another_level_in_the_place_of_enabled(enabled, level, meant, capsys):
    model = net()
    rule = f"got '{enabled}' as its third argument, which is enabled, while opt_level='{level}' - .*opt_level='{meant}'"
    error = (RuntimeError, "Unexpected optimization level 'O9'") if meant is None else (TypeError, rule)
    with pytest.raises(error[0], match=error[1]):
        amp.initialize(model, sgd(model), enabled, level)
    assert type(model) is Net
    assert not is_anything_initialized()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("enabled", "rest", "level"),
    [
        ("O1", (), "O1"),
        ("01", (), "O1"),
        ("O2", ("O2",), "O2"),
        ("dynamic", (), "O1"),
        ("False", (), "O1"),
        (1, (), "O1"),
    ],
)
def test_what_is_true_in_the_place_of_enabled_enables(enabled, rest, level, capsys):
    model = net()
    model, optimizer = amp.initialize(model, sgd(model), enabled, *rest, verbosity=0)
    assert amp._amp_state.opt_properties.opt_level == level
    assert amp._amp_state.opt_properties.enabled is True
    train(model, optimizer)
    printed = capsys.readouterr()
    assert printed.out == ""
    if enabled == 1:
        assert printed.err == ""
    else:
        (line,) = printed.err.splitlines()
        assert f"got enabled={enabled!r} (its third argument)" in line
        assert f"amp is on, at {level}" in line


def test_an_empty_string_disables_as_under_apex(capsys):
    model = net()
    amp.initialize(model, sgd(model), "")
    assert type(model) is Net
    assert amp._amp_state.opt_properties.enabled is False
    (line,) = capsys.readouterr().err.splitlines()
    assert "amp is off" in line


@pytest.mark.parametrize(("third", "outside"), [("O1", "O2"), ("O2", "O2"), ("O2", "O3")])
def test_a_level_from_env_overrides_one_as_enabled(third, outside, monkeypatch, capsys):
    monkeypatch.setenv("AMPCOMPAT_OPT_LEVEL", outside)
    model = net()
    amp.initialize(model, sgd(model), third, verbosity=0)
    assert amp._amp_state.opt_properties.opt_level == outside
    assert f"amp is on, at {outside}" in capsys.readouterr().err


class Scripted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.inner = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.jit.script(torch.nn.Linear(2, 2)))

    def forward(self, x):
        return self.inner(self.a(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_scripted_submodule_is_refused_by_name(level):
    """``initialize`` names it, at the levels that cast weights."""
    model = Scripted()
    with pytest.raises(RuntimeError, match=f"the scripted submodule 'inner.0' at opt_level='{level}' - .* - script it"):
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    assert type(model) is Scripted
    assert {p.dtype for p in model.parameters()} == {torch.float32}
