"""Every optimizer against the scalar rules: dtypes, groups, weight decay, missing gradients, scaling by amp."""

import inspect
import itertools
import math

import pytest
import scalar_rules
import torch
from real_cuda import on_real_cuda
from seeded import randn

from ampcompat import _torch
from ampcompat.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from ampcompat.parallel.LARC import LARC

pytestmark = pytest.mark.device

CASES = [
    (FusedAdam, scalar_rules.adam, {}),
    (FusedAdam, scalar_rules.adam, {"weight_decay": 0.1}),
    (FusedAdam, scalar_rules.adam, {"adam_w_mode": False, "weight_decay": 0.1}),
    (FusedAdam, scalar_rules.adam, {"bias_correction": False, "weight_decay": 0.01}),
    (FusedAdam, scalar_rules.adam, {"eps_inside_sqrt": True, "eps": 1e-3, "weight_decay": 0.1}),
    (FusedAdam, scalar_rules.adam, {"capturable": True, "betas": (0.0, 0.9)}),
    (FusedSGD, scalar_rules.sgd, {"lr": 0.1}),
    (FusedSGD, scalar_rules.sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (FusedSGD, scalar_rules.sgd, {"lr": 0.1, "momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1}),
    (FusedSGD, scalar_rules.sgd, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (FusedSGD, scalar_rules.sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True}),
    (
        FusedSGD,
        scalar_rules.sgd,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True, "nesterov": True},
    ),
    (FusedSGD, scalar_rules.sgd, {"lr": 0.1, "weight_decay": 0.1, "wd_after_momentum": True}),
    (FusedAdagrad, scalar_rules.adagrad, {}),
    (FusedAdagrad, scalar_rules.adagrad, {"weight_decay": 0.1}),
    (FusedAdagrad, scalar_rules.adagrad, {"weight_decay": 0.1, "adagrad_w_mode": True, "eps": 1e-3}),
    (FusedLAMB, scalar_rules.lamb, {}),
    (FusedLAMB, scalar_rules.lamb, {"weight_decay": 0.0}),
    (FusedLAMB, scalar_rules.lamb, {"weight_decay": 0.0, "use_nvlamb": True}),
    (FusedLAMB, scalar_rules.lamb, {"adam_w_mode": False, "weight_decay": 0.1, "max_grad_norm": 100.0}),
    (FusedLAMB, scalar_rules.lamb, {"grad_averaging": False, "bias_correction": False, "max_grad_norm": 0.0}),
    (FusedNovoGrad, scalar_rules.novograd, {}),
    (FusedNovoGrad, scalar_rules.novograd, {"weight_decay": 0.1, "init_zero": True}),
    (FusedNovoGrad, scalar_rules.novograd, {"weight_decay": 0.1, "reg_inside_moment": True, "norm_type": 0}),
    (FusedNovoGrad, scalar_rules.novograd, {"norm_type": 0, "grad_averaging": False, "bias_correction": False}),
]
IDS = [f"{cls.__name__}-{'-'.join(f'{k}={v}' for k, v in options.items())}" for cls, _, options in CASES]

SHAPES = [(3, 4), (5,), (), (2, 3, 2, 2)]


def make_params(dtype, seed=0):
    torch.manual_seed(seed)
    params = [torch.nn.Parameter(randn(shape).to(dtype)) for shape in SHAPES]
    # One laid out unlike its gradients, one not dense, one all zeros (no trust ratio).
    params[3].data = params[3].data.to(memory_format=torch.channels_last)
    params[1].data = randn(5, 2).to(dtype)[:, 0]
    params.append(torch.nn.Parameter(torch.zeros(3, dtype=dtype)))
    return params


def make_grads(params, step, skip_some=True):
    torch.manual_seed(100 + step)
    for i, p in enumerate(params):
        missing = skip_some and step % 3 == 1 and i in (0, 4)
        grad = randn(p.shape).to(p.dtype)
        p.grad = None if missing else grad


def options_of(cls, options, group):
    signature = inspect.signature(cls.__init__)
    every = {n: q.default for n, q in signature.parameters.items() if q.default is not inspect.Parameter.empty}
    return {**every, **options, **{k: v for k, v in group.items() if k != "params"}}


def flat(tensor):
    return tensor.detach().double().contiguous().flatten().tolist()


def doubles(tensor):
    return torch.tensor(flat(tensor), dtype=torch.float64)


def rounded(values, dtype):
    return torch.tensor(values, dtype=torch.float64).to(dtype).double().tolist()


def stored_in(cls, name, dtype):
    """The dtype that apex kept state in: FusedAdam's and running norms were float32, all else was as the params."""
    in_full = cls is FusedAdam or (cls is FusedNovoGrad and name == "exp_avg_sq")
    return torch.promote_types(dtype, torch.float32) if in_full else dtype


class Reference:
    """A model of the optimizer in Python floats, which rounds where apex's kernels stored a number."""

    def __init__(self, rule, cls, options, groups):
        self.rule, self.cls, self.dtype = rule, cls, groups[0]["params"][0].dtype
        self.groups = [(options_of(cls, options, group), group["params"]) for group in groups]
        self.values = {p: flat(p) for _, params in self.groups for p in params}
        self.state = {p: {} for p in self.values}
        self.count = 0

    def step(self):
        self.count += 1
        grads = {p: flat(p.grad) for p in self.values if p.grad is not None}
        norm = scalar_rules.l2(list(itertools.chain.from_iterable(grads.values())))
        for options, params in self.groups:
            for p in params:
                if p in grads:
                    every = {**options, "global_norm": norm, "rounded": lambda x: rounded(x, self.dtype)}
                    self.rule(self.values[p], grads[p], self.state[p], self.count, every)
                    self.values[p] = rounded(self.values[p], self.dtype)
                    for name, value in self.state[p].items():
                        self.state[p][name] = rounded(value, stored_in(self.cls, name, self.dtype))

    def check(self, optimizer, rtol, atol, state_tol):
        for p, values in self.values.items():
            torch.testing.assert_close(doubles(p), torch.tensor(values, dtype=torch.float64), rtol=rtol, atol=atol)
            for name, value in self.state[p].items():
                wanted = torch.tensor(value if isinstance(value, list) else [value], dtype=torch.float64)
                torch.testing.assert_close(doubles(optimizer.state[p][name]), wanted, rtol=state_tol, atol=state_tol)


# float32: a few roundings a step of 6e-8 each; float64: the same at 1e-16. Half: where float32 and float64 fall on two
# sides of a tie, params and state differ by one rounding, which later steps carry on.
TOLERANCES = {
    torch.float64: (1e-11, 1e-11, 1e-11),
    torch.float32: (2e-5, 2e-6, 2e-5),
    torch.float16: (2e-3, 1e-4, 2e-3),
    torch.bfloat16: (1.6e-2, 1e-3, 1.6e-2),
}


def tolerances(dtype):
    """CUDA's fused kernels may compute 1 - beta2 with a float32 beta2: for 0.999, five digits are left."""
    rtol, atol, state_tol = TOLERANCES[dtype]
    is_wider = dtype == torch.float32 and on_real_cuda()
    return rtol, 1e-5 if is_wider else atol, state_tol


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("cls", "rule", "options"), CASES, ids=IDS)
def test_agrees_with_the_scalar_rule(cls, rule, options, dtype):
    params = make_params(dtype)
    lr = options.get("lr", 0.05)
    groups = [{"params": params[:2], "lr": lr}, {"params": params[2:], "lr": lr / 2, "weight_decay": 0.02}]
    reference = Reference(rule, cls, options, groups)
    optimizer = cls([dict(group) for group in groups], **options)
    for step in range(5):
        make_grads(params, step)
        grads = [None if p.grad is None else p.grad.clone() for p in params]
        reference.step()
        optimizer.step()
        assert all(g is None or torch.equal(g, p.grad) for g, p in zip(grads, params)), "gradients were changed"
    reference.check(optimizer, *tolerances(dtype))
    for state in optimizer.state.values():
        assert all(value.dtype == stored_in(cls, name, dtype) for name, value in state.items())


@pytest.mark.rotate(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("cls", "rule", "options"), CASES, ids=IDS)
def test_half_params_round_where_apexs_kernels_did(cls, rule, options, dtype):
    """Bitwise, but for three elements in a hundred that may be off by an ulp of the largest.

    The rule is computed in float32, the reference in float64: near a tie (of which 0.9 m + 0.1 g of half numbers has
    many) they round to two sides of it, and later steps carry that on.
    """
    torch.manual_seed(0)
    p = torch.nn.Parameter(randn(30, 30).to(dtype))
    options = {"lr": 0.05, **options}
    reference, optimizer = Reference(rule, cls, options, [{"params": [p]}]), cls([p], **options)
    for _ in range(7):
        p.grad = randn(30, 30).to(dtype)
        reference.step()
        optimizer.step()
    pairs = [(p, reference.values[p]), *((v, reference.state[p][k]) for k, v in optimizer.state[p].items())]
    for ours, wanted in pairs:
        off = (doubles(ours) - torch.tensor(wanted, dtype=torch.float64)).abs()
        if ours.dtype == dtype:
            largest = max(map(abs, wanted))
            assert off.max() <= torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest))
            assert (off > 0).double().mean() < 0.03
        else:  # float32 state of half params whose weight decay it sees
            assert off.max() <= torch.finfo(dtype).eps / 10


