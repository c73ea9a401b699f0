"""``step`` as others see it: LR schedulers, optimizers that skip on the device, state made before initialize."""

import copy
import warnings

import pytest
import torch
from amp_training import INF, assert_masters_agree, backward, batch, masters, net, same, sgd, start, train
from internals import skipped_as_far_as_known
from torch.optim import lr_scheduler

from ampcompat import amp

pytestmark = [pytest.mark.device, pytest.mark.torch]

SAID = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
}
FUSED = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-1, fused=True),
}
if not hasattr(FUSED["Adagrad"](net().parameters()), "_step_supports_amp_scaling"):
    del FUSED["Adagrad"]  # torch 2.11: it takes no found_inf there, and the host decides


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_step_in_its_block_names_what_is_missing_there(level):
    """Scaled gradients, or where the scale is 1, the gradients of masters."""
    model = net()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    loss = model(batch()[0]).float().sum()
    missing = "master weights get their gradients at its end" if level == "O5" else "still multiplied by the loss scale"
    with pytest.raises(RuntimeError, match=missing), amp.scale_loss(loss, optimizer):  # noqa: PT012
        optimizer.step()


@pytest.mark.cover(2)
@pytest.mark.parametrize("skip_first", [False, True])
@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_schedulers_step_without_a_warning(level, kind, built, skip_first):
    model, plain = net(), net()
    optimizer, reference = sgd(model), sgd(plain)
    scheduler = SCHEDULERS[kind](optimizer) if built == "before" else None
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    scheduler = scheduler or SCHEDULERS[kind](optimizer)
    reference_scheduler = SCHEDULERS[kind](reference)
    for step in range(4):
        backward(model, optimizer, step, times=INF if skip_first and step == 0 and level != "O0" else 1.0)
        reference.step()
        metric = (float(step),) if kind == "ReduceLROnPlateau" else ()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if kind == "SequentialLR" else "error")  # it warns of its own epoch argument
            optimizer.step()
            scheduler.step(*metric)
            reference_scheduler.step(*metric)
        optimizer.zero_grad()
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in reference.param_groups]


def test_a_scheduler_that_steps_too_early_is_told_so_by_torch():
    model, optimizer = start("O2")
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
        scheduler.step()
    train(model, optimizer, 1)


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_fused_optimizers_skip_on_the_device(level, kind, capsys):
    model, optimizer = start(level, lambda m: FUSED[kind](m.parameters()))
    train(model, optimizer, 2)
    before, state = masters(optimizer), copy.deepcopy(optimizer.state_dict()["state"])
    backward(model, optimizer, times=INF)
    optimizer.step()
    assert capsys.readouterr().out == ""  # nobody has looked at the device yet
    assert same(before, masters(optimizer))
    for index, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(state[index][k])) for k, v in values.items())
    assert not hasattr(optimizer, "found_inf")
    optimizer.zero_grad()
    backward(model, optimizer)
    assert capsys.readouterr().out == ""
    optimizer.step()
    assert capsys.readouterr().out == SAID
    assert not amp.step_was_skipped(optimizer)
    assert not same(before, masters(optimizer))
    if level == "O2":
        assert_masters_agree(model)


@pytest.mark.parametrize("kind", FUSED)
def test_asking_whether_a_step_was_skipped_reads_the_device(kind, capsys):
    model, optimizer = start("O2", lambda m: FUSED[kind](m.parameters()))
    backward(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, optimizer, times=INF)
    optimizer.step()
    assert skipped_as_far_as_known(optimizer) is None
    assert amp.step_was_skipped(optimizer)
    assert amp.step_was_skipped(optimizer)
    assert capsys.readouterr().out == SAID


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_optimizer_state_from_before_initialize_is_carried_over(level):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())
    held = [optimizer.state[p]["momentum_buffer"] for p in amp.master_params(optimizer)]
    assert all(torch.equal(b, torch.ones_like(b)) for b in held)
    assert len(optimizer.state) == len(held)
    optimizer.zero_grad()
    train(model, optimizer, 2)


