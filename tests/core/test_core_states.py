"""Each cell of the table at the head of ``ampcompat/amp/block.py``, seen from outside.

Every gradient is a small multiple of 1/8, exact in half at any scale used here, and the learning rate is one: what a
step takes off a parameter is the sum of the gradients it was made with, to the bit.
"""

import contextlib
import runpy
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompat import amp

ROOT = Path(__file__).parents[2]
PAGE = runpy.run_path(str(ROOT / "docs" / "architecture.py"))
HEAD, *ROWS = PAGE["table_in"](PAGE["TABLES"]["gradients"])
STATES = [head.partition(" ")[0] for head in HEAD[1:]]
FIRST, SECOND = 0.25, 0.125


class Weight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.weight * x


class Kept(Weight):
    """A weight that stays float32: the optimizer holds it itself, at O2 too."""


class Run:
    """A model of two weights in one of the states; ``own`` is what its gradients are."""

    def __init__(self, level, state):
        self.level, self.state = level, state
        model = torch.nn.Sequential(Weight(), Kept())
        model.forward = lambda x: torch.cat([model[0](x), model[1](x)])
        self.model, self.optimizer = amp.initialize(
            model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level=level, keep_fp32=Kept, verbosity=0
        )
        self.wrapped = self.model
        self.own = 0.0 if state == "NONE" else FIRST
        if state != "NONE":
            self.block(FIRST, delay_unscale=state == "PENDING")
        assert self.is_pending == (state == "PENDING")

    @property
    def is_pending(self):
        return self.optimizer._amp_stash.params_have_scaled_gradients

    @property
    def scale(self):
        return amp.state_dict()["loss_scaler0"]["loss_scale"]

    @property
    def masters(self):
        return list(amp.master_params(self.optimizer))

    def loss(self, gradient, x=1.0):
        return (self.wrapped(torch.full((4,), x)).float() * gradient).sum()

    def block(self, gradient, **kwargs):
        with amp.scale_loss(self.loss(gradient), self.optimizer, **kwargs) as scaled:
            scaled.backward()

    def gradients_are(self, value):
        """Gradients are unscaled and equal ``value``, those of the float32 weight in the model too."""
        assert not self.is_pending
        if not value:
            assert all(p.grad is None or not p.grad.any() for p in self.masters)
        else:
            assert all(torch.equal(p.grad, torch.full((4,), value)) for p in self.masters)

    def pending_are(self, *values):
        """Scaled gradients of the two model parameters, in ``p.grad``."""
        assert self.is_pending
        for param, value in zip(self.model.parameters(), values, strict=True):
            assert torch.equal(param.grad.float(), torch.full((4,), value * self.scale))

    def step_takes(self, *values):
        """A step takes ``values`` (of each weight, or of both) off the weights, and leaves nothing for another."""
        before = [p.detach().clone() for p in self.masters]
        self.optimizer.step()
        assert not amp.step_was_skipped(self.optimizer)
        model = [p.detach().clone() for p in self.model.parameters()]  # before masters are asked for, which may push
        for now, param, then, value in zip(self.masters, model, before, values * (3 - len(values)), strict=True):
            assert torch.equal(now, then - value)
            assert torch.equal(param.float(), now)

    def step_is_skipped(self):
        before = [p.detach().clone() for p in self.masters]
        self.optimizer.step()
        assert amp.step_was_skipped(self.optimizer)
        assert all(torch.equal(now, then) for now, then in zip(self.masters, before, strict=True))

    def goes_on(self):
        """After ``zero_grad``, the next block and step are as if nothing had been before."""
        self.optimizer.zero_grad()
        self.block(SECOND)
        self.gradients_are(SECOND)
        self.step_takes(SECOND)


# -- events ------------------------------------------------------------------------------------------------------------
def block_begins(run):
    if run.state == "NONE":
        for param in run.masters:
            param.grad = torch.full((4,), FIRST)  # a penalty of the user's, say
    if run.state == "PENDING":
        amp._amp_state.loss_scalers[0]._loss_scale = run.scale / 4
    with amp.scale_loss(run.loss(SECOND), run.optimizer) as scaled:
        if run.state == "PENDING":
            run.pending_are(FIRST, FIRST)
        else:
            assert all(p.grad is None for p in run.model.parameters())
        scaled.backward()
    run.gradients_are(FIRST + SECOND)
    run.step_takes(FIRST + SECOND)


def block_ends(run):
    run.block(SECOND)
    run.gradients_are(run.own + SECOND)
    run.step_takes(run.own + SECOND)
    run.goes_on()


def block_ends_with_an_overflow(run):
    scale = run.scale
    run.block(float("inf"))
    assert not run.is_pending
    assert run.scale == scale / 2
    assert not any(p.grad.isfinite().any() for p in run.masters)  # stay visible until they are cleared
    run.step_is_skipped()
    run.goes_on()


