"""Checkpoints that other libraries wrote; ``tests/data/make_checkpoints.py`` says in which form."""

import warnings
from pathlib import Path

import pytest
import torch
from amp_training import make_step
from torch import nn

from ampcompat import amp

pytestmark = pytest.mark.torch

DATA = Path(__file__).parents[2] / "data"


def recorded(name):
    return torch.load(DATA / f"{name}.pt", weights_only=True)


def net(seed=5):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))


def initialized(level="O2", **options):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, **options})


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_apexs_amp_dict(level, when, capsys):
    saved = recorded("apex_amp")
    if when == "before":
        amp.load_state_dict(saved)
    initialized(level, num_losses=2, verbosity=1)
    if when == "after":
        amp.load_state_dict(saved)
    assert amp.state_dict() == saved
    out = capsys.readouterr().out
    assert "amp.load_state_dict: restored loss scaler 0: loss_scale 32768.0, unskipped 17." in out
    assert "amp.load_state_dict: restored loss scaler 1: loss_scale 131072.0, unskipped 3." in out


KINDS = {
    "a dynamic scale into a static scaler": ("O4", {"loss_scale": 65536.0, "unskipped": 3}, "is static, at 1.0 before"),
    "a scale of one into a dynamic scaler": ("O2", {"loss_scale": 1.0, "unskipped": 3}, "is dynamic, and the saved"),
    "clean passes that no dynamic scaler has": ("O2", {"loss_scale": 128.0, "unskipped": 2000}, "is dynamic, and the"),
    "a static scale into its scaler": ("O4", {"loss_scale": 1.0, "unskipped": 5000}, ""),
    "a dynamic scale into a dynamic scaler": ("O2", {"loss_scale": 128.0, "unskipped": 1999}, ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_of_another_kind_is_loaded_and_said(kind, capsys):
    """apex loaded it too: a static scaler takes the number, a dynamic one moves on from it."""
    level, entry, said = KINDS[kind]
    initialized(level, verbosity=1)
    capsys.readouterr()
    amp.load_state_dict({"loss_scaler0": entry})
    assert amp.state_dict() == {"loss_scaler0": entry}
    restored, _, remark = capsys.readouterr().out.partition(f"unskipped {entry['unskipped']}.")
    assert restored.startswith("amp.load_state_dict: restored loss scaler 0")
    assert remark.startswith(f" This scaler {said}") if said else remark == "\n"


def test_what_we_save_is_what_apex_saved():
    initialized(num_losses=2)
    ours, apexs = amp.state_dict(), recorded("apex_amp")
    assert list(ours) == list(apexs)
    for entry, other in zip(ours.values(), apexs.values(), strict=True):
        assert {k: type(v) for k, v in entry.items()} == {k: type(v) for k, v in other.items()}


@pytest.mark.parametrize("late", [0, 10])
@pytest.mark.parametrize("then", ["forward", "block", "state_dict"])
@pytest.mark.on_cpu
def test_nvidia_berts_master_params(then, late):
    """Its resume: model, amp.initialize, optimizer, amp, then ``.data.copy_`` over the master params."""
    saved = recorded("nvidia_bert")
    model = net()
    model.load_state_dict(saved["model"], strict=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
    amp._amp_state.loss_scalers[0]._loss_scale = 2**20
    for _ in range(late):  # past the first steps, in which masters are compared by value
        make_step(optimizer, model(torch.randn(2, 4)).mean())
        optimizer.zero_grad()
    optimizer.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(saved["optimizer"])
    for param, saved_param in zip(amp.master_params(optimizer), saved["master params"], strict=True):
        param.data.copy_(saved_param.data)
    if then == "forward":
        model(torch.randn(2, 4))
    elif then == "state_dict":
        model.state_dict()
    else:
        with amp.scale_loss(model(torch.randn(2, 4)).mean(), optimizer) as scaled:
            scaled.backward()
    for master, want, half, name in zip(
        amp.master_params(optimizer), saved["master params"], model.parameters(), saved["model"], strict=True
    ):
        assert torch.equal(master, want), name
        assert torch.equal(half, want.half()), name
        assert torch.equal(model.state_dict()[name], want), name
    step = next(iter(optimizer.state.values()))["step"]
    assert step == 3
    if then == "forward":
        assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 1024.0, "unskipped": 3}


@pytest.mark.on_cpu
def test_berts_run_goes_on_bitwise():
    """The masters that were saved, the optimizer's state and the next batch make the step they would have made."""
    saved = recorded("nvidia_bert")
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for param, saved_param in zip(amp.master_params(optimizer), saved["master params"], strict=True):
        param.data.copy_(saved_param.data)
    with amp.scale_loss(model(torch.ones(2, 4)).pow(2).mean() * 2**-10, optimizer) as scaled:
        scaled.backward()
    grads = [p.grad.clone() for p in amp.master_params(optimizer)]
    optimizer.step()

    reference = [nn.Parameter(p.detach().clone()) for p in saved["master params"]]
    other = torch.optim.Adam(reference, lr=0.01)
    other.load_state_dict(recorded("nvidia_bert")["optimizer"])
    for param, grad in zip(reference, grads, strict=True):
        param.grad = grad
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(amp.master_params(optimizer), reference, strict=True))


def test_a_native_grad_scaler_comes_in(capsys):
    initialized("O1", verbosity=1)
    capsys.readouterr()
    amp.load_state_dict(recorded("grad_scaler"))
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 8192.0, "unskipped": 21}}
    out = capsys.readouterr().out
    assert "torch.amp.GradScaler's state" in out
    assert "restored loss scaler 0: loss_scale 8192.0, unskipped 21." in out


