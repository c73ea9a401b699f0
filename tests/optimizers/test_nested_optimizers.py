"""Optimizers that hold another one, and are given to ``amp.initialize`` by the outer or by the inner."""

import copy
import functools
import math
import warnings

import pytest
import torch
from amp_training import make_step
from seeded import seeded
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from ampcompat import amp
from ampcompat.parallel import LARC

pytestmark = pytest.mark.torch

SGD = {"lr": 0.05, "momentum": 0.9}


class Lookahead(torch.optim.Optimizer):
    """Slow weights in the inner optimizer's state, as in timm."""

    def __init__(self, base, alpha=0.5, k=6):
        super().__init__(base.param_groups, {})
        self._base_optimizer, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.alpha, self.k, self.count = alpha, k, 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = self._base_optimizer.step(closure)
        self.count += 1
        for group in self.param_groups if self.count % self.k == 0 else ():
            for param in group["params"]:
                if param.grad is not None:
                    state = self._base_optimizer.state[param]
                    slow = state.setdefault("slow", param.clone())
                    slow.add_(param - slow, alpha=self.alpha)
                    param.copy_(slow)
        return loss


class EagerLookahead(torch.optim.Optimizer):
    """Slow weights copied by the constructor and written past the version counters."""

    def __init__(self, base, alpha=0.5, k=6):
        self.optimizer, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.slow = [[p.clone().detach() for p in group["params"]] for group in base.param_groups]
        self.alpha, self.k, self.count = alpha, k, 0

    @property
    def state(self):
        return self.optimizer.state

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        for group, slows in zip(self.param_groups, self.slow, strict=True) if self.count % self.k == 0 else ():
            for param, slow in zip(group["params"], slows, strict=True):
                slow.data.add_(param.data - slow.data, alpha=self.alpha)
                param.data.copy_(slow.data)
        return loss


