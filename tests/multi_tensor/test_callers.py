"""The extensions and the fused optimizers as public code calls them, beside torch's own optimizers and norms.

Each caller is written anew, in the manner of the code that its name gives.
"""

import copy

import pytest
import torch

from ampcompat import amp, amp_C, fused_adam_cuda
from ampcompat.contrib import optimizers as contributed
from ampcompat.multi_tensor_apply import multi_tensor_applier
from ampcompat.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from ampcompat.parallel import LARC

pytestmark = pytest.mark.device

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
SHAPES = [(4, 3), (4,), (2, 2, 2)]
#: A value next to a rounding boundary may round either way, after arithmetic in another order: two ulps of the dtype.
ULPS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def flag():
    return torch.zeros(1, dtype=torch.int)


def make_params(dtype):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def make_grads(step, dtype):
    torch.manual_seed(100 + step)
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def assert_close(ours, theirs, dtype):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=ULPS[dtype], atol=ULPS[dtype])


def twin(params):
    """The params in float32, of torch's optimizers."""
    return [torch.nn.Parameter(p.detach().float().clone()) for p in params]


def round_to(params, dtype):
    """Give float32 ``params`` values of ``dtype``: what a half param keeps of a step."""
    with torch.no_grad():
        for p in params:
            p.copy_(p.to(dtype))


# -- fused_adam_cuda ---------------------------------------------------------------------------------------------------
class FairseqV1(torch.optim.Optimizer):
    """fairseq, ``optim/fused_adam.py: FusedAdamV1``: float32 copies for one step, rounded into the params."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.eps_mode = 1

    def step(self, scale=1.0):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                wide = p.data.float()
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(wide), exp_avg_sq=torch.zeros_like(wide))
                state["step"] += 1
                fused_adam_cuda.adam(
                    wide,
                    p.data,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    p.grad.data,
                    group["lr"],
                    beta1,
                    beta2,
                    group["eps"],
                    scale,
                    state["step"],
                    self.eps_mode,
                    1,
                    group["weight_decay"],
                )


@dtypes
def test_fairseqs_first_adam(dtype):
    ours = make_params(dtype)
    theirs = twin(ours)
    first, second = FairseqV1(ours, lr=0.05), torch.optim.Adam(theirs, lr=0.05)
    for step in range(5):
        for p, q, grad in zip(ours, theirs, make_grads(step, dtype), strict=True):
            p.grad, q.grad = grad * 4, grad.float()
        first.step(scale=4.0)
        second.step()
        round_to(theirs, dtype)
    assert_close(ours, theirs, dtype)


class OpenNMT(torch.optim.Optimizer):
    """OpenNMT-py, ``utils/optimizers.py: FusedAdam``: a copy of apex's contributed class, one kernel for each param."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, eps_inside_sqrt=False, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.eps_mode = 0 if eps_inside_sqrt else 1

    def step(self, closure=None, grads=None, output_params=None, scale=1.0, grad_norms=None):
        grads_by_group = self.by_group(grads)
        outputs_by_group = self.by_group(output_params)
        for group, group_grads, outputs in zip(self.param_groups, grads_by_group, outputs_by_group, strict=True):
            for p, grad, output in zip(group["params"], group_grads, outputs, strict=True):
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p.data), exp_avg_sq=torch.zeros_like(p.data))
                state["step"] += 1
                fused_adam_cuda.adam(
                    p.data,
                    torch.tensor([], dtype=torch.float) if output is None else output,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    p.grad.data if grad is None else grad,
                    group["lr"],
                    *group["betas"],
                    group["eps"],
                    scale,
                    state["step"],
                    self.eps_mode,
                    1,
                    group["weight_decay"],
                )

    def by_group(self, given):
        """A list is that of the one group, a list of lists has one for each."""
        if given is None:
            return [[None] * len(group["params"]) for group in self.param_groups]
        return given if isinstance(given[0], list) else [given]


@dtypes
def test_opennmts_adam_with_half_copies(dtype):
    """It steps masters by half gradients that are still scaled, and writes the model's half params."""
    halves = make_params(dtype)
    masters, theirs = twin(halves), twin(halves)
    first, second = OpenNMT(masters, lr=0.05), torch.optim.Adam(theirs, lr=0.05)
    for step in range(5):
        grads = make_grads(step, dtype)
        for q, grad in zip(theirs, grads, strict=True):
            q.grad = grad.float()
        first.step(grads=[grad * 8 for grad in grads], output_params=[p.data for p in halves], scale=8.0)
        second.step()
        assert all(torch.equal(p, master.to(dtype)) for p, master in zip(halves, masters, strict=True))
    assert_close(masters, theirs, torch.float32)


