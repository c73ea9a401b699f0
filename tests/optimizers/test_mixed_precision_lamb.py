"""FusedMixedPrecisionLamb: LAMB with float32 masters of its own, driven by torch's GradScaler."""

import copy
import inspect
import io

import pytest
import torch
from params import fill_grads, make_params, same

from ampcompat.optimizers import FusedLAMB, FusedMixedPrecisionLamb

pytestmark = [pytest.mark.device, pytest.mark.torch]

HALF = [torch.float16, torch.bfloat16]
halves = pytest.mark.parametrize("dtype", HALF, ids=str)


def test_signatures_are_apexs():
    parameters = list(inspect.signature(FusedMixedPrecisionLamb).parameters.values())
    assert parameters[0].name == "params"
    assert " ".join(f"{p.name}={p.default}" for p in parameters[1:]) == (
        "lr=0.001 step=0 bias_correction=True betas=(0.9, 0.999) eps=1e-06 weight_decay=0.01 amsgrad=False "
        "adam_w_mode=True grad_averaging=True max_grad_norm=1.0 use_nvlamb=False reduced_precision_dtype=None"
    )
    assert list(inspect.signature(FusedMixedPrecisionLamb.step).parameters) == ["self", "closure", "grad_scaler"]
    with pytest.raises(RuntimeError, match="FusedMixedPrecisionLamb does not support the AMSGrad variant"):
        FusedMixedPrecisionLamb(make_params(torch.float32), amsgrad=True)


def test_lr_and_step_are_tensors_of_each_group():
    a, b = make_params(torch.float32)
    optimizer = FusedMixedPrecisionLamb([{"params": [a]}, {"params": [b], "lr": 0.5}], lr=0.1, step=3)
    optimizer.add_param_group({"params": make_params(torch.float32)})
    for group, lr in zip(optimizer.param_groups, (0.1, 0.5, 0.1), strict=True):
        assert group["lr"].dtype == torch.float32
        assert group["lr"].item() == pytest.approx(lr)
        assert group["step"].dtype == torch.int32
        assert group["step"].tolist() == [3]
    fill_grads([a, b], 0)
    optimizer.step()
    assert [group["step"].item() for group in optimizer.param_groups] == [4, 4, 4]
    optimizer.param_groups[0]["lr"].fill_(0.0)
    assert optimizer.param_groups[2]["lr"].item() == pytest.approx(0.1), "groups share nothing"


@halves
def test_half_params_follow_float32_masters(dtype):
    params = make_params(dtype)
    plain = [torch.nn.Parameter(p.detach().float()) for p in params]
    ours = FusedMixedPrecisionLamb(params, lr=0.1, reduced_precision_dtype=dtype)
    reference = FusedLAMB(plain, lr=0.1)
    for step in range(5):
        fill_grads(params, step)
        for p, q in zip(params, plain):
            q.grad = p.grad.float()
        ours.step()
        reference.step()
    masters = ours.param_groups_full_precision[0]["params"]
    for p, q, master in zip(params, plain, masters, strict=True):
        assert torch.equal(p, master.to(dtype))
        assert ours.state[p]["exp_avg"].dtype == ours.state[p]["exp_avg_sq"].dtype == torch.float32
        # The update is rounded to the dtype of the gradients, as in apex, and step and lr are float32 tensors.
        torch.testing.assert_close(master, q.detach(), rtol=0.0, atol=5 * 0.1 * torch.finfo(dtype).eps)
    assert not same(masters, [p.float() for p in params])


