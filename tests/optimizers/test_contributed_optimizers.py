"""``apex.contrib.optimizers``: other arguments than those of ``apex.optimizers``, and gradients from outside."""

import copy
import inspect
import pickle

import pytest
import torch
from params import SHAPES, make_params, same

from ampcompat import amp, fused_adam_cuda, optimizers
from ampcompat.contrib.optimizers import FusedAdam, FusedLAMB, FusedSGD

pytestmark = pytest.mark.device

HALVES = [torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)

SIGNATURES = {
    FusedAdam: "lr=0.001 bias_correction=True betas=(0.9, 0.999) eps=1e-08 eps_inside_sqrt=False weight_decay=0.0 "
    "max_grad_norm=0.0 amsgrad=False use_mt=False amp_scale_adjustment=1.0",
    FusedSGD: "lr=<required parameter> momentum=0.0 dampening=0.0 weight_decay=0.0 nesterov=False "
    "wd_after_momentum=False materialize_master_grads=True",
    FusedLAMB: "lr=0.001 bias_correction=True betas=(0.9, 0.999) eps=1e-06 weight_decay=0.01 amsgrad=False "
    "adam_w_mode=True grad_averaging=True set_grad_none=True max_grad_norm=1.0",
}


def make_grads(step, dtype=torch.float32):
    torch.manual_seed(100 + step)
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def give(params, grads):
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad


@pytest.mark.parametrize("cls", SIGNATURES, ids=lambda cls: cls.__name__)
def test_arguments_stand_where_they_stood_in_apex(cls):
    parameters = list(inspect.signature(cls).parameters.values())
    assert parameters[0].name == "params"
    assert " ".join(f"{p.name}={p.default}" for p in parameters[1:]) == SIGNATURES[cls]


@pytest.mark.parametrize("cls", [FusedAdam, FusedSGD])
def test_step_takes_what_it_took_in_apex(cls):
    names = ["self", "closure", "grads", "output_params", "scale", "grad_norms"]
    assert list(inspect.signature(cls.step).parameters) == names


def test_amsgrad_is_refused():
    with pytest.raises(RuntimeError, match="FusedAdam does not support the AMSGrad variant"):
        FusedAdam(make_params(), amsgrad=True)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@every_dtype
def test_adam_is_the_rule_of_the_extension(dtype, corrected, inside):
    """Positions of the contributed class: the third argument corrects biases, the sixth puts eps under the root."""
    params, bare = make_params(dtype), [p.detach() for p in make_params(dtype)]
    optimizer = FusedAdam(params, 0.05, corrected, (0.8, 0.99), 1e-3, inside, 0.1)
    m, v = ([torch.zeros_like(p, dtype=torch.float32) for p in bare] for _ in range(2))
    none = torch.tensor([])
    for step in (1, 2, 3):
        grads = make_grads(step, dtype)
        give(params, grads)
        optimizer.step()
        for row in zip(bare, m, v, grads, strict=True):
            p, first, second, grad = row
            numbers = (0.05, 0.8, 0.99, 1e-3, 1.0, step, 0 if inside else 1, int(corrected), 0.1)
            fused_adam_cuda.adam(p, none, first, second, grad, *numbers)
    assert same(params, bare)
    assert [optimizer.state[p]["step"] for p in params] == [3, 3]
    for name, moments in (("exp_avg", m), ("exp_avg_sq", v)):
        assert same([optimizer.state[p][name] for p in params], moments)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_small_gradients_of_half_params_move_them_as_large_ones_do(dtype):
    """Their squares are below the smallest float16: a second moment in it would be 0, and a step 30 times too long."""
    params = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(2)]
    optimizer = FusedAdam(params, lr=0.25, eps=0.0)
    for _ in range(4):
        give(params, [torch.full((3,), value, dtype=dtype) for value in (1.0, 2.0**-14)])
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = FusedAdam(params, lr=0.25, eps=0.0)
        optimizer.load_state_dict(saved)
    assert torch.equal(*params)
    assert {optimizer.state[p][name].dtype for p in params for name in ("exp_avg", "exp_avg_sq")} == {torch.float32}


