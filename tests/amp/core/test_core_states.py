"""Each row of the table of gradient events (``state_tables``), seen from outside, from several states.

Every gradient is a small multiple of 1/8, exact in half at any scale used here, and the learning rate is one: what a
step takes off a parameter is the sum of the gradients it was made with, to the bit.
"""

import contextlib
import io

import pytest
import torch
from process_group import process_group_of_one
from state_tables import GRADIENTS
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompat import amp

pytestmark = pytest.mark.device

#: Where a run may be: before its first block, after a step, after a block, or after a delayed one.
STATES = ["new", "step made", "step skipped", "block ended", "block delayed"]
FIRST, SECOND, INF = 0.25, 0.125, float("inf")


class Weight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return self.weight * x


class Kept(Weight):
    """A weight that stays float32: the optimizer holds it itself, at O2 too."""


class Run:
    """A model of two weights in one of the states, one of which has a master at O2.

    ``own`` is the gradient of each that a next block adds to, and a next step uses.
    """

    def __init__(self, level, state):
        self.level, self.state = level, state
        model = torch.nn.Sequential(Weight(), Kept())
        model.forward = lambda x: torch.cat([model[0](x), model[1](x)])
        self.model, self.optimizer = amp.initialize(
            model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level=level, keep_fp32=Kept, verbosity=0
        )
        self.wrapped = self.model
        left = {"new": 0.0, "step skipped": INF}.get(state, FIRST)
        if left:
            self.block(left, delay_unscale=state == "block delayed")
        self.own = [left, left]
        if state.startswith("step "):
            self.optimizer.step()
            assert amp.step_was_skipped(self.optimizer) is (state == "step skipped")
            if level == "O2":
                self.own[0] = 0.0
        if state == "step skipped":
            self.optimizer.zero_grad()
            self.own = [0.0, 0.0]

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

    def own_and(self, gradient):
        """The gradients after a block that gives each weight ``gradient``."""
        return [own + gradient for own in self.own]

    def sums_show(self):
        """Outside of blocks, a master that has a gradient shows one in the model."""
        for master, param in zip(self.masters, self.model.parameters(), strict=False):  # one may have joined
            assert (param.grad is not None) or master.grad is None

    def gradients_are(self, values):
        """Gradients are unscaled and equal ``values``, one for each weight."""
        self.sums_show()
        for param, value in zip(self.masters, values, strict=True):
            if value:
                assert torch.equal(param.grad, torch.full((4,), value))
            else:
                assert param.grad is None or not param.grad.any()

    def step_uses(self, values):
        """A step takes ``values``, one for each weight, off the weights."""
        before = [p.detach().clone() for p in self.masters]
        self.optimizer.step()
        self.sums_show()
        assert not amp.step_was_skipped(self.optimizer)
        model = [p.detach().clone() for p in self.model.parameters()]  # before masters are asked for, which may push
        for now, param, then, value in zip(self.masters, model, before, values, strict=True):
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
        self.sums_show()
        self.block(SECOND)
        self.gradients_are([SECOND] * 2)
        self.step_uses([SECOND] * 2)


def told(expected, match):
    """Expect a warning, or none."""
    return pytest.warns(UserWarning, match=match) if expected else contextlib.nullcontext()


# -- events ------------------------------------------------------------------------------------------------------------
def block_begins(run):
    if run.state == "new":
        for param in run.masters:
            param.grad = torch.full((4,), FIRST)  # a penalty of the script's own, say
        run.own = [FIRST, FIRST]
    if run.state == "block delayed":
        amp._amp_state.loss_scalers[0]._loss_scale = run.scale / 4
    with amp.scale_loss(run.loss(SECOND), run.optimizer) as scaled:
        are_there = run.state == "block delayed"
        assert all((p.grad is not None) == are_there for p in run.model.parameters())
        scaled.backward()
    run.gradients_are(run.own_and(SECOND))
    run.step_uses(run.own_and(SECOND))
    run.goes_on()


def block_ends(run):
    run.block(SECOND)
    run.gradients_are(run.own_and(SECOND))
    run.step_uses(run.own_and(SECOND))
    run.goes_on()


def block_ends_with_an_overflow(run):
    scale = run.scale
    run.block(INF)
    assert run.scale == scale / 2
    assert not any(p.grad.isfinite().any() for p in run.masters)  # stay visible until they are cleared
    run.step_is_skipped()
    run.goes_on()


def block_gives_no_gradient(run):
    with amp.scale_loss(torch.ones((), requires_grad=True), run.optimizer) as scaled:
        scaled.backward()
    run.gradients_are(run.own)
    run.step_uses(run.own)
    run.goes_on()