class SAM(torch.optim.Optimizer):
    """Stepped in two pieces; only the second one calls a ``step``, the inner one's."""

    def __init__(self, params, base, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def params(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.stack([p.grad.norm() for p in self.params()]).norm()
        for param in self.params():
            self.state[param]["old"] = param.data.clone()
            param.add_(param.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for param in self.params():
            param.data = self.state[param]["old"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure=None):
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss


class Engine:
    """No ``Optimizer``: passes everything on, as the wrappers of DeepSpeed do."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(vars(self)["optimizer"], name)

    def step(self, *args, **kwargs):
        return self.optimizer.step(*args, **kwargs)


class Several:
    """A list of optimizers instead of one."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    param_groups = property(lambda self: [group for one in self.optimizers for group in one.param_groups])
    state = property(lambda self: {p: held for one in self.optimizers for p, held in one.state.items()})

    def step(self):
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none=True):
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def add_param_group(self, group):
        self.optimizers[0].add_param_group(group)


class OwnGroups(torch.optim.Optimizer):
    """Outer and inner optimizer have groups of their own."""

    def __init__(self, params, **options):
        params = list(params)
        super().__init__(params, options)
        self.inside = torch.optim.SGD(params, **options)

    def step(self, closure=None):
        return self.inside.step(closure)


class Distributed:
    """What Horovod mixes into the class of the optimizer that it is given."""

    def synchronize(self):
        for group in self.param_groups:
            assert all(p.grad is not None for p in group["params"])


class Net(torch.nn.Sequential):
    def __init__(self):
        torch.manual_seed(3)
        super().__init__(torch.nn.Linear(4, 16), torch.nn.LayerNorm(16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


def sgd(model):
    return torch.optim.SGD(model.parameters(), **SGD)


def horovod(model):
    optimizer = sgd(model)
    kind = type("SGD", (torch.optim.SGD,), {"synchronize": Distributed.synchronize})
    return kind(optimizer.param_groups, **SGD)


KINDS = {
    "LARC": lambda model: LARC(sgd(model), trust_coefficient=0.5),
    "Lookahead": lambda model: Lookahead(sgd(model)),
    "EagerLookahead": lambda model: EagerLookahead(sgd(model)),
    "SAM": lambda model: SAM(model.parameters(), torch.optim.SGD, **SGD),
    "SAM with closure": lambda model: SAM(model.parameters(), torch.optim.SGD, **SGD),
    "Engine": lambda model: Engine(sgd(model)),
    "Engine of LARC of Lookahead": lambda model: Engine(LARC(Lookahead(sgd(model)), trust_coefficient=0.5)),
    "Several": lambda model: Several(
        torch.optim.SGD(model[0].parameters(), **SGD),
        torch.optim.SGD([*model[1].parameters(), *model[3].parameters()], **SGD),
    ),
    "Horovod": horovod,
}
X = torch.randn(32, 4, generator=seeded(1))
Y = torch.stack([X.sum(1), X[:, 0] * X[:, 1]], 1)


def error(model):
    return (model(X).float() - Y).pow(2).mean()


def inner(optimizer):
    return next(value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer))


@functools.cache
def train(kind, level=None, given="outer", bad=(), before=0):
    """Train; at O-levels an overflow in the steps ``bad``, which plain training leaves out; returns the last loss."""
    model = Net()
    optimizer = KINDS[kind](model)
    schedule = None
    if isinstance(optimizer, torch.optim.Optimizer) and kind not in ("EagerLookahead", "SAM"):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7)
    mine = None

    def backward(factor):
        loss = error(model)
        if mine is None:
            loss.backward()
        else:
            with amp.scale_loss(loss * factor, mine) as scaled:
                scaled.backward()
        return loss

    for at in range(20):
        if level and at == before:
            mine = optimizer if given == "outer" else inner(optimizer)
            # A scale at which nothing else overflows.
            amp.initialize(model, mine, opt_level=level, verbosity=0, max_loss_scale=2.0**8)
        factor = math.inf if at in bad else 1.0
        if at in bad and level is None:
            pass
        elif kind == "SAM":
            backward(factor)
            optimizer.first_step(zero_grad=True)
            backward(factor)
            optimizer.second_step(zero_grad=True)
        elif kind == "SAM with closure":

            def closure(factor=factor):
                optimizer.zero_grad()
                return backward(factor)

            closure()
            optimizer.step(closure)
            optimizer.zero_grad()
        else:
            optimizer.zero_grad()
            backward(factor)
            if kind == "Horovod":
                optimizer.synchronize()
            optimizer.step()
        if schedule is not None:
            schedule.step()
    with torch.no_grad():
        return error(model).item()


BY_INNER = ["LARC", "SAM", "Engine"]


@pytest.mark.cover(1)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_outer_one_trains_as_in_float32(kind, level):
    start = error(Net()).item()
    want = train(kind)
    assert want < 0.4 * start
    assert train(kind, level) == pytest.approx(want, rel=0.05 if level == "O5" else 0.01)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", BY_INNER)
def test_the_inner_one_trains_as_in_float32(kind, level):
    assert train(kind, level, given="inner") == pytest.approx(train(kind), rel=0.01)


@pytest.mark.cover(1)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_skips_the_outer_step(kind, level):
    bad = (14,)
    assert train(kind, level, bad=bad) == pytest.approx(train(kind, bad=bad), rel=0.01)


# "Several" makes its state anew from its parts at each look, so there is none to carry over.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Several"])
def test_state_of_both_is_carried_over(kind):
    """Momentum and slow weights from before ``initialize`` go on: without them the loss is another."""
    assert train(kind, "O2", before=8) == pytest.approx(train(kind), rel=0.01)


def test_a_wrapper_with_own_groups_is_refused():
    """At the levels with masters, an optimizer around another one must share its groups."""
    model = Net()
    optimizer = OwnGroups(model.parameters(), **SGD)
    before = copy.deepcopy(model.state_dict())
    for level in ("O2", "O5"):
        with pytest.raises(RuntimeError, match="a OwnGroups around a SGD at opt_level='O.' - each has param.*O1"):
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    amp.initialize(model, optimizer.inside, opt_level="O2", verbosity=0)


@pytest.mark.parametrize("level", ["O1", "O3", "O4"])
def test_groups_of_its_own_are_fine_without_masters(level):
    model = Net()
    optimizer = OwnGroups(model.parameters(), **SGD)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    start = error(model).item()
    for _ in range(20):
        optimizer.zero_grad()
        make_step(optimizer, error(model))
    assert error(model).item() < 0.5 * start


def test_an_optimizer_of_other_params_may_be_kept_inside():
    model, other = Net(), Net()
    optimizer = sgd(model)
    optimizer.friend = sgd(other)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert all(p.dtype == torch.float32 for p in other.parameters())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_wrapper_that_passes_on_what_the_inner_one_can_do(level):
    """``Adam(fused=True)`` takes ``found_inf``, but amp would give it to the wrapper."""
    model = Net()
    optimizer = Engine(torch.optim.Adam(model.parameters(), lr=0.01, fused=True))
    assert optimizer._step_supports_amp_scaling
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = [p.detach().clone() for p in model.parameters()]
    make_step(optimizer, error(model) * math.inf)
    assert amp.step_was_skipped(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_inner_step_alone_is_a_step_of_the_outer():
    model = Net()
    optimizer = SAM(model.parameters(), torch.optim.SGD, **SGD)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    for factor in (1e-3, math.inf):
        before = [p.detach().clone() for p in model.parameters()]
        with amp.scale_loss(error(model) * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.base_optimizer.step()
        assert amp.step_was_skipped(optimizer) == (factor == math.inf)
        moved = not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved == (factor != math.inf)
        optimizer.base_optimizer.step()  # no block: nothing moves
    amp.initialize(model, optimizer, enabled=False)
    error(model).backward()
    optimizer.base_optimizer.step()
    assert not torch.equal(before[0], next(model.parameters()))


# -- torch.optim.swa_utils ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("level", "loose"), [("O0", 0.0), ("O1", 1e-3), ("O2", 2e-3)])
def test_stochastic_weight_averaging(level, loose):
    """``AveragedModel`` averages what ``parameters()`` has, in half at O2, and ``SWALR`` schedules either optimizer."""

    def averaged(level):
        model = Net()
        optimizer = sgd(model)
        if level:
            amp.initialize(model, optimizer, opt_level=level, verbosity=0, max_loss_scale=2.0**8)
        average, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
        for _ in range(8):
            optimizer.zero_grad()
            if level:
                with amp.scale_loss(error(model), optimizer) as scaled:
                    scaled.backward()
            else:
                error(model).backward()
            optimizer.step()
            average.update_parameters(model)
            schedule.step()
        update_bn([X], average)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
        return average

    want = averaged(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if level == "O2" else "error")  # of an average in half
        got = averaged(level)
    for a, b in zip(got.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(a.detach().float(), b.detach(), rtol=loose, atol=loose)
    assert error(got).item() == pytest.approx(error(want).item(), rel=max(1e-6, 10 * loose))


def test_what_was_wrapped_steps_as_ever_once_it_has_left_amp():
    model = Net()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=1.0))
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    amp.initialize(model, optimizer, enabled=False)
    inner = optimizer._base_optimizer
    for step in (optimizer.step, inner.step):
        want = [p.detach() - 1.0 for p in model.parameters()]
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        step()
        assert all(torch.equal(p, other) for p, other in zip(model.parameters(), want, strict=True))