@pytest.mark.parametrize(("cls", "rule", "options"), CASES, ids=IDS)
def test_the_foreach_path_agrees(cls, rule, options, monkeypatch):
    """It is used on devices without fused kernels."""
    monkeypatch.setattr(_torch, "has_fused_kernels", lambda device: False)
    test_agrees_with_the_scalar_rule(cls, rule, options, torch.float32)


@pytest.mark.cover(2)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("cls", "rule", "options"), CASES, ids=IDS)
def test_found_inf_changes_nothing_and_rolls_the_count_back(cls, rule, options, dtype, fused, monkeypatch):
    if not fused:
        monkeypatch.setattr(_torch, "has_fused_kernels", lambda device: False)
    lr = options.get("lr", 0.05)
    ours, plain = make_params(dtype), make_params(dtype)
    optimizer = cls(ours, **{**options, "lr": lr})
    if not optimizer._step_supports_amp_scaling:
        assert options["dampening"]  # the one rule that must know on the host
        return
    reference = cls(plain, **{**options, "lr": lr})
    scale = torch.tensor(8.0)
    for step, overflow in enumerate([True, False, True, True, False, False]):
        make_grads(ours, step, skip_some=False)
        make_grads(plain, step, skip_some=False)
        for p in ours:
            p.grad *= 8.0  # a power of two: unscaling is exact
        if overflow:
            ours[0].grad[0, 0] = float("inf")
            ours[1].grad[0] = float("nan")
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(2.0 * overflow), scale
        before = [p.detach().clone() for p in ours]
        optimizer.step()
        if overflow:
            assert all(torch.equal(a, b) for a, b in zip(before, ours))
        else:
            reference.step()
    # The same arithmetic but for bias corrections, computed on the device in float32 there.
    rtol = 1e-5 if dtype == torch.float32 else 2e-3
    for a, b in zip(ours, plain):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol / 10)
    steps = [group.get("step") for group in optimizer.state_dict()["param_groups"]]
    assert steps == [group.get("step") for group in reference.state_dict()["param_groups"]]
    assert steps in ([3], [None])