def test_params_of_another_dtype_have_no_master():
    params = [*make_params(torch.float16), *make_params(torch.float32)]
    optimizer = FusedMixedPrecisionLamb(params, reduced_precision_dtype=torch.float16)
    fill_grads(params, 0)
    optimizer.step()
    kept = optimizer.param_groups_full_precision[0]["params"]
    assert [master is None for master in kept] == [False, False, True, True]
    bare = make_params(torch.float16)
    optimizer = FusedMixedPrecisionLamb(bare)
    fill_grads(bare, 0)
    optimizer.step()
    assert optimizer.param_groups_full_precision[0]["params"] == [None, None]
    assert optimizer.state[bare[0]]["exp_avg"].dtype == torch.float16


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["scaler.step", "step(grad_scaler)"])
def test_grad_scaler_skips_and_unscales(by_hand, unscale):
    ours, plain = make_params(torch.float32), make_params(torch.float32)
    first = FusedMixedPrecisionLamb(ours, lr=0.1)
    second = FusedMixedPrecisionLamb(plain, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for step, overflow in enumerate([True, False, True, False]):
        fill_grads(plain, step)
        scaler.scale(torch.zeros(()))  # makes the scale
        fill_grads(ours, step, scaler.get_scale())
        if overflow:
            ours[0].grad[0, 0] = float("inf")
        if unscale:
            scaler.unscale_(first)
        if by_hand:
            first.step(grad_scaler=scaler)
        else:
            scaler.step(first)
        scaler.update()
        if not overflow:
            second.step()
    assert same(ours, plain)
    assert first.param_groups[0]["step"].tolist() == [2]
    assert scaler.get_scale() == 2.0**2
    assert not hasattr(first, "found_inf")


def test_a_disabled_grad_scaler_changes_nothing():
    ours, plain = make_params(torch.float32), make_params(torch.float32)
    first, second = FusedMixedPrecisionLamb(ours), FusedMixedPrecisionLamb(plain)
    fill_grads(ours, 0)
    fill_grads(plain, 0)
    first.step(grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    second.step()
    assert same(ours, plain)


@halves
def test_resume_is_bitwise_low_bits_of_masters_included(dtype):
    ours, theirs = make_params(dtype), make_params(dtype, seed=1)
    first = FusedMixedPrecisionLamb(ours, lr=0.1, reduced_precision_dtype=dtype)
    second = FusedMixedPrecisionLamb(theirs, lr=0.2, step=9, reduced_precision_dtype=dtype)
    for step in range(3):
        fill_grads(ours, step)
        first.step()
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    with torch.no_grad():
        for p, q in zip(theirs, ours):
            p.copy_(q)
    second.load_state_dict(saved)
    twin_params, twin = copy.deepcopy((ours, first))
    for step in range(3, 6):
        for params, optimizer in ((ours, first), (theirs, second), (twin_params, twin)):
            fill_grads(params, step)
            optimizer.step()
    for params, optimizer in ((theirs, second), (twin_params, twin)):
        assert same(ours, params)
        assert same(first.param_groups_full_precision[0]["params"], optimizer.param_groups_full_precision[0]["params"])
        assert optimizer.param_groups[0]["step"].tolist() == [6]
        assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.1)
    assert saved["param_groups"][0]["step"].tolist() == [3], "saved values stay"


def test_checkpoint_of_ints_loads():
    params = make_params(torch.float32)
    lamb = FusedLAMB(make_params(torch.float32), lr=0.3)
    fill_grads(lamb.param_groups[0]["params"], 0)
    lamb.step()
    optimizer = FusedMixedPrecisionLamb(params)
    optimizer.load_state_dict(lamb.state_dict())
    group = optimizer.param_groups[0]
    assert group["step"].tolist() == [1]
    assert group["lr"].item() == pytest.approx(0.3)


def test_schedulers_set_the_tensor():
    params = make_params(torch.float32)
    optimizer = FusedMixedPrecisionLamb(params, lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    fill_grads(params, 0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.25)


def test_masters_stay_in_their_memory():
    """A CUDA graph replays on the addresses that were captured."""
    params = make_params(torch.float16)
    optimizer = FusedMixedPrecisionLamb(params, reduced_precision_dtype=torch.float16)
    places = set()
    for step in range(3):
        fill_grads(params, step)
        optimizer.step()
        group = optimizer.param_groups[0]
        held = [*optimizer.param_groups_full_precision[0]["params"], group["step"], group["lr"]]
        places.add(tuple(t.data_ptr() for t in held))
    assert len(places) == 1