@pytest.mark.parametrize("first", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("second", ["O0", "O1", "O2", "O3"])
def test_state_fits_at_any_level_after_any(first, second):
    """``initialize`` casts what an optimizer holds with the params that it casts."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)
    for level in (first, second):
        amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
        train(model, optimizer, 1)
    for param, held in optimizer.state.items():
        assert held["exp_avg"].dtype == param.dtype
        assert held["step"].dtype == torch.float32


def test_state_that_belongs_to_no_param_stays_as_it_is():
    model = net()
    optimizer = sgd(model)
    optimizer.state["run"] = {"name": "first"}
    optimizer.state[model.a.weight] = "frozen"
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert optimizer.state["run"] == {"name": "first"}
    assert optimizer.state[next(iter(amp.master_params(optimizer)))] == "frozen"


def test_step_hooks_run_and_do_not_run_for_a_skipped_step():
    model, optimizer = start("O2")
    seen = []
    optimizer.register_step_pre_hook(lambda *a: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *a: seen.append("post"))
    backward(model, optimizer, times=INF)
    optimizer.step()
    assert seen == []
    optimizer.zero_grad()
    backward(model, optimizer)
    optimizer.step()
    assert seen == ["pre", "post"]


def test_the_step_returns_what_the_optimizers_step_returns():
    class Talking(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            return "done"

    model, optimizer = start("O2", lambda m: Talking(m.parameters(), lr=0.1))
    backward(model, optimizer)
    assert optimizer.step() == "done"


def test_an_exception_in_the_optimizers_step_leaves_it_usable():
    class Failing(torch.optim.Adam):
        fail = True

        def step(self, closure=None):
            if self.fail:
                raise ZeroDivisionError
            return super().step(closure)

    model, optimizer = start("O2", lambda m: Failing(m.parameters(), fused=True))
    backward(model, optimizer)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert not hasattr(optimizer, "found_inf")
    optimizer.fail = False
    optimizer.zero_grad()
    train(model, optimizer, 2)
    assert_masters_agree(model)


def test_step_was_skipped_of_any_optimizer():
    assert amp.step_was_skipped(sgd(net())) is False


class WithArguments(torch.optim.SGD):
    """Steps of a user's own: arguments beside the closure, and a result."""

    def step(self, closure=None, factor=1.0, note=None):
        for group in self.param_groups:
            group["lr"] *= factor
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] /= factor
        return loss, factor, note


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_arguments_that_a_step_of_the_users_own_takes(level):
    model, optimizer = start(level, lambda model: WithArguments(model.parameters(), lr=0.1))
    twin, twin_optimizer = start(level)
    calls = [
        (lambda: optimizer.step(None, factor=0.5), 0.5, (None, 0.5, None)),
        (lambda: optimizer.step(factor=0.25, note="n"), 0.25, (None, 0.25, "n")),
        (lambda: optimizer.step(lambda: "loss", factor=0.5, note="n"), 0.5, ("loss", 0.5, "n")),
        (lambda: optimizer.step(), 1.0, (None, 1.0, None)),
    ]
    for seed, (call, factor, result) in enumerate(calls):
        backward(model, optimizer, seed)
        assert call() == result
        backward(twin, twin_optimizer, seed)
        twin_optimizer.param_groups[0]["lr"] = 0.1 * factor
        twin_optimizer.step()
        for one in (optimizer, twin_optimizer):
            one.zero_grad()
    assert same(masters(optimizer), masters(twin_optimizer))


class TakesTheLoss(torch.optim.SGD):
    """A step of a user's own that takes the loss (Polyak's step size) and a floor for it, and no closure."""

    def step(self, loss, floor=None):
        super().step()
        return loss, floor


class TakesTheLossFirst(torch.optim.SGD):
    """A step of a user's own that takes the loss before the closure."""

    def step(self, loss, closure=None):
        return loss, super().step(closure)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_step_of_the_users_own_that_takes_the_loss(level):
    model, optimizer = start(level, lambda model: TakesTheLoss(model.parameters(), lr=0.1))
    twin, twin_optimizer = start(level)
    for seed, arguments in enumerate([(2.0,), (torch.ones(()), 0.0)]):
        backward(model, optimizer, seed)
        assert optimizer.step(*arguments) == (*arguments, None)[:2]
        backward(twin, twin_optimizer, seed)
        twin_optimizer.step()
        for one in (optimizer, twin_optimizer):
            one.zero_grad()
    assert same(masters(optimizer), masters(twin_optimizer))


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_closure_that_comes_by_name_after_the_loss(level):
    model, optimizer = start(level, lambda model: TakesTheLossFirst(model.parameters(), lr=0.1))
    before = masters(optimizer)
    loss, evaluated = optimizer.step(2.0, closure=lambda: backward(model, optimizer))
    assert loss == 2.0
    assert evaluated > 0
    assert not same(masters(optimizer), before)


@pytest.mark.parametrize("verbosity", [0, False])
def test_at_verbosity_0_a_skipped_step_is_not_said(verbosity, capsys):
    model, optimizer = start("O2")
    amp._amp_state.verbosity = verbosity
    backward(model, optimizer, times=INF)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_has_overflow_tells_of_the_last_block(level):
    model, optimizer = start(level)
    for times in (1.0, INF, 1.0):
        backward(model, optimizer, times=times)
        assert amp._amp_state.loss_scalers[0]._has_overflow is (times == INF)
        optimizer.step()
        optimizer.zero_grad()