def block_gives_no_gradient(run):
    with amp.scale_loss(torch.ones((), requires_grad=True), run.optimizer) as scaled:
        scaled.backward()
    run.gradients_are(run.own)
    told = pytest.warns(UserWarning, match="gave this optimizer no gradient")
    with contextlib.nullcontext() if run.own else told:
        run.step_takes(run.own)
    run.goes_on()


def block_raises(run):
    lost = run.state == "PENDING"
    with contextlib.ExitStack() as expected:
        if lost:
            expected.enter_context(pytest.warns(UserWarning, match="start the accumulation of this step again"))
        expected.enter_context(pytest.raises(ZeroDivisionError))
        with amp.scale_loss(run.loss(SECOND), run.optimizer) as scaled:
            scaled.backward()
            raise ZeroDivisionError
    run.gradients_are(0.0 if lost else run.own)
    run.step_takes(0.0 if lost else run.own)
    run.goes_on()


class OutOfMemory(TorchDispatchMode):
    """Fails the unscaling at a block's end."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "non_finite_check_and_unscale" in func.name():
            raise MemoryError
        return func(*args, **(kwargs or {}))


def end_of_the_block_raises(run, capsys):
    block, scale = amp.scale_loss(run.loss(SECOND), run.optimizer), run.scale
    block.__enter__().backward()
    with pytest.raises(MemoryError), OutOfMemory():
        block.__exit__(None, None, None)
    assert "its gradients are cleared, and the next step is skipped" in capsys.readouterr().out
    assert run.scale == scale
    assert all(p.grad is None for p in (*run.model.parameters(), *run.masters))
    run.gradients_are(0.0)
    run.block(SECOND)  # the rest of an accumulation
    run.step_is_skipped()
    run.goes_on()


def ends_with_delay_unscale(run):
    run.block(SECOND, delay_unscale=True)
    beside = 0.0 if run.state == "PENDING" else run.own  # unscaled already, and not to be scaled again
    run.pending_are(*[run.own + SECOND - beside] * 2)
    run.step_takes(run.own + SECOND)
    run.goes_on()


def ends_in_no_sync(run, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        run.wrapped = torch.nn.parallel.DistributedDataParallel(run.model)
        with run.wrapped.no_sync():
            run.block(SECOND)
        beside = 0.0 if run.state == "PENDING" else run.own
        run.pending_are(*[run.own + SECOND - beside] * 2)
        run.block(SECOND)
        run.gradients_are(run.own + 2 * SECOND)
        run.step_takes(run.own + 2 * SECOND)
    finally:
        run.wrapped = run.model
        dist.destroy_process_group()


def step(run):
    if run.state == "NONE":
        run.step_takes(0.0)
        run.block(FIRST)
        run.step_takes(FIRST)
        # Half gradients that stay readable are not used again; float32 ones are, as in plain torch.
        run.step_takes(*[0.0, FIRST] if run.level == "O2" else [FIRST])
    else:
        run.step_takes(FIRST)
        assert not run.is_pending
    run.goes_on()


def zero_grad(run):
    run.optimizer.zero_grad()
    run.gradients_are(0.0)
    run.step_takes(0.0)
    run.goes_on()


def gradients_cleared(run):
    first = next(run.model.parameters())
    first.grad = None
    run.step_takes(0.0, run.own)
    assert not run.is_pending
    run.goes_on()


def gradients_cleared_before_a_block(run):
    next(run.model.parameters()).grad = None
    run.block(SECOND)
    run.step_takes(SECOND, run.own + SECOND)


def state_loaded(run):
    run.model.load_state_dict({name: value.clone() for name, value in run.model.state_dict().items()})
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    amp.load_state_dict(amp.state_dict())
    assert run.is_pending == (run.state == "PENDING")
    if run.is_pending:
        run.pending_are(FIRST, FIRST)
    else:
        run.gradients_are(run.own)
    run.step_takes(run.own)
    run.goes_on()


#: Tests of each row of the table, by its first cell.
EVENTS = {
    "block begins": [block_begins],
    "block ends": [block_ends],
    "block ends with an overflow": [block_ends_with_an_overflow],
    "block gives no gradient": [block_gives_no_gradient],
    "block raises": [block_raises],
    "end of the block raises": [end_of_the_block_raises],
    "ends with ``delay_unscale``": [ends_with_delay_unscale],
    "ends in DDP's ``no_sync``": [ends_in_no_sync],
    "``step``": [step],
    "``zero_grad``": [zero_grad],
    "``p.grad`` cleared": [gradients_cleared, gradients_cleared_before_a_block],
    "``load_state_dict``": [state_loaded],
}


@pytest.mark.cover(2)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("act", [act for acts in EVENTS.values() for act in acts], ids=lambda act: act.__name__)
def test_cell(act, state, level, request):
    fixtures = {
        name: request.getfixturevalue(name) for name in ("capsys", "tmp_path") if name in act.__code__.co_varnames
    }
    run = Run(level, state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        act(run, **fixtures)


def test_every_cell_of_the_table_has_a_test():
    assert STATES == ["NONE", "UNSCALED", "PENDING"]
    assert [row[0] for row in ROWS] == list(EVENTS)
    assert all(all(row) for row in ROWS)