def block_of_both(run, **kwargs):
    """A block of this optimizer and of another, whose loss reaches the other's weights alone."""
    scale, model = run.scale, torch.nn.Linear(2, 2)
    other = torch.optim.SGD(model.parameters(), lr=0.0)
    model, other = amp.initialize(model, other, opt_level=run.level, verbosity=0)
    amp._amp_state.loss_scalers[0]._loss_scale = scale  # the run reads the scale of the latest call
    with amp.scale_loss(model(torch.ones(1, 2)).float().sum() * SECOND, [run.optimizer, other], **kwargs) as scaled:
        scaled.backward()


def block_gives_them_to_others(run):
    block_of_both(run)
    run.gradients_are(run.own)
    run.step_uses(run.own)
    run.goes_on()


def block_raises(run):
    failing = amp.scale_loss(run.loss(SECOND), run.optimizer)
    failing.__enter__().backward()
    scaler = amp._amp_state.loss_scalers[0]
    before = scaler.loss_scale(), scaler._unskipped
    failing.__exit__(ZeroDivisionError, ZeroDivisionError())
    assert (scaler.loss_scale(), scaler._unskipped) == before
    run.gradients_are(run.own_and(SECOND))
    run.step_uses(run.own_and(SECOND))
    run.goes_on()
    assert scaler._unskipped == before[1] + 1  # the next block


def block_raises_after_an_overflow(run):
    scale = run.scale
    failing = amp.scale_loss(run.loss(INF), run.optimizer)
    failing.__enter__().backward()
    failing.__exit__(ZeroDivisionError, ZeroDivisionError())
    assert run.scale == scale
    run.step_is_skipped()
    run.goes_on()
    assert run.scale == scale / 2