def test_the_recorded_grad_scaler_is_what_this_torch_writes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = torch.amp.GradScaler("cpu", init_scale=8192.0)
    scaler._init_growth_tracker = 21
    assert scaler.state_dict() == recorded("grad_scaler")


@pytest.mark.parametrize("used", [False, True])
def test_ours_goes_out_to_a_native_grad_scaler(used):
    model, optimizer = initialized("O1")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0**13, "unskipped": 7}})
    if used:
        make_step(optimizer, model(torch.randn(2, 4)).float().mean())
    ours = amp._amp_state.loss_scalers[0].state_dict()
    native = torch.amp.GradScaler("cpu")
    native.load_state_dict(ours)
    assert native.get_scale() == 2.0**13
    assert native.state_dict()["_growth_tracker"] == 7 + used
    assert native.state_dict().keys() == ours.keys()


def test_a_disabled_native_scaler_is_empty_and_changes_nothing(capsys):
    initialized("O1")
    before = amp.state_dict()
    amp.load_state_dict({})
    assert amp.state_dict() == before


LIGHTNING = [
    ("lightning_1.5", "amp_scaling_state"),
    ("lightning_1.5", "native_amp_scaling_state"),
    ("lightning_1.9", "ApexMixedPrecisionPlugin"),
    ("lightning_1.9", "MixedPrecisionPlugin"),
]


@pytest.mark.parametrize(("file", "key"), LIGHTNING)
def test_lightnings_scaling_state(file, key, capsys):
    """As Lightning itself wrote it, driven by apex's plugin or by its native one."""
    saved = recorded(file)
    model, _ = initialized("O2", verbosity=1)
    capsys.readouterr()
    model.load_state_dict({name.removeprefix("net."): value for name, value in saved["state_dict"].items()})
    amp.load_state_dict(saved[key])
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 8192.0, "unskipped": 12}}
    assert "restored loss scaler 0: loss_scale 8192.0, unskipped 12." in capsys.readouterr().out


@pytest.mark.parametrize("file", [LIGHTNING[0][0], "nvidia_bert"])
def test_a_whole_checkpoint_is_refused(file):
    initialized()
    with pytest.raises(RuntimeError, match=r"not a whole checkpoint: checkpoint\['amp'\]"):
        amp.load_state_dict(recorded(file))