@dtypes
def test_a_copy_of_the_contributed_adam_with_use_mt(dtype):
    """It passes params, moments, gradients and copies as lists, in this order, and an integer flag."""
    halves = make_params(dtype)
    masters, theirs = twin(halves), twin(halves)
    m, v = ([torch.zeros_like(p) for p in masters] for _ in range(2))
    adam = torch.optim.Adam(theirs, lr=0.05)
    for step in range(1, 5):
        grads = make_grads(step, dtype)
        lists = [[p.data for p in masters], m, v, [grad * 8 for grad in grads], [p.data for p in halves]]
        arguments = (0.05, 0.9, 0.999, 1e-8, 8.0, step, 1, 1, 0.0)
        multi_tensor_applier(fused_adam_cuda.adam_mt, flag(), lists, *arguments)
        for q, grad in zip(theirs, grads, strict=True):
            q.grad = grad.float()
        adam.step()
    assert_close(masters, theirs, torch.float32)
    assert all(torch.equal(p, master.to(dtype)) for p, master in zip(halves, masters, strict=True))


# -- subclasses of the fused optimizers --------------------------------------------------------------------------------
class FairseqV2(FusedAdam):
    """fairseq, ``optim/fused_adam.py: FusedAdamV2``: a step of its own, with the kernel and the flag of the class."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if not hasattr(self, "multi_tensor_adam"):
            raise Exception("Apex installation is outdated")

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            lists = [], [], [], []
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p.data, dtype=torch.float)
                    state["exp_avg_sq"] = torch.zeros_like(p.data, dtype=torch.float)
                row = p.grad.data.float(), p.data.float(), state["exp_avg"], state["exp_avg_sq"]
                for tensors, tensor in zip(lists, row, strict=True):
                    tensors.append(tensor)
            multi_tensor_applier(
                self.multi_tensor_adam,
                self._dummy_overflow_buf,
                list(lists),
                group["lr"],
                *group["betas"],
                group["eps"],
                group["step"],
                self.adam_w_mode,
                1 if group["bias_correction"] else 0,
                group["weight_decay"],
            )
            for p, wide in zip(params, lists[1], strict=True):
                p.data.copy_(wide)


@dtypes
@pytest.mark.parametrize("mode", [True, False], ids=["AdamW", "Adam"])
def test_fairseqs_second_adam(mode, dtype):
    ours = make_params(dtype)
    theirs = twin(ours)
    options = {"lr": 0.05, "weight_decay": 0.1}
    first = FairseqV2(ours, adam_w_mode=mode, **options)
    second = (torch.optim.AdamW if mode else torch.optim.Adam)(theirs, **options)
    for step in range(5):
        for p, q, grad in zip(ours, theirs, make_grads(step, dtype), strict=True):
            p.grad, q.grad = grad, grad.float()
        first.step()
        second.step()
        round_to(theirs, dtype)
    assert_close(ours, theirs, dtype)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_of_its_own_is_skipped_after_an_overflow(level):
    """It knows nothing of the flag that torch's fused optimizers look at: the host must."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = FairseqV2(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    x = torch.randn(4, 3)
    for factor in (1.0, float("inf"), 1.0):
        before = [p.detach().clone() for p in amp.master_params(optimizer)]
        with amp.scale_loss(model(x).square().mean() * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        stays = all(torch.equal(a, b) for a, b in zip(before, amp.master_params(optimizer), strict=True))
        assert stays == (factor != 1.0)
        assert amp.step_was_skipped(optimizer) == (factor != 1.0)


class LambByHand(FusedLAMB):
    """A copy of apex's step in a subclass: a norm of all gradients, then one kernel for each group."""

    norm_is_a_number = False

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = multi_tensor_applier(self.multi_tensor_l2norm, self._dummy_overflow_buf, [grads], False)[0]
        if self.norm_is_a_number:
            norm = norm.item()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = group["params"]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p.data), "exp_avg_sq": torch.zeros_like(p.data)}
            state = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq")]
            multi_tensor_applier(
                self.multi_tensor_lamb,
                self._dummy_overflow_buf,
                [[p.grad for p in params], [p.data for p in params], *state],
                group["lr"],
                *group["betas"],
                group["eps"],
                group["step"],
                1 if group["bias_correction"] else 0,
                group["weight_decay"],
                1 if group["grad_averaging"] else 0,
                self.adam_w_mode,
                norm,
                self.defaults["max_grad_norm"],
                self.use_nvlamb,
            )