LARC_CASES = [{"clip": True}, {"clip": False}, {"clip": True, "trust_coefficient": 0.5}]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("larc", LARC_CASES, ids=str)
def test_larc_agrees_with_the_scalar_rule(larc, dtype):
    params = make_params(dtype)
    groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.05, "weight_decay": 0.02}]
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    every = {**options, "trust_coefficient": 0.02, "larc_eps": 1e-8, **larc}
    reference = Reference(scalar_rules.larc_then(scalar_rules.sgd), FusedSGD, every, groups)
    optimizer = LARC(FusedSGD([dict(group) for group in groups], **options), **larc)
    for step in range(5):
        make_grads(params, step)
        if step == 2:
            params[1].grad.zero_()  # no gradient at all: no rate, and no decay either
        reference.step()
        optimizer.step()
    reference.check(optimizer, *tolerances(dtype))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.02]


FUSED = {
    "AdamW": (FusedAdam, {"weight_decay": 0.1}, torch.optim.AdamW),
    "Adam": (FusedAdam, {"weight_decay": 0.1, "adam_w_mode": False}, torch.optim.Adam),
    "SGD": (FusedSGD, {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}, torch.optim.SGD),
}


@pytest.mark.parametrize(("cls", "options", "twin"), FUSED.values(), ids=FUSED)
def test_they_are_bitwise_torchs_fused_ones(cls, options, twin):
    ours, theirs = make_params(torch.float32), make_params(torch.float32)
    for p, q in zip(ours, theirs):
        p.data, q.data = p.data.contiguous(), q.data.contiguous()
    of_torch = {name: value for name, value in options.items() if name != "adam_w_mode"}
    a, b = cls(ours, lr=0.05, **options), twin(theirs, lr=0.05, fused=True, **of_torch)
    for step in range(4):
        make_grads(ours, step, skip_some=False)
        make_grads(theirs, step, skip_some=False)
        a.step()
        b.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs))
