"""Several optimizers that hold the same weights: whose gradients are whose, and whose step an overflow skips."""

import gc
import warnings

import pytest
import torch
from core_kit import same
from internals import is_in_block, keep_few_flags, overflow_flags
from torch import nn

from ampcompat import amp

INF = float("inf")


class Net(nn.Module):
    """An encoder under two heads; the norm stays float32 at O2."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](self.encoder(x))


def start(level="O2", make=lambda params: torch.optim.SGD(params, lr=0.1), **kwargs):
    """A model, and an optimizer for the encoder with each head."""
    torch.manual_seed(0)
    model = Net()
    optimizers = [make([*model.encoder.parameters(), *head.parameters()]) for head in model.heads]
    kwargs = {"loss_scale": "dynamic", **kwargs}
    model, optimizers = amp.initialize(model, optimizers, opt_level=level, verbosity=0, **kwargs)
    for scaler in amp._amp_state.loss_scalers:
        scaler._loss_scale = 2.0**10
    return model, *optimizers


def loss_of(model, head, times=1.0, seed=0):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    return model(x, head).float().square().mean() * times


def block(model, head, optimizers, times=1.0, seed=0, **kwargs):
    with amp.scale_loss(loss_of(model, head, times, seed), optimizers, **kwargs) as scaled:
        scaled.backward()


def values(model):
    """The float32 weights."""
    parameters = dict(model.named_parameters())
    return {name: value.clone() for name, value in model.state_dict().items() if name in parameters}


def moved(before, model):
    """The names of the parts whose weights moved since."""
    changed = [name for name, now in values(model).items() if not torch.equal(now, before[name])]
    return sorted({name.rpartition(".")[0] for name in changed})


def is_finite(model):
    return all(bool(value.isfinite().all()) for value in values(model).values())


ENCODER, HEADS = ["encoder.0", "encoder.1"], ["heads.0", "heads.1"]


# -- gradients -----------------------------------------------------------------------------------------------------
CLEAR = {
    "none": lambda model: model.zero_grad(),
    "zeros": lambda model: model.zero_grad(set_to_none=False),
    "by hand": lambda model: [p.grad.zero_() for p in model.parameters() if p.grad is not None],
}


@pytest.mark.parametrize("how", CLEAR)
def test_cleared_gradients_reach_no_optimizer_that_waits(how):
    model, a, b = start()
    block(model, 0, [a, b])
    a.step()
    CLEAR[how](model)
    before = values(model)
    b.step()
    assert set(moved(before, model)) <= {"encoder.1"}  # float32 zeros are stepped with, as in plain torch


@pytest.mark.parametrize("how", CLEAR)
def test_cleared_gradients_are_not_added_to_the_next_block(how):
    model, a, b = start()
    block(model, 0, [a, b])
    a.step()
    CLEAR[how](model)
    block(model, 1, a)
    found = [p.grad.clone() for p in amp.master_params(a) if p.grad is not None and p.grad.any()]
    a.zero_grad()
    b.zero_grad()
    block(model, 1, a)
    assert same(found, [p.grad for p in amp.master_params(a) if p.grad is not None and p.grad.any()])


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_gradients_of_both_are_unscaled_and_added_once(level):
    found = []
    for both in (True, False):
        model, a, b = start(level)
        for _ in range(2):
            block(model, 0, [a, b] if both else a)
        found.append([p.grad.clone() for p in amp.master_params(a)])
    assert same(*found)


def test_the_second_optimizer_uses_the_same_gradients():
    """Two optimizers of one block share a weight: the second one steps with the gradients the first one used."""
    model, a, b = start()
    block(model, 0, [a, b])
    gradients = {id(p): p.grad.clone() for one in (a, b) for p in amp.master_params(one) if p.grad is not None}
    plain = {id(p): p.detach().clone() for one in (a, b) for p in amp.master_params(one)}
    for one in (a, b):
        for p in amp.master_params(one):
            if id(p) in gradients:
                plain[id(p)].add_(gradients[id(p)], alpha=-0.1)
    a.step()
    b.step()
    assert all(torch.equal(p, plain[id(p)]) for one in (a, b) for p in amp.master_params(one))


def test_a_second_step_leaves_masters_to_the_one_that_waits():
    model, a, b = start()
    block(model, 0, [a, b])
    a.step()
    kept = [p.grad for p in amp.master_params(b)]
    before = values(model)
    a.step()
    assert moved(before, model) == ["encoder.1"]  # float32, as in plain torch
    assert all(p.grad is grad for p, grad in zip(amp.master_params(b), kept, strict=True))
    before = values(model)
    b.step()
    assert moved(before, model) == ENCODER


def test_a_second_step_that_raises_gives_the_gradients_back(monkeypatch):
    model, a, b = start()
    block(model, 0, [a, b])
    a.step()
    kept = [p.grad for p in amp.master_params(b)]
    a.param_groups[0]["lr"] = "no number"
    with pytest.raises(TypeError):
        a.step()
    assert all(p.grad is grad for p, grad in zip(amp.master_params(b), kept, strict=True))


def test_gradients_of_the_users_own_are_stepped_with():
    model, a, b = start()
    block(model, 0, [a, b])
    a.step()
    for p in amp.master_params(a):
        p.grad = torch.ones_like(p)
    before = values(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a.step()
    assert moved(before, model) == [*ENCODER, "heads.0"]


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("waits", ["alive", "collected"])
def test_an_optimizer_that_never_steps_doubles_no_gradient(clears, waits):
    model, old, new = start(make=lambda params: torch.optim.SGD(params, lr=0.0))
    block(model, 1, new)
    expected = [p.grad.clone() for p in amp.master_params(new)]
    new.step()
    new.zero_grad()
    block(model, 1, old)
    if waits == "collected":
        del old
        gc.collect()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(4):
            if clears:
                model.zero_grad()
            for p in model.encoder[1].parameters():  # float32: accumulates as in plain torch
                p.grad = None
            block(model, 1, new)
            if clears or number:  # until the first step, gradients of both add up, as in plain torch
                assert same(expected, [p.grad for p in amp.master_params(new)])
            new.step()
    dropped = [warning for warning in told if "make place for the new" in str(warning.message)]
    assert len(dropped) == (not clears and waits == "alive")


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("clears", [True, False])
def test_a_new_optimizer_beside_one_that_never_stepped(again, clears):
    """A second stage of training, while the first one's optimizer is still referenced and has gradients."""
    torch.manual_seed(0)
    model, kwargs = nn.Linear(4, 1), {"opt_level": "O2", "loss_scale": 128.0, "verbosity": 0}
    model, old = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), **kwargs)
    x = torch.randn(8, 4)

    def backward(optimizer):
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()

    backward(old)
    expected = [p.grad.clone() for p in amp.master_params(old)]
    model.zero_grad()
    new = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model if again else [], new, **kwargs)
    backward(old)
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            backward(new)
            assert same(expected, [p.grad for p in amp.master_params(new)])
            new.step()
            if clears:
                model.zero_grad()


