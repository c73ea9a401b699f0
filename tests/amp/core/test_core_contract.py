"""apex's surface to the letter: signatures, return shapes, messages, and the private names that scripts use."""

import collections
import importlib
import inspect

import pytest
import torch
from amp_training import INF, backward, loss_of, masters, net, same, sgd, start, train
from python_process import run_python

from ampcompat import amp

NO = inspect.Parameter.empty
SIGNATURES = {
    "initialize": {
        "models": NO,
        "optimizers": None,
        "enabled": True,
        "opt_level": "O1",
        "cast_model_type": None,
        "patch_torch_functions": None,
        "keep_batchnorm_fp32": None,
        "master_weights": None,
        "loss_scale": None,
        "cast_model_outputs": None,
        "num_losses": 1,
        "verbosity": 1,
        "min_loss_scale": None,
        "max_loss_scale": 2.0**24,
    },
    "scale_loss": {
        "loss": NO,
        "optimizers": NO,
        "loss_id": 0,
        "model": None,
        "delay_unscale": False,
        "delay_overflow_check": False,
    },
    "master_params": {"optimizer": NO},
    "state_dict": {"destination": None},
    "load_state_dict": {"state_dict": NO},
    "disable_casts": {},
    "init": {
        "enabled": True,
        "loss_scale": "dynamic",
        "enable_caching": True,
        "verbose": False,
        "allow_banned": False,
    },
    "bfloat16_function": {"fn": NO},
    "half_function": {"fn": NO},
    "float_function": {"fn": NO},
    "promote_function": {"fn": NO},
    "register_bfloat16_function": {"module": NO, "name": NO},
    "register_half_function": {"module": NO, "name": NO},
    "register_float_function": {"module": NO, "name": NO},
    "register_promote_function": {"module": NO, "name": NO},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_apexs(name):
    # What apex did not have can only be given by keyword, after everything that apex had.
    parameters = inspect.signature(getattr(amp, name)).parameters
    ours = [n for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    since = {"initialize": ["patch_torch_functions_type", "keep_fp32"], "init": ["patch_type"]}  # the first: ROCm's
    assert ours == since.get(name, [])
    parameters = {n: p for n, p in parameters.items() if n not in ours}
    assert {n: p.default for n, p in parameters.items()} == SIGNATURES[name]
    assert list(parameters) == list(SIGNATURES[name])
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters.values())


def test_signature_of_the_scaler_starts_with_apexs():
    parameters = inspect.signature(amp.scaler.LossScaler).parameters
    want = {
        "loss_scale": "dynamic",  # apex has no default here
        "init_scale": 2.0**16,
        "scale_factor": 2.0,
        "scale_window": 2000,
        "min_loss_scale": None,
        "max_loss_scale": 2.0**24,
    }
    assert {n: parameters[n].default for n in list(parameters)[:6]} == want


def test_defaults_read_by_inspection_can_be_forwarded():
    defaults = {n: p.default for n, p in inspect.signature(amp.initialize).parameters.items() if p.default is not NO}
    model = net()
    assert amp.initialize(model, **defaults | {"verbosity": 0}) is model


def test_public_names_are_in_the_modules_dict():
    # timm asks `'state_dict' in amp.__dict__`.
    for name in (*SIGNATURES, "_amp_state", "model_param", "step_was_skipped", "sync_masters", "__version__"):
        assert name in amp.__dict__
        assert hasattr(amp, name)
    # Names that apex did not have lead to packages above this one.
    assert set(amp.__all__) - set(amp.__dict__) <= {"explain_overflows", "on_step", "report"}
    assert all(hasattr(amp, name) for name in amp.__all__)


def make():
    model = net()
    return model, sgd(model)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_return_shapes_mirror_the_arguments(level, enabled):
    def call(*args):
        return amp.initialize(*args, opt_level=level, enabled=enabled, verbosity=0)

    m, o = make()
    assert call(m, o) == (m, o)
    m, _ = make()
    assert call(m) is m
    m, _ = make()
    assert call(m, None) is m
    m, _ = make()
    assert call(m, []) == (m, [])
    m, _ = make()
    got = call([m])
    assert list(got) == [m]
    m, o = make()
    models, optimizer = call([m], o)
    assert list(models) == [m]
    assert optimizer is o
    m, o = make()
    model, optimizers = call(m, [o])
    assert model is m
    assert list(optimizers) == [o]
    (a, p), (b, q) = make(), make()
    models, optimizers = call([a, b], [p, q])
    assert list(models) == [a, b]
    assert list(optimizers) == [p, q]
    (a, p), (b, q) = make(), make()
    models, optimizers = call((a, b), (p, q))
    assert list(models) == [a, b]
    assert list(optimizers) == [p, q]


def test_positional_and_keyword_calls():
    m, o = make()
    assert amp.initialize(m, o, True, "O2", None, None, None, None, None, None, 2, 0) == (m, o)
    assert len(amp._amp_state.loss_scalers) == 2
    m, o = make()
    assert amp.initialize(models=m, optimizers=o, opt_level="O2", verbosity=False) == (m, o)
    with amp.scale_loss(loss_of(m), o, 0, m, False, False) as scaled:
        scaled.backward()
    o.step()


def test_what_initialize_prints(capsys):
    m, o = make()
    amp.initialize(m, o, opt_level="O2", loss_scale=128.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ("Selected optimization level O2:  FP16 training with FP32 batchnorm and FP32 master weights.")
    assert lines[1] == "Defaults for this optimization level are:"
    assert "loss_scale             : dynamic" in lines[2:10]
    assert lines[10] == "After processing overrides, optimization options are:"
    assert lines[11:] == [
        "enabled                : True",
        "opt_level              : O2",
        "cast_model_type        : torch.float16",
        "patch_torch_functions  : False",
        "patch_torch_functions_type : None",
        "keep_batchnorm_fp32    : True",
        "master_weights         : True",
        "loss_scale             : 128.0",
    ]


def test_verbosity_0_prints_nothing(capsys):
    model = net()
    amp.initialize(model, sgd(model), opt_level="O1", verbosity=0)
    assert capsys.readouterr().out == ""
    assert amp._amp_state.verbosity == 0


# -- private by underscore, public by use ----------------------------------------------------------------------------
def test_amp_state_before_initialize():
    assert not hasattr(amp._amp_state, "opt_properties")
    assert not hasattr(amp._amp_state, "loss_scalers")
    assert not hasattr(amp._amp_state, "handle")
    assert amp._amp_state.hard_override is False
    assert amp._amp_state.allow_incoming_model_not_fp32 is False
    with pytest.raises(AttributeError, match="amp.initialize has not set it"):
        amp._amp_state.opt_properties  # noqa: B018
    amp._amp_state.mine = 3
    assert amp._amp_state.mine == 3
    del amp._amp_state.mine
    with pytest.raises(AttributeError):
        del amp._amp_state.mine


def test_amp_state_after_initialize():
    start("O2", num_losses=2)
    state = amp._amp_state
    assert (state.opt_properties.enabled, state.opt_properties.master_weights) == (True, True)
    assert state.opt_properties.options["opt_level"] == "O2"
    assert [s.loss_scale() for s in state.loss_scalers] == [2.0**16] * 2
    assert state.handle._is_active is False
    start("O1", model=net(1))
    assert state.handle._is_active is True
    assert state.handle.is_active()
    state.handle._clear_cache()
    state.handle._deactivate()
    assert state.handle._is_active is False
    assert not torch.is_autocast_enabled("cpu")


def test_amp_state_of_a_disabled_call():
    m, o = make()
    amp.initialize(m, o, enabled=False)
    assert amp._amp_state.opt_properties.enabled is False
    assert not hasattr(o, "_amp_stash")


IMPORTS = [
    "from ampcompat import amp; state = amp._amp_state",
    "from ampcompat.amp import _amp_state as state",
    "from ampcompat.amp._amp_state import _amp_state as state",
    "import ampcompat.amp._amp_state; state = ampcompat.amp._amp_state",
    "import ampcompat.amp as amp; import ampcompat.amp._amp_state; state = amp._amp_state",
    "from ampcompat.amp._amp_state import _amp_state as state; from ampcompat import amp; state = amp._amp_state",
    "import importlib; state = importlib.import_module('ampcompat.amp._amp_state')._amp_state",
]


@pytest.mark.parametrize("code", IMPORTS)
def test_amp_state_by_every_import(code):
    space = {}
    exec(code, space)
    start("O2")
    assert [s.loss_scale() for s in space["state"].loss_scalers] == [2.0**16]


def test_amp_state_by_every_import_first_in_a_process():
    # Each form must work when it is the first import of all, too.
    tests = "\n".join(f"run({code!r})" for code in IMPORTS)
    program = f"""
import sys
def run(code):
    for name in [n for n in sys.modules if n.split(".")[0] == "ampcompat"]:
        del sys.modules[name]
    space = {{}}
    exec(code, space)
    assert space["state"].verbosity == 1, code
    assert sys.modules["ampcompat.amp"]._amp_state is space["state"], code
{tests}
import torch
assert not torch.cuda.is_initialized()
print("fine")
"""
    done = run_python(["-c", program])
    assert done.stdout == "fine\n", done.stderr


HOMES = {
    "scaler": ["LossScaler", "master_params"],
    "handle": ["AmpHandle", "NoOpHandle", "scale_loss", "disable_casts", "master_params"],
    "_process_optimizer": ["AmpOptimizerState", "post_backward_models_are_masters"],
    "frontend": ["Properties", "initialize", "state_dict", "load_state_dict", "opt_levels"],
    "_initialize": ["applier"],
    "opt": ["OptimWrapper"],
    "_amp_state": ["_amp_state", "AmpState", "warn_or_err", "maybe_print", "master_params"],
    "amp": ["init", "half_function", "register_float_function"],
    "utils": ["is_nested", "is_fp_tensor", "maybe_half", "maybe_float", "cached_cast", "type_string"],
    "compat": ["filter_attrs"],
    "rnn_compat": ["has_old_rnns"],
}


def test_homes_need_no_import_of_their_own():
    done = run_python(["-c", f"from ampcompat import amp\nprint([n for n in {list(HOMES)} if not hasattr(amp, n)])"])
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("module", HOMES)
def test_homes_of_names_that_people_import(module):
    found = importlib.import_module(f"ampcompat.amp.{module}")
    assert all(hasattr(found, name) for name in HOMES[module])
    assert getattr(amp, module) is (amp._amp_state if module == "_amp_state" else found)
    assert all(getattr(amp, n) is getattr(found, n) for n in HOMES[module] if n in amp.__all__)


def test_helpers_of_apex_that_scripts_import():
    from ampcompat.amp import utils

    half, wide = torch.ones(2).half(), torch.ones(2)
    assert utils.is_fp_tensor([half, wide])
    assert utils.maybe_half([wide])[0].dtype == torch.float16
    assert utils.maybe_float({"a": half})["a"].dtype == torch.float32


def test_cached_cast_keeps_casts_of_what_it_has_seen():
    from ampcompat.amp import utils

    cache = {}
    weight, other = torch.nn.Parameter(torch.ones(2)), torch.ones(3)
    once = utils.cached_cast(utils.maybe_half, weight, cache)
    assert (once.dtype, once.requires_grad) == (torch.float16, True)
    assert utils.cached_cast(utils.maybe_half, weight, cache) is once
    nested = utils.cached_cast(utils.maybe_half, [weight, (other, weight)], cache)
    assert nested[0] is nested[1][1] is once
    assert type(nested[1]) is tuple
    assert nested[1][0].dtype == torch.float16
    once.sum().backward()
    assert weight.grad.tolist() == [1.0, 1.0]


def test_cached_cast_casts_again_where_the_cast_has_no_gradient():
    from ampcompat.amp import utils

    cache = {}
    weight = torch.nn.Parameter(torch.ones(2))
    with torch.no_grad():
        for_evaluation = utils.cached_cast(utils.maybe_half, weight, cache)
        assert utils.cached_cast(utils.maybe_half, weight, cache) is for_evaluation
    for_training = utils.cached_cast(utils.maybe_half, weight, cache)
    assert (for_evaluation.requires_grad, for_training.requires_grad) == (False, True)
    with torch.no_grad():
        assert utils.cached_cast(utils.maybe_half, weight, cache) is for_training


def test_a_level_fills_properties_as_under_apex():
    for name in ("O4", "O5", "O0", "O1", "O2", "O3"):
        level = amp.frontend.opt_levels[name]
        found = level(amp.frontend.Properties())
        assert (found.enabled, found.opt_level) == (True, name)
        assert type(level) is getattr(amp.frontend, name)
    assert found.master_weights is False
    found.loss_scale = "128.0"
    assert found.loss_scale == found.options["loss_scale"] == 128.0
    with pytest.raises(RuntimeError, match="patch_torch_functions=True at O3 - this level casts no"):
        found.patch_torch_functions = True


def test_a_name_that_there_is_not():
    with pytest.raises(AttributeError, match=r"module 'ampcompat.amp' has no attribute 'initialise'"):
        amp.initialise  # noqa: B018
    assert not hasattr(amp, "initialise")


def test_state_dict_into_a_dict_of_the_callers():
    start("O1")
    mine = {"epoch": 3}
    assert amp.state_dict(mine) is mine
    assert mine == {"epoch": 3, "loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 0}}
    assert amp.state_dict(destination=None) == {"loss_scaler0": mine["loss_scaler0"]}


def test_state_dict_is_ordered_and_safe_to_load(tmp_path):
    assert type(amp.state_dict()) is collections.OrderedDict
    start("O1", num_losses=2)
    saved = amp.state_dict()
    assert type(saved) is collections.OrderedDict
    assert list(saved) == ["loss_scaler0", "loss_scaler1"]
    torch.save({"amp": saved}, tmp_path / "checkpoint.pt")
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["amp"]
    assert loaded == saved
    amp.load_state_dict(loaded)


def test_load_state_dict_where_there_is_nothing_to_restore(capsys):
    amp.load_state_dict({})
    assert capsys.readouterr().out == ""
    model, optimizer = make()
    amp.initialize(model, optimizer, enabled=False)
    amp.load_state_dict({})
    with pytest.warns(UserWarning, match=r"after amp.initialize\(enabled=False\): nothing to restore"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}})
    assert amp.state_dict() == {}


def test_version_stays_a_string_when_its_module_is_imported():
    importlib.import_module("ampcompat.amp.__version__")
    from ampcompat.amp import __version__

    assert amp.__version__ == __version__ == importlib.import_module("ampcompat").__version__


def test_warn_or_err_and_maybe_print(capsys):
    from ampcompat.amp._amp_state import maybe_print, warn_or_err

    with pytest.raises(RuntimeError, match="^wrong$"):
        warn_or_err("wrong")
    amp._amp_state.hard_override = True
    warn_or_err("wrong")
    maybe_print("said", True)
    amp._amp_state.verbosity = 0
    maybe_print("not said")
    assert capsys.readouterr().out == "Warning:  wrong\nsaid\n"


def test_hard_override_lets_a_refused_override_through(capsys):
    amp._amp_state.hard_override = True
    m, o = make()
    amp.initialize(m, o, opt_level="O1", master_weights=False, verbosity=0)
    assert "Warning:  master_weights=False at O1" in capsys.readouterr().out
    train(m, o, 1)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_flags_of_the_stash_follow_blocks_and_steps(level):
    model, optimizer = start(level)
    stash = optimizer._amp_stash
    seen = []

    def look():
        seen.append((stash.already_patched, stash.params_have_scaled_gradients))

    look()
    backward(model, optimizer, delay_unscale=True)
    look()
    backward(model, optimizer, times=INF)
    look()
    optimizer.step()
    look()
    assert seen == [(False, False), (False, False), (True, False), (False, False)]
    assert stash.lazy_init_called  # asked by scripts before they step


def test_stash_names_at_o2():
    model, optimizer = start("O2")
    stash = optimizer._amp_stash
    half = [model.a.weight, model.a.bias, model.b.weight, model.b.bias]
    assert [id(p) for p in stash.all_fp16_params] == [id(p) for p in half]
    assert same([m.detach().half() for m in stash.all_fp32_from_fp16_params], [p.detach() for p in half])
    assert [id(p) for p in stash.all_fp32_from_fp32_params] == [id(model.bn.weight), id(model.bn.bias)]


@pytest.mark.parametrize(("level", "half", "single"), [("O0", 0, 6), ("O1", 0, 6), ("O3", 6, 0)])
def test_stash_names_without_masters(level, half, single):
    _, optimizer = start(level)
    stash = optimizer._amp_stash
    assert len(stash.all_fp16_params) == half
    assert len(stash.all_fp32_params) == single
    for name in ("all_fp32_from_fp16_params", "all_fp32_from_fp32_params", "all_fp32_from_fp32_grad_stash"):
        assert not hasattr(stash, name)  # apex's had them with master weights only: scripts take them for masters
    with pytest.raises(AttributeError, match=rf"opt_level='{level}'.*amp\.master_params"):
        stash.all_fp32_from_fp16_params  # noqa: B018


def test_stash_names_at_a_level_that_is_given_masters():
    model, optimizer = start("O3", master_weights=True)
    assert len(optimizer._amp_stash.all_fp32_from_fp16_params) == len(list(model.parameters()))


def test_private_optimizer_methods_as_scripts_call_them():
    model, optimizer = start("O2", loss_scale=8.0)
    optimizer._amp_lazy_init()
    optimizer._lazy_init_maybe_master_weights()
    optimizer._prepare_amp_backward()
    (loss_of(model, 1) * 8.0).backward()
    optimizer._post_amp_backward(amp._amp_state.loss_scalers[0])
    by_hand = [p.grad.clone() for p in amp.master_params(optimizer)]
    optimizer.zero_grad()
    backward(model, optimizer, 1)
    assert same(by_hand, [p.grad for p in amp.master_params(optimizer)])
    with torch.no_grad():
        for param in amp.master_params(optimizer):
            param.mul_(2)
    optimizer._master_params_to_model_params()
    assert torch.equal(model.a.weight, optimizer._amp_stash.all_fp32_from_fp16_params[0].half())
    optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_master_params_at_every_level(level):
    model, optimizer = start(level)
    found = amp.master_params(optimizer)
    assert iter(found) is iter(found)
    params = list(found)
    assert [p.shape for p in params] == [p.shape for p in model.parameters()]
    if level == "O2":
        assert all(p.dtype == torch.float32 and p.is_leaf and p.requires_grad for p in params)
    else:
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    plain_model = net()
    plain = sgd(plain_model)
    assert same(list(amp.master_params(plain)), list(plain_model.parameters()))
    assert same(masters(optimizer), [p.detach() for p in params])


def test_the_optimizer_stays_itself():
    m, o = make()
    groups, inner = o.param_groups, o.param_groups[0]
    got = amp.initialize(m, o, opt_level="O2", verbosity=0)
    assert got == (m, o)
    assert o.param_groups is groups
    assert o.param_groups[0] is inner
    assert type(o) is torch.optim.SGD
    assert inspect.ismethod(o.step)
    assert o.step.__name__ == "step"
    assert o.step.__self__ is o
    again = o.step
    amp.initialize(m, o, opt_level="O2", verbosity=0)
    assert o.step is again  # wrapped once