def test_decay_is_never_turned_off_by_position():
    """``FusedAdam(params, lr, True, betas, eps, False, decay)``: False is ``eps_inside_sqrt``."""
    plain, decayed = make_params(), make_params()
    for params, decay in ((plain, 0.0), (decayed, 0.5)):
        give(params, make_grads(0))
        FusedAdam(params, 0.1, True, (0.9, 0.999), 1e-8, False, decay).step()
    # The bias corrections of a first step are a factor of sqrt(1 - 0.999) / (1 - 0.9) of the learning rate.
    factor = 0.1 * (1 - 0.999) ** 0.5 / (1 - 0.9)
    for p, q, start in zip(plain, decayed, make_params(), strict=True):
        torch.testing.assert_close(p - q, factor * 0.5 * start.detach())


@every_dtype
@pytest.mark.parametrize("as_generator", [False, True])
def test_gradients_and_copies_from_outside(dtype, as_generator):
    params, reference = make_params(), make_params()
    outputs = [p.detach().to(dtype) for p in params]
    first, second = FusedAdam(params, lr=0.05), FusedAdam(reference, lr=0.05)
    for step in range(3):
        grads = make_grads(step, dtype)
        give(reference, [grad.float() for grad in grads])
        given = [grad * 8 for grad in grads]
        first.step(
            grads=(grad for grad in given) if as_generator else given,
            output_params=(p for p in outputs) if as_generator else outputs,
            scale=8.0,
        )
        second.step()
    assert same(params, reference)
    assert same(outputs, [p.to(dtype) for p in params])


def test_a_list_for_each_group():
    params, reference = make_params(), make_params()
    first = FusedAdam([{"params": params[:1]}, {"params": params[1:], "lr": 0.1}], lr=0.05)
    second = FusedAdam([{"params": reference[:1]}, {"params": reference[1:], "lr": 0.1}], lr=0.05)
    grads = make_grads(0)
    first.step(grads=[[grads[0]], [grads[1]]])
    give(reference, grads)
    second.step()
    assert same(params, reference)


@pytest.mark.parametrize("make", [FusedAdam, lambda params: FusedSGD(params, lr=0.1)], ids=["FusedAdam", "FusedSGD"])
def test_lists_that_do_not_match_are_refused_before_anything_changes(make):
    params = make_params()
    before = [p.detach().clone() for p in params]
    optimizer = make([{"params": params[:1]}, {"params": params[1:]}])
    grads = make_grads(0)
    for given in (grads, [[grads[0]]], [[grads[0]], grads]):
        with pytest.raises(ValueError, match=r"step got grads of \[.*\] tensors - its groups have \[1, 1\] params - "):
            optimizer.step(grads=given)
    sparse = torch.zeros(4, device="cpu").to_sparse()  # its device does not matter
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step(grads=[[grads[0]], [sparse]])
    assert same(params, before)
    assert not optimizer.state


@pytest.mark.parametrize("has_norms", [False, True])
def test_each_group_is_clipped_by_its_norm(has_norms):
    params, reference = make_params(), make_params()
    first = FusedAdam([{"params": params[:1]}, {"params": params[1:]}], lr=0.05, eps=0.1, max_grad_norm=0.5)
    second = FusedAdam([{"params": reference[:1]}, {"params": reference[1:]}], lr=0.05, eps=0.1)
    for step in range(3):
        grads = make_grads(step)
        norms = [grad.norm().reshape(1) * 8 for grad in grads] if has_norms else None
        first.step(grads=[[grad * 8] for grad in grads], scale=8.0, grad_norms=norms)
        give(reference, [grad.clone() for grad in grads])
        for p in reference:
            torch.nn.utils.clip_grad_norm_([p], 0.5)
        second.step()
    for p, q in zip(params, reference, strict=True):
        # apex adds 1e-6 to the norm before it divides by the limit, torch adds it to the norm.
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_params_that_begin_later_have_counts_of_their_own():
    params, reference = make_params(), make_params()
    first, second = FusedAdam(params, lr=0.05), [FusedAdam([p], lr=0.05) for p in reference]
    for step in range(3):
        grads = make_grads(step)
        if step == 0:
            grads[1] = None
        first.step(grads=grads)
        for p, grad, optimizer in zip(reference, grads, second, strict=True):
            p.grad = grad
            optimizer.step()
    assert same(params, reference)
    assert [first.state[p]["step"] for p in params] == [3, 2]


