"""``apex.fp16_utils.FP16_Optimizer``: masters, overflows, checkpoints and the loss scalers of both generations."""

import io
import pickle
import sys
import types

import pytest
import torch

from ampcompat import install_as_apex
from ampcompat.fp16_utils import DynamicLossScaler, FP16_Optimizer

pytestmark = pytest.mark.device


def make(**options):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).half()
    return model, FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), verbose=False, **options)


def train(model, optimizer, steps=3):
    x = torch.arange(8.0).reshape(2, 4).half() / 8
    for _ in range(steps):
        optimizer.zero_grad()
        optimizer.backward(model(x).float().pow(2).mean())
        optimizer.step()


@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_masters_follow_a_hand_written_loop(scale):
    model, optimizer = make(static_loss_scale=scale)
    twin, _ = make()
    masters = [p.detach().float().requires_grad_() for p in twin.parameters()]
    sgd = torch.optim.SGD(masters, lr=0.5, momentum=0.9)
    x = torch.arange(8.0).reshape(2, 4).half() / 8
    for _ in range(3):
        twin.zero_grad()
        (twin(x).float().pow(2).mean() * scale).backward()
        for m, p in zip(masters, twin.parameters()):
            m.grad = p.grad.float() / scale
        sgd.step()
        with torch.no_grad():
            for m, p in zip(masters, twin.parameters()):
                p.copy_(m)
    train(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    assert all(p.dtype is torch.float32 for g in optimizer.param_groups for p in g["params"])


def test_scripts_write_to_masters_and_push_them():
    """As scripts do after they have loaded masters by hand, or clipped weights: they ask by ``hasattr`` first."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 2).half(), torch.nn.LayerNorm(2))
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.5), verbose=False)
    assert [id(p) for p in optimizer.all_fp16_params] == [id(p) for p in model[0].parameters()]
    assert [id(p) for p in optimizer.all_fp32_from_fp32_params] == [id(p) for p in model[1].parameters()]
    with torch.no_grad():
        for master in optimizer.all_fp32_from_fp16_params:
            master.fill_(0.1)
    assert hasattr(optimizer, "_master_params_to_model_params")
    optimizer._master_params_to_model_params()
    assert all(bool((p == torch.tensor(0.1).half()).all()) for p in model[0].parameters())


def test_scripts_unscale_by_hand():
    """``backward(loss, update_master_grads=False)``, then the parts of ``update_master_grads`` one by one."""
    model, optimizer = make(static_loss_scale=128.0)
    by_hand, other = make(static_loss_scale=128.0)
    x = torch.arange(8.0).reshape(2, 4).half() / 8
    optimizer.backward(model(x).float().pow(2).mean())
    other.backward(by_hand(x).float().pow(2).mean(), update_master_grads=False)
    assert all(p.grad is None for p in other.all_fp32_from_fp16_params)
    other._model_grads_to_master_grads()
    for half, master in zip(other.all_fp16_params, other.all_fp32_from_fp16_params, strict=True):
        assert torch.equal(master.grad, half.grad.float())
        master.grad.div_(other.loss_scale)
    optimizer.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), by_hand.parameters(), strict=True))


def test_the_lists_follow_new_groups():
    _, optimizer = make()
    more = torch.nn.Linear(2, 2).half()
    optimizer.add_param_group({"params": list(more.parameters())})
    assert optimizer.all_fp16_params[-2:] == [more.weight, more.bias]
    assert len(optimizer.all_fp32_from_fp16_params) == 4


def test_overflow_skips_and_says_so(capsys):
    model, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**20})
    optimizer.verbose = True
    before = model.weight.clone()
    optimizer.backward(model(torch.ones(1, 4).half()).sum() * 8)
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert optimizer.loss_scale == 2.0**19
    assert "OVERFLOW! Skipping step. Attempted loss scale: 1048576.0, reducing to 524288.0" in capsys.readouterr().out


def test_resume_is_bitwise_and_loads_weights_only():
    model, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 64, "scale_window": 2})
    train(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, other = make(dynamic_loss_scale=True)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train(again, other)
    assert other.loss_scale == optimizer.loss_scale
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_closure_retries_at_a_lower_scale():
    model, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**18})
    before = model.weight.clone()

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4).half()).sum()
        optimizer.backward(loss)
        return loss

    optimizer.step(closure)
    assert optimizer.loss_scale == 2.0**15  # 2**16 and above overflow float16
    assert not torch.equal(model.weight, before)


def test_closure_with_a_nan_loss_ends():
    model, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 4.0})

    def closure():
        loss = model(torch.full((1, 4), float("nan")).half()).sum()
        optimizer.backward(loss)
        return loss

    with pytest.raises(RuntimeError, match="loss itself is not finite"):
        optimizer.step(closure)


def test_refusals_come_before_any_change():
    model = torch.nn.Linear(2, 2).double()
    with pytest.raises(TypeError, match="float64"):
        FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(TypeError, match="Linear"):
        FP16_Optimizer(model)


def test_scaler_schedule():
    scaler = DynamicLossScaler(init_scale=8, scale_window=2, min_scale=2)
    seen = []
    for overflow in (True, True, True, False, False):
        scaler.update_scale(overflow)
        seen.append(scaler.loss_scale)
    assert seen == [4, 2, 2, 2, 4]
    patient = DynamicLossScaler(init_scale=8, delayed_shift=2)
    patient.update_scale(True)
    assert patient.loss_scale == 8
    patient.update_scale(True)
    assert patient.loss_scale == 4


def test_the_scale_to_begin_with():
    _, optimizer = make(dynamic_loss_scale=True)
    assert optimizer.loss_scale == 2.0**16
    assert make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0})[1].loss_scale == 8.0
    assert make(static_loss_scale=4.0)[1].loss_scale == 4.0
    optimizer.loss_scale = 128
    assert optimizer.loss_scale == 128.0 == optimizer.loss_scaler.cur_scale


def test_the_scaler_is_that_of_apex_from_2019_on():
    _, optimizer = make(dynamic_loss_scale=True)
    scaler = optimizer.loss_scaler
    assert scaler.loss_scale() == optimizer.loss_scale == 2.0**16
    for _ in range(1999):
        scaler.update_scale(False)
    assert scaler.loss_scale() == 2.0**16
    scaler.update_scale(False)
    assert scaler.loss_scale() == 2.0**17
    for _ in range(2000 * 8):
        scaler.update_scale(False)
    assert scaler.loss_scale() == 2.0**24
    arguments = {"init_scale": 64.0, "scale_window": 1, "min_loss_scale": 32.0, "max_loss_scale": 128.0}
    _, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args=arguments)
    seen = []
    for overflow in (True, True, False, False, False):
        optimizer.loss_scaler.update_scale(overflow)
        seen.append(optimizer.loss_scale)
    assert seen == [32.0, 32.0, 64.0, 128.0, 128.0]
    _, static = make(static_loss_scale=128.0)
    assert static.loss_scaler.loss_scale() == 128.0


def test_arguments_of_the_generation_before_choose_its_scaler():
    _, optimizer = make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0, "min_scale": 4.0})
    assert isinstance(optimizer.loss_scaler, DynamicLossScaler)
    assert optimizer.loss_scaler.loss_scale == optimizer.loss_scale == 8.0


SINCE_2019 = {"_max_loss_scale": 2.0**24, "_min_loss_scale": None, "_scale_seq_len": 2000, "_unskipped": 7}
BEFORE_2019 = {"cur_iter": 40, "last_overflow_iter": 30, "scale_factor": 2.0, "scale_window": 1000}


@pytest.mark.parametrize(
    ("home", "kind", "attributes", "scale"),
    [
        ("amp.scaler", "LossScaler", {"dynamic": False, "_loss_scale": 128.0, **SINCE_2019}, 128.0),
        ("amp.scaler", "LossScaler", {"dynamic": True, "_loss_scale": 1024.0, **SINCE_2019}, 1024.0),
        ("fp16_utils.loss_scaler", "LossScaler", {"cur_scale": 128.0}, 128.0),
        ("fp16_utils.loss_scaler", "DynamicLossScaler", {"cur_scale": 1024.0, **BEFORE_2019}, 1024.0),
    ],
)
def test_checkpoints_of_both_generations_load(home, kind, attributes, scale, capsys):
    """The scaler is pickled as an object, by the name of apex's class."""
    model, optimizer = make()
    state = optimizer.state_dict()
    made = type(kind, (), {"__module__": f"apex.{home}"})
    scaler = made()
    vars(scaler).update(attributes)
    apex = {name: types.ModuleType(name) for name in ("apex", f"apex.{home.partition('.')[0]}", f"apex.{home}")}
    setattr(apex[f"apex.{home}"], kind, made)
    sys.modules.update(apex)
    try:
        saved = pickle.dumps(
            {**state, "loss_scaler": scaler, "dynamic_loss_scale": attributes.get("dynamic", "cur_iter" in attributes)}
        )
    finally:
        for name in apex:
            del sys.modules[name]
    install_as_apex()
    optimizer.verbose = True
    optimizer.load_state_dict(pickle.loads(saved))
    assert optimizer.loss_scale == scale
    since = "since" if "_loss_scale" in attributes else "before"
    assert f"loss scale of {scale}, in the form that apex had {since} March 2019" in capsys.readouterr().out
    loaded = optimizer.loss_scaler
    assert (loaded.loss_scale() if since == "since" else loaded.loss_scale) == scale
    assert {name: vars(loaded)[name] for name in attributes} == attributes
    train(model, optimizer)
    assert optimizer.loss_scale == scale
    again = make()[1]
    again.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    assert vars(again.loss_scaler) == vars(loaded)


def test_a_scaler_of_neither_generation_changes_nothing():
    model, optimizer = make(static_loss_scale=4.0)
    with pytest.raises(ValueError, match="March 2019"):
        optimizer.load_state_dict({**optimizer.state_dict(), "loss_scaler": {"scale": 2.0}})
    assert optimizer.loss_scale == 4.0