# -- overflows -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("first_steps", ["before", "between", "after"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_all_steps_that_share_it(level, first_steps, fused, capsys):
    """Two optimizers share weights; the one that overflowed steps before the other's block, after it, or last."""
    model, a, b = start(level, lambda params: torch.optim.SGD(params, lr=0.1, fused=fused), num_losses=2)
    before = values(model)
    block(model, 0, a, INF, loss_id=0)
    if first_steps == "before":
        a.step()
        assert amp.step_was_skipped(a)
    block(model, 1, b, loss_id=1)
    if first_steps == "between":
        a.step()
    b.step()
    if first_steps == "after":
        a.step()
    # Masters begin anew once the only optimizer with their gradients was skipped; float32 ones stay not finite.
    assert amp.step_was_skipped(b)
    assert moved(before, model) == []
    scales = [amp._amp_state.loss_scalers[i].loss_scale() for i in range(2)]
    assert scales == [2.0**9, 2.0**10]  # only the loss that overflowed


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_it_skips_none_once_they_are_cleared(level):
    model, a, b = start(level)
    block(model, 0, a, INF)
    a.step()
    model.zero_grad()
    block(model, 1, b)
    b.step()
    assert not amp.step_was_skipped(b)
    assert is_finite(model)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_nor_where_it_is_in_no_shared_tensor(level):
    """The head of one overflows, and the encoder does not: the other's step is as if nothing had been."""
    model, a, b = start(level)
    block(model, 1, b)
    with amp.scale_loss(model.heads[0].weight.float().sum() * INF, a) as scaled:
        scaled.backward()
    b.step()
    assert not amp.step_was_skipped(b)
    a.step()
    assert amp.step_was_skipped(a)
    assert is_finite(model)


