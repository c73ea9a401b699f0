"""Several optimizers that hold the same weights: whose gradients are whose, and whose step an overflow skips."""

import gc

import pytest
import torch
from amp_training import INF, same
from internals import is_in_block, master_of, overflow_flags
from seeded import seeded
from torch import nn

from ampcompat import amp

pytestmark = pytest.mark.device


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
    x = torch.randn(8, 4, generator=seeded(seed))
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
    b.step()
    a.zero_grad()
    for p in amp.master_params(a):
        p.grad = torch.ones_like(p)
    before = values(model)
    a.step()
    assert moved(before, model) == [*ENCODER, "heads.0"]


@pytest.mark.parametrize("waits", ["alive", "collected"])
def test_an_optimizer_that_never_steps_doubles_no_gradient(waits):
    model, old, new = start(make=lambda params: torch.optim.SGD(params, lr=0.0))
    block(model, 1, new)
    expected = [p.grad.clone() for p in amp.master_params(new)]
    new.step()
    new.zero_grad()
    block(model, 1, old)
    if waits == "collected":
        del old
        gc.collect()
    for _ in range(3):
        model.zero_grad()
        block(model, 1, new)
        assert same(expected, [p.grad for p in amp.master_params(new)])
        new.step()


def test_weights_whose_other_holder_was_taken_out_of_amp_are_shared_no_more():
    """A step uses up the gradients of its masters, so that a loop which never clears them does not accumulate."""
    model, stays, goes = start(make=lambda params: torch.optim.SGD(params, lr=0.0))
    amp.initialize([], goes, enabled=False, verbosity=0)
    for _ in range(2):
        block(model, 0, stays)
        stays.step()
        assert all(p.grad is None for p in amp.master_params(stays) if master_of(p) is not None)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_gradients_that_are_cleared_by_hand_between_two_steps(level):
    """Two optimizers hold the weights, and one has stepped: only what came later is left."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2, bias=False)
    a, b = (torch.optim.SGD(model.parameters(), lr=0.0) for _ in range(2))
    amp.initialize(model, [a, b], opt_level=level, loss_scale=128.0, verbosity=0)

    def backward(*optimizers):
        with amp.scale_loss(model(torch.ones(1, 4)).float().sum(), optimizers) as scaled:
            scaled.backward()

    backward(a, b)
    b.step()
    for param in model.parameters():
        param.grad = None
    backward(a)
    backward(a, b)
    (param,) = amp.master_params(a)
    assert torch.equal(param.grad, torch.full((2, 4), 2.0))


@pytest.mark.parametrize("again", [True, False])
def test_a_new_optimizer_beside_one_that_never_stepped(again):
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
    for _ in range(3):
        backward(new)
        assert same(expected, [p.grad for p in amp.master_params(new)])
        new.step()
        model.zero_grad()


# -- overflows -----------------------------------------------------------------------------------------------------
def test_an_overflow_of_both_skips_both_after_a_clean_block():
    """Float32 weights that both hold: the second block saves their gradients once, and adds the inf again."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    pair = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    model, pair = amp.initialize(model, pair, opt_level="O1", verbosity=0)
    for factor in (INF, 1.0):
        with amp.scale_loss(model(torch.ones(2, 4)).float().sum() * factor, pair) as scaled:
            scaled.backward()
    for optimizer in pair:
        optimizer.step()
        assert amp.step_was_skipped(optimizer)
    assert is_finite(model)


def test_a_block_of_one_gives_both_a_gradient_each_time():
    """Of a weight that both hold; in each round both step, and gradients are cleared by hand."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    a, b = (torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2))
    amp.initialize(model, [a, b], opt_level="O2", loss_scale=128.0, verbosity=0)
    for _ in range(3):
        before = model.weight.detach().clone()
        with amp.scale_loss(model(torch.ones(1, 4)).float().sum() / 8, a) as scaled:
            scaled.backward()
        a.step()
        b.step()
        torch.testing.assert_close(before - model.weight, torch.full_like(before, 0.25), rtol=0, atol=2e-3)
        for param in model.parameters():
            param.grad = None


def test_one_flag_is_kept_for_an_optimizer_that_never_steps():
    model, a, b = start()
    block(model, 1, b)
    for number in range(12):
        block(model, 0, a, INF if number == 2 else 1.0)
    assert overflow_flags(b) == 1
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


@pytest.mark.parametrize("act", ["block", "step"])
def test_so_are_those_of_a_weight_that_was_appended_in_the_open_block(act):
    model, a, b = start("O1")
    b.param_groups[0]["params"] = list(model.heads[1].parameters())
    with amp.scale_loss(loss_of(model, 0), a) as scaled:
        scaled.backward()
        b.param_groups[0]["params"] += model.encoder.parameters()
        with pytest.raises(RuntimeError, match=r"\(D38\)"):
            b.step() if act == "step" else block(model, 1, b)


def test_a_block_at_a_scale_of_one_leaves_gradients_to_torch():
    """No block is refused in it, and no step."""
    model, a, b = start("O1", num_losses=2)
    amp._amp_state.loss_scalers[1] = amp.scaler.LossScaler(1.0)
    with amp.scale_loss(loss_of(model, 0), a, loss_id=1) as scaled:
        scaled.backward()
        block(model, 1, b)
        block(model, 0, a, loss_id=1)
        a.step()
    assert not amp.step_was_skipped(a)


@pytest.mark.parametrize("by_another", [False, True])
def test_a_block_at_a_scale_of_one_is_refused_where_its_gradients_would_be_divided(by_another):
    """Inside the open block of another loss, at whose end they would be unscaled with the others."""
    model, a, b = start("O1", num_losses=2)
    amp._amp_state.loss_scalers[1] = amp.scaler.LossScaler(1.0)
    with amp.scale_loss(loss_of(model, 0), a) as scaled:
        scaled.backward()
        with pytest.raises(RuntimeError, match=r"\(D38\)|of the same optimizer"):
            block(model, 1, b if by_another else a, loss_id=1)


# -- closures ------------------------------------------------------------------------------------------------------
def test_a_step_with_closure_uses_what_was_not_cleared():
    """As in plain torch; the gradients of a head, which no other optimizer holds, its step has dropped."""
    model, a, b = start()
    block(model, 0, [a, b])
    a.step()
    before = values(model)
    a.step(lambda: 0.0)
    assert moved(before, model) == ENCODER


# -- blocks that raise ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_what_a_failed_block_of_both_has_added_stays(level):
    found = []
    for fails in (False, True):
        model, a, b = start(level)
        block(model, 0, [a, b])
        second = amp.scale_loss(loss_of(model, 1), [a, b])
        second.__enter__().backward()
        second.__exit__(*((ZeroDivisionError, ZeroDivisionError()) if fails else (None, None)))
        found.append([p.grad for optimizer in (a, b) for p in amp.master_params(optimizer)])
    assert same(*found)
