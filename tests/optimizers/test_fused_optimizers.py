"""The optimizers as objects: signatures, refusals, checkpoints, copies, schedulers, closures, scaling."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from params import fill_grads, make_params, same

from ampcompat.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

pytestmark = pytest.mark.torch

EVERY = [
    (FusedAdam, {"weight_decay": 0.1}),
    (FusedAdam, {"adam_w_mode": False, "capturable": True, "weight_decay": 0.1}),
    (FusedSGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "wd_after_momentum": True, "weight_decay": 0.1}),
    (FusedSGD, {"lr": 0.05}),
    (FusedLAMB, {"adam_w_mode": False, "use_nvlamb": True}),
    (FusedNovoGrad, {"reg_inside_moment": True, "weight_decay": 0.1}),
    (FusedAdagrad, {"adagrad_w_mode": True, "weight_decay": 0.1}),
]
every = pytest.mark.parametrize(("cls", "options"), EVERY, ids=[f"{c.__name__}{i}" for i, (c, _) in enumerate(EVERY)])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def train(optimizer, params, steps):
    for step in steps:
        fill_grads(params, step)
        optimizer.step()


SIGNATURES = {
    FusedAdam: "lr=0.001 bias_correction=True betas=(0.9, 0.999) eps=1e-08 adam_w_mode=True weight_decay=0.0 "
    "amsgrad=False set_grad_none=True capturable=False master_weights=False",
    FusedLAMB: "lr=0.001 bias_correction=True betas=(0.9, 0.999) eps=1e-06 weight_decay=0.01 amsgrad=False "
    "adam_w_mode=True grad_averaging=True set_grad_none=True max_grad_norm=1.0 use_nvlamb=False",
    FusedNovoGrad: "lr=0.001 bias_correction=True betas=(0.9, 0.999) eps=1e-08 weight_decay=0.0 amsgrad=False "
    "reg_inside_moment=False grad_averaging=True norm_type=2 init_zero=False set_grad_none=True",
    FusedAdagrad: "lr=0.01 eps=1e-10 weight_decay=0.0 set_grad_none=True adagrad_w_mode=False",
    FusedSGD: "lr=<required parameter> momentum=0.0 dampening=0.0 weight_decay=0.0 nesterov=False "
    "wd_after_momentum=False materialize_master_grads=True set_grad_none=False",
}


@pytest.mark.parametrize("cls", SIGNATURES, ids=lambda cls: cls.__name__)
def test_signature_is_apexs(cls):
    parameters = list(inspect.signature(cls).parameters.values())
    assert parameters[0].name == "params"
    positional = [f"{p.name}={p.default}" for p in parameters[1:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert " ".join(positional) == SIGNATURES[cls]


@pytest.mark.parametrize("cls", [FusedAdam, FusedLAMB, FusedNovoGrad])
def test_amsgrad_is_refused(cls):
    with pytest.raises(RuntimeError, match=f"{cls.__name__} does not support the AMSGrad variant"):
        cls(make_params(), amsgrad=True)


def test_sgd_refuses_what_apex_refused():
    with pytest.raises(ValueError, match="lr"):
        FusedSGD(make_params())
    for bad in ({"lr": -1.0}, {"lr": 1.0, "momentum": -1.0}, {"lr": 1.0, "weight_decay": -1.0}):
        with pytest.raises(ValueError, match="Invalid"):
            FusedSGD(make_params(), **bad)
    for bad in ({"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}):
        with pytest.raises(ValueError, match="Nesterov momentum requires"):
            FusedSGD(make_params(), lr=1.0, nesterov=True, **bad)
    FusedSGD([{"params": make_params(), "lr": 0.1}])  # a rate in every group will do


def test_novograd_refuses_other_norms():
    with pytest.raises(RuntimeError, match="only supports l2/inf norm, not norm_type=1"):
        FusedNovoGrad(make_params(), norm_type=1)


def test_old_adam_keywords_are_taken():
    FusedAdam(make_params(), lr=1e-3, bias_correction=False, max_grad_norm=1.0)
    FusedAdam(make_params(), eps_inside_sqrt=False, use_mt=True, amp_scale_adjustment=2.0)
    with pytest.raises(TypeError, match="no_such"):
        FusedAdam(make_params(), no_such=1)


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms"])
def test_old_adam_step_is_refused_before_anything_changes(name):
    params = make_params()
    optimizer = FusedAdam(params)
    fill_grads(params, 0)
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match=f"called with {name}: FusedAdam has been updated"):
        optimizer.step(**{name: [1.0]})
    assert same(before, params)
    assert not optimizer.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_adam_max_grad_norm_clips_each_group(dtype):
    ours = make_params(dtype)
    plain = [torch.nn.Parameter(p.detach().float()) for p in ours]
    old = FusedAdam([{"params": ours[:1]}, {"params": ours[1:]}], lr=0.1, max_grad_norm=0.5, eps=0.1)
    new = FusedAdam(plain, lr=0.1, eps=0.1)
    for step in range(2):
        fill_grads(ours, step)
        for p, q in zip(ours, plain):
            q.grad = p.grad.float()
        old.step()
        torch.nn.utils.clip_grad_norm_(plain[:1], 0.5)
        torch.nn.utils.clip_grad_norm_(plain[1:], 0.5)
        new.step()
    # torch's clip adds 1e-6 to the norm; half params round after each step.
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (2e-3, 1e-4)
    for a, b in zip(ours, plain):
        torch.testing.assert_close(a.float(), b, rtol=rtol, atol=atol)


@every
def test_sparse_gradients_are_refused_before_anything_changes(cls, options):
    params = make_params()
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer = cls([*params, embedding.weight], **options)
    fill_grads(params, 0)
    before = [p.detach().clone() for p in params]
    saved = optimizer.state_dict()
    with pytest.raises(RuntimeError, match=f"{cls.__name__} does not support sparse gradients"):
        optimizer.step()
    assert same(before, params)
    assert optimizer.state_dict() == saved


@every
def test_complex_params_are_refused(cls, options):
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="only supports floating-point params"):
        cls([p], **options).step()


@dtypes
@every
def test_state_dict_round_trip_is_bitwise(cls, options, dtype):
    ours, theirs = make_params(dtype), make_params(dtype)
    first, second = cls(ours, **options), cls(theirs, **options)
    train(first, ours, range(3))
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    with torch.no_grad():
        for p, q in zip(theirs, ours):
            p.copy_(q)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    for p, q in zip(ours, theirs):
        for name, value in first.state[p].items():
            in_full = cls is FusedAdam or value.dim() < p.dim()  # running norms
            assert value.dtype == second.state[q][name].dtype == (torch.float32 if in_full else dtype)
            assert torch.equal(value, second.state[q][name])
    train(first, ours, range(3, 6))
    train(second, theirs, range(3, 6))
    assert same(ours, theirs)


@every
def test_state_dict_is_not_tied_to_the_optimizer_that_loaded_it(cls, options):
    ours, theirs = make_params(), make_params()
    first, second = cls(ours, **options), cls(theirs, **options)
    train(first, ours, range(2))
    saved = first.state_dict()
    frozen = copy.deepcopy(saved)
    second.load_state_dict(saved)
    train(second, theirs, range(2, 4))
    assert saved["param_groups"] == frozen["param_groups"]
    for key, state in frozen["state"].items():
        for name, value in state.items():
            assert torch.equal(value, saved["state"][key][name])


@pytest.mark.cover(2)
@dtypes
@every
@pytest.mark.parametrize(
    "through", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_copies_go_on_alike(cls, options, dtype, through):
    params = make_params(dtype)
    optimizer = cls(params, set_grad_none=True, **options)
    train(optimizer, params, range(2))
    twin_params, twin = through((params, optimizer))
    train(optimizer, params, range(2, 5))
    train(twin, twin_params, range(2, 5))
    assert same(params, twin_params)
    twin.zero_grad()
    assert twin_params[0].grad is None


@every
def test_empty_groups_frozen_and_empty_params(cls, options):
    params = make_params()
    params[1].requires_grad_(False)
    hollow = torch.nn.Parameter(torch.zeros(0))
    hollow.grad = torch.zeros(0)
    optimizer = cls([{"params": params}, {"params": []}, {"params": [hollow]}], **options)
    optimizer.step()
    assert not optimizer.state[params[0]]
    params[0].grad = torch.ones(4, 3)
    optimizer.step()
    assert set(optimizer.state[params[1]]) == set()


@every
def test_closure_runs_once_with_gradients_on_and_gives_the_loss(cls, options):
    params = make_params()
    optimizer = cls(params, **options)
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in params)
        loss.backward()
        losses.append(loss)
        return loss

    before = params[0].detach().clone()
    with torch.no_grad():
        assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1
    assert not torch.equal(before, params[0])


@every
def test_step_hooks_fire_once(cls, options):
    params = make_params()
    optimizer = cls(params, **options)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    train(optimizer, params, range(1))
    assert seen == ["pre", "post"]


@pytest.mark.parametrize("set_grad_none", [True, False])
@every
def test_zero_grad(cls, options, set_grad_none):
    params = make_params()
    optimizer = cls(params, set_grad_none=set_grad_none, **options)
    fill_grads(params, 0)
    optimizer.zero_grad()
    assert all((p.grad is None) == set_grad_none for p in params)
    for explicit in (True, False):
        fill_grads(params, 0)
        optimizer.zero_grad(set_to_none=explicit)
        assert all((p.grad is None) == explicit for p in params)
    assert not params[0].grad.any()


@every
def test_works_under_native_grad_scaler(cls, options):
    ours, plain = make_params(), make_params()
    first, second = cls(ours, **options), cls(plain, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for step, overflow in enumerate([False, True, False]):
        fill_grads(ours, step)
        fill_grads(plain, step)
        scaler.scale(torch.zeros(()))  # makes the scale
        for p in ours:
            p.grad *= scaler.get_scale()
        if overflow:
            ours[0].grad[0, 0] = float("inf")
        scaler.step(first)
        scaler.update()
        if not overflow:
            second.step()
    for a, b in zip(ours, plain):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # bias corrections in float32
    assert scaler.get_scale() == 2.0**3
    assert not hasattr(first, "found_inf")


def test_float16_norms_do_not_overflow():
    """Elements of 300 have squares, and 70000 of them a norm, beyond float16; LAMB must not take them for infinite."""
    p = torch.nn.Parameter(torch.full((70000,), 300.0, dtype=torch.float16))
    p.grad = torch.full_like(p, 300.0)
    optimizer = FusedLAMB([p], lr=0.1)
    optimizer.step()
    # |update| per element is close to 1 + decay * 300 = 4, the trust ratio 300 / 4: every element falls by a tenth.
    torch.testing.assert_close(p.float(), torch.full((70000,), 270.0), rtol=1e-3, atol=0.0)


def test_adam_master_weights_keep_what_half_params_cannot():
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    q = torch.nn.Parameter(torch.ones(4))
    kept = FusedAdam([p, q], lr=1e-5, master_weights=True)
    bare_p = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    bare = FusedAdam([bare_p], lr=1e-5)
    for _ in range(100):
        p.grad, q.grad, bare_p.grad = torch.ones_like(p), torch.ones_like(q), torch.ones_like(bare_p)
        kept.step()
        bare.step()
    assert torch.equal(bare_p, torch.ones_like(bare_p))  # every step was rounded away
    assert torch.equal(p, q.half())
    assert torch.equal(kept.state[p]["master_param"], q.detach())
    with torch.no_grad():
        p[0] = 5.0  # written by somebody else: counts
    p.grad.zero_()
    kept.step()
    assert p[0] > 4.9
    assert torch.equal(p[1:], kept.state[p]["master_param"][1:].half())


def test_checkpoint_in_apexs_form_loads_into_novograd():
    ours, theirs = make_params(), make_params()
    first, second = FusedNovoGrad(ours), FusedNovoGrad(theirs)
    train(first, ours, range(2))
    with torch.no_grad():
        for p, q in zip(theirs, ours):
            p.copy_(q)
    saved = copy.deepcopy(first.state_dict())
    norms = [state.pop("exp_avg_sq") for state in saved["state"].values()]
    saved["param_groups"][0]["exp_avg_sq"] = [torch.zeros(0), torch.stack(norms)]
    second.load_state_dict(saved)
    train(first, ours, range(2, 4))
    train(second, theirs, range(2, 4))
    assert same(ours, theirs)


def test_torch_sgd_checkpoint_loads():
    ours, theirs = make_params(), make_params()
    plain, fused = torch.optim.SGD(theirs, lr=0.1, momentum=0.9), FusedSGD(ours, lr=0.1, momentum=0.9)
    train(plain, theirs, range(2))
    with torch.no_grad():
        for p, q in zip(ours, theirs):
            p.copy_(q)
    fused.load_state_dict(plain.state_dict())
    train(plain, theirs, range(2, 4))
    train(fused, ours, range(2, 4))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # fused and foreach kernels round differently
