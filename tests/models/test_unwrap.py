"""``amp.unwrap`` gives back what plain PyTorch would have had."""

import copy
import pickle
import warnings

import pytest
import torch
from amp_training import make_step
from nets import LEVELS, Child, Net, Routed, Tied, batch, made, train
from torch import nn

from ampcompat import amp

pytestmark = pytest.mark.torch


def trained(level, kind=Net):
    model, optimizer = made(kind, level)
    train(model, optimizer, 2)
    return model, optimizer


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [Net, Child, Routed, Tied])
def test_plain_class_float32_and_the_weights_of_the_state_dict(level, kind):
    model, _ = trained(level, kind)
    plain = amp.unwrap(model)
    assert type(plain) is kind
    assert all(t.dtype == torch.float32 for t in plain.state_dict().values() if t.is_floating_point())
    for (name, got), (_, want) in zip(plain.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(got, want), name
    assert not any(key.startswith("_amp") for module in plain.modules() for key in module.__dict__)
    assert not any(m._state_dict_hooks or m._load_state_dict_pre_hooks for m in plain.modules())
    reference = kind()
    reference.load_state_dict(plain.state_dict())
    with amp.disable_casts():
        assert torch.equal(plain.eval()(batch()), reference.eval()(batch()))


def test_the_model_goes_on_training_and_shares_nothing():
    model, optimizer = trained("O2")
    plain = amp.unwrap(model)
    before = copy.deepcopy(plain.state_dict())
    make_step(optimizer, model(batch(9)).pow(2).mean())
    assert model.head.weight.dtype == torch.float16
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("level", LEVELS)
def test_under_inference_mode_it_is_a_model_of_normal_tensors(level):
    model, _ = trained(level)
    with torch.inference_mode():
        plain = amp.unwrap(model)
    for (name, got), (_, want) in zip(plain.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(got, want), name
    with amp.disable_casts():
        plain(batch()).sum().backward()
    assert all(param.grad is not None for param in plain.parameters())


def test_its_pickle_does_not_know_ampcompat():
    model, _ = trained("O2")
    assert b"ampcompat" in pickle.dumps(model)
    assert b"ampcompat" not in pickle.dumps(amp.unwrap(model))


def test_wrappers_come_off():
    model, _ = trained("O2")
    assert type(amp.unwrap(nn.DataParallel(model))) is Net
    assert type(amp.unwrap(torch.compile(model, backend="eager"))) is Net
    inside = nn.Sequential(model, nn.Tanh())
    assert type(amp.unwrap(inside)[0]) is Net


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_fx_and_export(level):
    model, _ = trained(level)
    plain = amp.unwrap(model).eval()
    with amp.disable_casts(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export's own deprecations differ between versions
        want = plain(batch())
        assert torch.equal(torch.fx.symbolic_trace(plain)(batch()), want)
        exported = torch.export.export(plain, (batch(),)).module()
        torch.testing.assert_close(exported(batch()), want)
        assert torch.equal(torch.jit.script(plain)(batch()), want)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_scripting_a_model_under_amp_says_to_unwrap_it(level):
    model, _ = trained(level)
    for given in (model, nn.Sequential(nn.Tanh(), model)):
        with pytest.raises(RuntimeError, match=r"got a Net under amp - .* - script amp.unwrap\(model\)"):
            torch.jit.script(given)


def test_a_model_never_initialized_is_copied():
    model = Net()
    plain = amp.unwrap(model)
    assert plain is not model
    assert type(plain) is Net


def test_what_is_not_a_module_is_refused():
    with pytest.raises(TypeError, match="amp.unwrap got int"):
        amp.unwrap(3)