@dtypes
@pytest.mark.parametrize("norm_is_a_number", [False, True], ids=["tensor", "number"])
def test_a_subclass_of_lamb(dtype, norm_is_a_number):
    """The norm is a tensor; in copies of 2019 it is a number."""
    ours, theirs = make_params(dtype), make_params(dtype)
    first, second = LambByHand(ours, lr=0.05), FusedLAMB(theirs, lr=0.05)
    first.norm_is_a_number = norm_is_a_number
    for step in range(4):
        for p, q, grad in zip(ours, theirs, make_grads(step, dtype), strict=True):
            p.grad, q.grad = grad, grad.clone()
        first.step()
        second.step()
    assert_close(ours, theirs, dtype)


class NemosAdam(FusedAdam):
    """NeMo, ``core/optim/megatron_fused_adam.py``: masters of the optimizer's, everything else on the device."""

    def __init__(self, params, max_norm, **options):
        super().__init__(params, capturable=True, master_weights=True, **options)
        self.max_norm = max_norm

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        for group, masters in zip(self.param_groups, self.param_groups_master, strict=True):
            device = group["params"][0].device
            found_inf = grad_scaler._check_inf_per_device(self)[device]
            inverse = grad_scaler._get_scale_async().double().reciprocal().float()
            if "step" in group:
                group["step"] += (self._dummy_overflow_buf != 1).to(torch.int)
            else:
                group["step"] = torch.tensor([1], dtype=torch.int, device=device)
            self._dummy_overflow_buf.copy_(found_inf)
            params = group["params"]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {name: torch.zeros_like(p.data).float() for name in ("exp_avg", "exp_avg_sq")}
            grads = [p.grad.data for p in params]
            norm, _ = multi_tensor_applier(amp_C.multi_tensor_unscale_l2norm, flag(), [grads], inverse, False)
            factor = torch.clamp(self.max_norm / (norm.squeeze() + 1.0e-6), max=1.0) * inverse
            moments = [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq")]
            multi_tensor_applier(
                self.multi_tensor_adam_capturable_master,
                self._dummy_overflow_buf,
                [grads, [p.data for p in params], *moments, [master.data for master in masters["params"]]],
                group["lr"],
                *group["betas"],
                group["eps"],
                group["step"],
                self.adam_w_mode,
                1 if group["bias_correction"] else 0,
                group["weight_decay"],
                factor,
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_nemos_adam(dtype):
    """It takes params of these two dtypes alone; float32 ones have masters too, and the first step always counts."""
    ours = make_params(dtype)
    theirs = twin(ours)
    first = NemosAdam(ours, max_norm=0.5, lr=0.05, weight_decay=0.1)
    second = torch.optim.AdamW(theirs, lr=0.05, weight_decay=0.1)
    scaler = torch.amp.GradScaler(ours[0].device.type, init_scale=2.0**6)
    for step, overflows in enumerate([False, False, True, False, False]):
        scaler.scale(torch.zeros(()))  # makes the scale
        factor = float("inf") if overflows else scaler.get_scale()
        for p, q, grad in zip(ours, theirs, make_grads(step, dtype), strict=True):
            p.grad, q.grad = grad * factor, grad.float()
        with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
            scaler.step(first)
        scaler.update()
        if not overflows:
            torch.nn.utils.clip_grad_norm_(theirs, 0.5)
            second.step()
        if step == 2:
            first.load_state_dict(copy.deepcopy(first.state_dict()))
    assert scaler.get_scale() == 2.0**5
    masters = first.param_groups_master[0]["params"]
    for master, q in zip(masters, theirs, strict=True):
        torch.testing.assert_close(master, q.detach(), rtol=1e-5, atol=1e-5)  # the count is on the device, in float32
    for p, master in zip(ours, masters, strict=True):
        assert torch.equal(p, master.to(dtype))


# -- averages and norms ------------------------------------------------------------------------------------------------
@dtypes
def test_quartznets_average_of_a_state_dict(dtype):
    """Its lists are ``state_dict().values()``: ``num_batches_tracked`` of batch norm is an integer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv1d(3, 4, 1), torch.nn.BatchNorm1d(4)).to(dtype)
    average = copy.deepcopy(model)
    weights, averages = list(model.state_dict().values()), list(average.state_dict().values())
    assert torch.int64 in {tensor.dtype for tensor in weights}
    wanted = [tensor.clone() for tensor in averages]
    decay = 0.75
    overflow = flag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        torch.manual_seed(step)
        model(torch.randn(2, 3, 5).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        amp_C.multi_tensor_axpby(65536, overflow, [averages, weights, averages], decay, 1 - decay, -1)
        wanted = [(decay * a.float() + (1 - decay) * w.float()).to(a.dtype) for a, w in zip(wanted, weights)]
    for ours, theirs in zip(averages, wanted, strict=True):
        assert torch.equal(ours, theirs)
    assert average[1].num_batches_tracked.item() > 0
    assert overflow.item() == 0


@dtypes
def test_megatrons_clip(dtype):
    """The norm of all gradients by one kernel, then one that scales them in place."""
    ours, theirs = make_params(dtype), twin(make_params(dtype))
    for step, max_norm in enumerate([0.5, 2.0, 100.0]):
        for p, q, grad in zip(ours, theirs, make_grads(step, dtype), strict=True):
            p.grad, q.grad = grad, grad.float().clone()
        grads = [p.grad.detach() for p in ours]
        overflow = flag()
        norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow, [grads], False)
        coefficient = max_norm / (norm.item() + 1.0e-6)
        if coefficient < 1.0:
            multi_tensor_applier(amp_C.multi_tensor_scale, overflow, [grads, grads], coefficient)
        wanted = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        torch.testing.assert_close(norm, wanted.reshape(1))
        assert_close([p.grad for p in ours], [q.grad for q in theirs], dtype)
        assert overflow.item() == 0


# -- the contributed optimizers ----------------------------------------------------------------------------------------
class VendoredFP16Optimizer:
    """A copy of apex's contributed ``FP16_Optimizer``: the optimizer inside unscales, clips and writes half params."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.model_params = []
        for group in optimizer.param_groups:
            halves = list(group["params"])
            self.model_params.append(halves)
            group["params"] = [p.detach().clone().float() for p in halves]
        self.overflow = flag()
        self.scale = 2.0**10

    def backward(self, loss):
        (loss.float() * self.scale).backward()

    def step(self):
        grads = [[p.grad for p in group] for group in self.model_params]
        self.overflow.zero_()
        norms = []
        for group in grads:
            norms.append(multi_tensor_applier(amp_C.multi_tensor_l2norm, self.overflow, [group], True)[0])
        if self.overflow.item() != 0:
            self.scale /= 2
            return False
        self.optimizer.step(grads=grads, output_params=self.model_params, scale=self.scale, grad_norms=norms)
        return True


CONTRIBUTED = {
    "FusedAdam": (
        lambda params: contributed.FusedAdam(params, lr=0.05),
        lambda params: torch.optim.Adam(params, lr=0.05),
        None,
    ),
    "FusedAdam, clipped": (
        lambda params: contributed.FusedAdam(params, lr=0.05, max_grad_norm=0.5, use_mt=True),
        lambda params: torch.optim.Adam(params, lr=0.05),
        0.5,
    ),
    "FusedSGD": (
        lambda params: contributed.FusedSGD(params, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
        None,
    ),
}


@dtypes
@pytest.mark.parametrize(("make", "make_reference", "max_norm"), CONTRIBUTED.values(), ids=CONTRIBUTED)
def test_a_vendored_fp16_optimizer(make, make_reference, max_norm, dtype):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).to(dtype)
    reference = copy.deepcopy(model)
    ours = VendoredFP16Optimizer(make(model.parameters()))
    masters = twin(reference.parameters())
    theirs = make_reference(masters)
    for step, factor in enumerate([1.0, 1.0, float("inf"), 1.0, 1.0]):
        torch.manual_seed(step)
        x = torch.randn(5, 3).to(dtype)
        model.zero_grad()
        scale = ours.scale
        ours.backward(model(x).float().square().mean() * factor)
        assert ours.step() == (factor == 1.0)
        if factor != 1.0:
            assert ours.scale == scale / 2
            continue
        reference.zero_grad()
        (reference(x).float().square().mean() * scale).backward()
        for master, p in zip(masters, reference.parameters(), strict=True):
            master.grad = p.grad.float() / scale
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters, max_norm)
        theirs.step()
        with torch.no_grad():
            for master, p in zip(masters, reference.parameters(), strict=True):
                p.copy_(master)
    assert_close(model.parameters(), reference.parameters(), dtype)


WRAPPED = {
    "OpenNMT": (lambda params: OpenNMT(params, lr=0.05), lambda params: torch.optim.Adam(params, lr=0.05)),
    "FusedAdam": (CONTRIBUTED["FusedAdam"][0], CONTRIBUTED["FusedAdam"][1]),
    "FusedSGD": (CONTRIBUTED["FusedSGD"][0], CONTRIBUTED["FusedSGD"][1]),
    "FusedLAMB": (
        lambda params: contributed.FusedLAMB(params, lr=0.05),
        lambda params: FusedLAMB(params, lr=0.05, use_nvlamb=True),
    ),
}


@dtypes
@pytest.mark.parametrize(("make", "make_reference"), WRAPPED.values(), ids=WRAPPED)
def test_the_contributed_fp16_optimizer(make, make_reference, dtype):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).to(dtype)
    reference = copy.deepcopy(model)
    ours = contributed.FP16_Optimizer(make(model.parameters()), static_loss_scale=64.0, verbose=False)
    masters = twin(reference.parameters())
    theirs = make_reference(masters)
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(5, 3).to(dtype)
        ours.zero_grad()
        ours.backward(model(x).float().square().mean())
        ours.step()
        reference.zero_grad()
        (reference(x).float().square().mean() * 64).backward()
        for master, p in zip(masters, reference.parameters(), strict=True):
            master.grad = p.grad.float() / 64
        theirs.step()
        with torch.no_grad():
            for master, p in zip(masters, reference.parameters(), strict=True):
                p.copy_(master)
    assert_close(model.parameters(), reference.parameters(), dtype)