def test_a_closure_is_called_with_gradients():
    params = make_params()
    optimizer = FusedAdam(params, lr=0.05)

    def closure():
        assert torch.is_grad_enabled()
        give(params, make_grads(0))
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert optimizer.state[params[0]]["step"] == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_and_checkpoints_go_on_alike(copied):
    params = make_params()
    optimizer = FusedAdam(params, lr=0.05, eps=1e-2, eps_inside_sqrt=True)
    give(params, make_grads(0))
    optimizer.step()
    twin = copied(optimizer)
    loaded_params = [torch.nn.Parameter(p.detach().clone()) for p in params]
    loaded = FusedAdam(loaded_params, lr=0.05, eps=1e-2, eps_inside_sqrt=True)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch loads the tensors themselves
    twins = twin.param_groups[0]["params"]
    for step in (1, 2):
        for owner in (params, twins, loaded_params):
            give(owner, make_grads(step))
        for one in (optimizer, twin, loaded):
            one.step()
    assert same(params, twins)
    assert same(params, loaded_params)


class TestSgd:
    @pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "dampening": 0.2}, {"momentum": 0.9, "nesterov": True}])
    @every_dtype
    def test_gradients_from_outside_are_torchs_rule(self, options, dtype):
        params, reference = make_params(), make_params()
        outputs = [p.detach().to(dtype) for p in params]
        first = FusedSGD(params, lr=0.05, weight_decay=0.1, **options)
        second = torch.optim.SGD(reference, lr=0.05, weight_decay=0.1, **options)
        for step in range(4):
            grads = make_grads(step, dtype)
            first.step(grads=[grad * 8 for grad in grads], output_params=outputs, scale=8.0)
            give(reference, [grad.float() for grad in grads])
            second.step()
        for p, q in zip(params, reference, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)  # other order of operations
        assert same(outputs, [p.to(dtype) for p in params])

    def test_without_them_it_is_the_other_fused_sgd(self):
        params, reference = make_params(), make_params()
        first = FusedSGD(params, lr=0.05, momentum=0.9)
        second = optimizers.FusedSGD(reference, lr=0.05, momentum=0.9)
        for step in range(3):
            give(params, make_grads(step))
            give(reference, make_grads(step))
            first.step()
            second.step()
        assert same(params, reference)


class TestLamb:
    def test_it_has_the_trust_ratio_without_weight_decay_too(self):
        params, reference, without = make_params(), make_params(), make_params()
        options = {"lr": 0.05, "weight_decay": 0.0}
        first, second = FusedLAMB(params, **options), optimizers.FusedLAMB(reference, use_nvlamb=True, **options)
        third = optimizers.FusedLAMB(without, **options)
        for owner, optimizer in ((params, first), (reference, second), (without, third)):
            give(owner, make_grads(0))
            optimizer.step()
        assert same(params, reference)
        assert not torch.equal(params[0], without[0])


MAKERS = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.05, max_grad_norm=1.0),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.05, momentum=0.9, dampening=0.1),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.05),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_under_amp_they_step_and_skip(level, make):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = make(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    x = torch.randn(4, 3)
    for factor in (1.0, float("inf"), 1.0):
        before = [p.detach().clone() for p in amp.master_params(optimizer)]
        with amp.scale_loss(model(x).float().square().mean() * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        after = list(amp.master_params(optimizer))
        assert all(p.isfinite().all() for p in after)
        stays = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert stays == (factor != 1.0)
