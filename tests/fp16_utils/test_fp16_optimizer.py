import functools
import importlib
import io

import pytest
import torch

from ampcompat.fp16_utils import DynamicLossScaler, FP16_Optimizer


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


@pytest.mark.parametrize(
    ("home", "first"), [("fp16_utils", 2.0**32), ("optimizers", 2.0**16), ("contrib.optimizers", 2.0**16)]
)
def test_each_home_of_it_begins_at_the_scale_of_apex(home, first):
    kind = importlib.import_module(f"ampcompat.{home}").FP16_Optimizer
    make = functools.partial(kind, torch.optim.SGD(torch.nn.Linear(2, 2).half().parameters(), lr=0.1), verbose=False)
    optimizer = make(dynamic_loss_scale=True)
    assert optimizer.loss_scale == first
    assert make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0}).loss_scale == 8.0
    assert make(static_loss_scale=4.0).loss_scale == 4.0
    optimizer.loss_scale = 128
    assert optimizer.loss_scale == 128.0 == optimizer.loss_scaler.cur_scale
    if home != "fp16_utils":
        optimizer.cur_scale = 64.0
        assert optimizer.loss_scale == 64.0 == optimizer.cur_scale