class OutOfMemory(TorchDispatchMode):
    """Fails the unscaling at a block's end."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "non_finite_check_and_unscale" in func.name():
            raise MemoryError
        return func(*args, **(kwargs or {}))


def end_of_the_block_raises(run):
    block, scale = amp.scale_loss(run.loss(SECOND), run.optimizer), run.scale
    block.__enter__().backward()
    printed = io.StringIO()
    with pytest.raises(MemoryError), OutOfMemory(), contextlib.redirect_stdout(printed):
        block.__exit__(None, None, None)
    assert printed.getvalue() == "Unscaling raised: the gradients that were to be unscaled are cleared.\n"
    assert run.scale == scale
    assert all(p.grad is None for p in (*run.model.parameters(), *run.masters))
    run.gradients_are([0.0, 0.0])
    run.block(SECOND)  # the rest of an accumulation
    run.gradients_are([SECOND] * 2)
    run.step_uses([SECOND] * 2)
    run.goes_on()


def ends_with_delay_unscale(run):
    scaler = amp._amp_state.loss_scalers[0]
    before = scaler.loss_scale(), scaler._unskipped
    run.block(SECOND, delay_unscale=True)
    assert (scaler.loss_scale(), scaler._unskipped) == before
    run.gradients_are(run.own_and(SECOND))
    run.step_uses(run.own_and(SECOND))
    assert (scaler.loss_scale(), scaler._unskipped) == before
    run.goes_on()
    assert scaler._unskipped == before[1] + 1


def delayed_block_overflows(run):
    scale = run.scale
    run.block(INF, delay_unscale=True)
    run.step_is_skipped()
    assert run.scale == scale
    run.goes_on()
    assert run.scale == scale / 2


def ends_in_no_sync(run):
    with process_group_of_one():
        run.wrapped = torch.nn.parallel.DistributedDataParallel(run.model)
        with run.wrapped.no_sync():
            run.block(SECOND)
            failing = amp.scale_loss(run.loss(SECOND), run.optimizer)
            failing.__enter__().backward()
            failing.__exit__(ZeroDivisionError, ZeroDivisionError())
        run.gradients_are(run.own_and(2 * SECOND))
        run.block(SECOND)
        run.gradients_are(run.own_and(3 * SECOND))
        run.step_uses(run.own_and(3 * SECOND))
        run.wrapped = run.model


def step(run):
    run.step_uses(run.own)
    # Half gradients that stay readable are not used again; float32 ones are, as in plain torch.
    stayed = run.own if run.level == "O1" else [0.0, run.own[1]]
    run.step_uses(stayed)
    for param, value in zip(run.model.parameters(), run.own, strict=True):
        if value:
            assert param.grad.any()
    run.goes_on()


def step_after_an_overflow(run):
    run.block(INF)
    run.step_is_skipped()
    masters = run.masters
    if run.level == "O2":
        assert masters[0].grad is None
    assert not masters[1].grad.isfinite().any()  # stays until it is cleared, as in plain torch
    run.goes_on()


def step_of_one_of_two_holders(run):
    """Another optimizer holds the same weights: it uses their gradients as well; they stay until they are cleared."""
    other = torch.optim.SGD([run.model[0].weight, run.model[1].weight], lr=2.0)
    amp.initialize([], other, opt_level=run.level, verbosity=0)
    run.step_uses(run.own)
    before = [p.detach().clone() for p in run.masters]
    other.step()
    for now, then, own in zip(run.masters, before, run.own, strict=True):
        assert torch.equal(now, then - 2 * own)
    run.step_uses(run.own)
    run.goes_on()


def overflow_of_one_of_two_holders(run):
    """Another optimizer holds the same weights: it skips a step, too."""
    other = torch.optim.SGD([run.model[0].weight, run.model[1].weight], lr=2.0)
    amp.initialize([], other, opt_level=run.level, verbosity=0)
    run.block(INF)
    for optimizer in (run.optimizer, other):
        before = [p.detach().clone() for p in run.masters]
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
        assert all(torch.equal(now, then) for now, then in zip(run.masters, before, strict=True))
    run.goes_on()


def zero_grad_after_an_overflow(run):
    run.block(INF)
    run.optimizer.zero_grad()
    run.gradients_are([0.0, 0.0])
    run.block(SECOND)
    run.gradients_are([SECOND] * 2)
    run.step_is_skipped()
    run.goes_on()


def zero_grad(run):
    run.optimizer.zero_grad()
    run.gradients_are([0.0, 0.0])
    run.step_uses([0.0, 0.0])
    run.goes_on()


def gradients_cleared(run):
    """Of the first weight; then of both."""
    first, second = run.model.parameters()
    first.grad = None
    run.step_uses([0.0, run.own[1]])
    second.grad = None
    run.step_uses([0.0, 0.0])
    run.goes_on()


def gradients_cleared_before_a_block(run):
    next(run.model.parameters()).grad = None
    run.block(SECOND)
    run.step_uses([SECOND, run.own[1] + SECOND])


def gradients_edited(run):
    for param in run.model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)
    used = [own / 2 for own in run.own]
    has_master = run.level == "O2" and run.state.startswith("block ")
    if has_master:
        used[0] = FIRST
    with told(has_master, "changed after scale_loss"):
        run.step_uses(used)
    run.goes_on()


def state_loaded(run):
    run.model.load_state_dict({name: value.clone() for name, value in run.model.state_dict().items()})
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    amp.load_state_dict(amp.state_dict())
    amp._amp_state.loss_scalers[0].load_state_dict(amp._amp_state.loss_scalers[0].state_dict())
    run.gradients_are(run.own)
    run.step_uses(run.own)
    run.goes_on()


def param_joins(run):
    """A later parameter, to which blocks of others have given a gradient."""
    late = torch.nn.Parameter(torch.zeros(4))
    late.grad = torch.full((4,), FIRST * run.scale)
    has_scaled = run.state != "new"
    run.optimizer.add_param_group({"params": [late]})
    assert (late.grad is None) == has_scaled
    late.grad = None
    run.optimizer.step()
    assert not late.any()


#: Tests of each row of the tables, by its first cell.
EVENTS = {
    "block begins": [block_begins],
    "block ends": [block_ends],
    "block ends with an overflow": [block_ends_with_an_overflow, overflow_of_one_of_two_holders],
    "block gives no gradient": [block_gives_no_gradient, block_gives_them_to_others],
    "ends with `delay_unscale`": [ends_with_delay_unscale, delayed_block_overflows],
    "ends in DDP's `no_sync`": [ends_in_no_sync],
    "block raises": [block_raises, block_raises_after_an_overflow],
    "end of the block raises": [end_of_the_block_raises],
    "`step`": [step],
    "`step` after an overflow": [step_after_an_overflow],
    "`step` of one of two holders": [step_of_one_of_two_holders],
    "`zero_grad`": [zero_grad, zero_grad_after_an_overflow],
    "`p.grad` cleared": [gradients_cleared, gradients_cleared_before_a_block],
    "`p.grad` edited": [gradients_edited],
    "`load_state_dict`": [state_loaded],
    "a param joins with a gradient": [param_joins],
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("act", [act for acts in EVENTS.values() for act in acts], ids=lambda act: act.__name__)
def test_cell(act, state, level):
    run = Run(level, state)
    act(run)
    run.sums_show()


def test_every_row_of_the_table_has_a_test():
    assert GRADIENTS.events == list(EVENTS)
    assert all(len(row) == len(GRADIENTS.head) and all(row) for row in GRADIENTS.rows)