def test_it_skips_one_that_had_used_the_gradients_before():
    """What one step has left to the other is forgotten when it was cleared: the overflow is in new gradients."""
    model, a, b = start()
    for p in model.encoder[1].parameters():  # float32, and not finite either
        p.requires_grad_(False)
    block(model, 1, b)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a.step()
    model.zero_grad()
    block(model, 1, b, INF)
    before = values(model)
    a.step()
    assert amp.step_was_skipped(a)
    assert moved(before, model) == []


def test_the_script_that_decides_by_itself_decides_for_all():
    """``delay_overflow_check``, and ``update_scale`` by hand."""
    model, a, b = start()
    block(model, 0, a, INF, delay_overflow_check=True)
    amp._amp_state.loss_scalers[0].update_scale()
    block(model, 1, b)
    b.step()
    assert not amp.step_was_skipped(b)


def test_few_flags_are_kept_for_an_optimizer_that_never_steps(monkeypatch):
    keep_few_flags(monkeypatch, 4)
    model, a, b = start()
    block(model, 1, b)
    for number in range(12):
        block(model, 0, a, INF if number == 2 else 1.0)
    assert overflow_flags(b) <= 5  # one of its own block and four of the other
    b.step()
    assert amp.step_was_skipped(b)


# -- blocks in blocks ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_open_blocks_that_share_weights_are_refused(level):
    model, a, b = start(level)
    block(model, 1, [a, b])
    kept = [p.grad.clone() for p in amp.master_params(b)]
    with amp.scale_loss(loss_of(model, 0), a) as scaled:
        scaled.backward()
        shown = [p.grad for p in model.parameters()]
        with pytest.raises(RuntimeError, match=r"shares parameters with this one - .* \(D38\)\.$"):
            amp.scale_loss(loss_of(model, 1), b).__enter__()
        assert all(p.grad is grad for p, grad in zip(model.parameters(), shown, strict=True))
        assert not is_in_block(b)
    a.zero_grad()
    b.zero_grad()
    block(model, 1, [a, b])
    assert same(kept, [p.grad for p in amp.master_params(b)])


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_a_step_beside_pending_gradients_is_refused(level, loss_scale):
    model, a, b = start(level, loss_scale=loss_scale)
    block(model, 0, [a, b])
    block(model, 0, a, delay_unscale=True)
    before = values(model)
    with pytest.raises(RuntimeError, match="scaled gradients are pending"):
        b.step()
    with pytest.raises(RuntimeError, match="scaled gradients are pending"):
        block(model, 1, [a, b])
    assert moved(before, model) == []
    a.step()
    assert is_finite(model)


def test_a_dropped_block_is_not_open():
    model, a, b = start()
    amp.scale_loss(loss_of(model, 0), a).__enter__().backward()
    gc.collect()
    block(model, 1, b)
    a.zero_grad()
    b.step()
    assert is_finite(model)


# -- blocks that raise ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("how", ["raises", "is dropped"])
def test_a_failed_block_of_both_keeps_what_had_accumulated(level, how):
    model, a, b = start(level)
    block(model, 0, [a, b])
    kept = [(p, None if p.grad is None else p.grad.clone()) for one in (a, b) for p in amp.master_params(one)]
    if how == "raises":
        failing = amp.scale_loss(loss_of(model, 1), [a, b])
        failing.__enter__().backward()
        failing.__exit__(ZeroDivisionError, ZeroDivisionError())
    else:
        amp.scale_loss(loss_of(model, 1), [a, b]).__enter__().backward()
        gc.collect()
        with amp.scale_loss(loss_of(model, 1), b):  # finds the dropped block; gives no gradient
            pass
        with amp.scale_loss(loss_of(model, 1), a):
            pass
    for p, grad in kept:
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.equal(p.grad, grad)