# -- LARC and NovoGrad -------------------------------------------------------------------------------------------------
@dtypes
def test_larc_around_fused_sgd(dtype):
    """As in self-supervised training (SwAV): ``LARC(optimizer=..., trust_coefficient=0.001, clip=False)``."""
    ours = make_params(dtype)
    theirs = twin(ours)
    options = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01}
    larc = LARC(optimizer=FusedSGD(ours, **options), trust_coefficient=0.02, clip=False)
    sgd = torch.optim.SGD(theirs, lr=0.5, momentum=0.9)
    buffers_are_rounded = dtype != torch.float32
    for step in range(4):
        for p, q, grad in zip(ours, theirs, make_grads(step, dtype), strict=True):
            rate = 0.02 * q.detach().norm() / (grad.float().norm() + 0.01 * q.detach().norm() + 1e-8)
            p.grad = grad
            q.grad = ((grad.float() + 0.01 * q.detach()) * rate).to(dtype).float()
        larc.step()
        sgd.step()
        round_to(theirs, dtype)
        if buffers_are_rounded:
            round_to([sgd.state[q]["momentum_buffer"] for q in theirs], dtype)
    assert_close(ours, theirs, dtype)


@dtypes
def test_novograd_as_nemo_makes_it(dtype):
    """NeMo's speech recognition: decay inside the moment, no averaging of gradients, betas of 0.95 and 0.25."""
    ours = make_params(dtype)
    plain = [p.detach().float().clone() for p in ours]
    options = {"reg_inside_moment": True, "grad_averaging": False, "betas": (0.95, 0.25)}
    optimizer = FusedNovoGrad(ours, lr=0.05, weight_decay=0.01, **options)
    moments: list = [torch.zeros_like(p) for p in plain]
    squares: list = [None] * len(plain)
    for step in range(1, 5):
        for index, grad in enumerate(make_grads(step, dtype)):
            ours[index].grad = grad
            square = grad.float().square().sum()
            squares[index] = square if squares[index] is None else 0.25 * squares[index] + 0.75 * square
            denominator = (squares[index] / (1 - 0.25**step)).sqrt() + 1e-8
            moments[index] = 0.95 * moments[index] + (grad.float() / denominator + 0.01 * plain[index])
            moments[index] = moments[index].to(dtype).float()
            plain[index] = plain[index] - 0.05 * moments[index] / (1 - 0.95**step)
        optimizer.step()
        round_to(plain, dtype)
    assert_close(ours, plain, dtype)
