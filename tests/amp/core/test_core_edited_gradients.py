"""Half gradients that a script edits after the block: masters step with their own, and a product is no clearing."""

import warnings

import pytest
import torch
from core_kit import backward, masters, net, same, sgd, start
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ampcompat import amp

EDITED = "Gradients of the model's half parameters were edited after scale_loss"


def momentum(model):
    return sgd(model, lr=0.02, momentum=0.9, weight_decay=0.01)


def halves(model):
    return [p for p in model.parameters() if p.dtype != torch.float32]


def clip_to_nothing(model):
    """As ``clip_grad_norm_`` does where the half norm is inf."""
    for param in halves(model):
        param.grad.mul_(0.0)


def clip_by_an_infinite_norm(model):
    large = torch.finfo(model.a.weight.dtype).max / 2
    model.a.weight.grad.view(-1)[:8] = torch.tensor([large, -large] * 4)
    assert clip_grad_norm_(halves(model), 1.0).isinf()


def clip_values(model):
    clip_grad_value_(halves(model), 1e-9)


def clip_values_one_by_one(model):
    clip_grad_value_(halves(model), 1e-9, foreach=False)


def replace_by_products(model):
    for param in halves(model):
        param.grad = param.grad * 0.0


EDITS = [clip_to_nothing, clip_by_an_infinite_norm, clip_values, clip_values_one_by_one, replace_by_products]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_steps_are_those_of_unedited_gradients(level, edit):
    model, optimizer = start(level, momentum, loss_scale=2.0**12)
    twin, twin_optimizer = start(level, momentum, model=net(), loss_scale=2.0**12)

    def train():
        for seed in range(3):
            for a_model, an_optimizer in ((model, optimizer), (twin, twin_optimizer)):
                backward(a_model, an_optimizer, seed)
                if a_model is model:
                    edit(a_model)
                an_optimizer.step()
                an_optimizer.zero_grad()

    with pytest.warns(UserWarning, match=EDITED) as told:
        train()
    assert len([warning for warning in told if "were edited" in str(warning.message)]) == 1
    assert same(masters(optimizer), masters(twin_optimizer))


def test_an_edit_before_another_block_is_warned_of():
    model, optimizer = start("O2")
    backward(model, optimizer)
    clip_to_nothing(model)
    with pytest.warns(UserWarning, match=EDITED):
        backward(model, optimizer)


def zeroed(gradients):
    for grad in gradients:
        grad.zero_()


def by_hand(model):
    zeroed([p.grad for p in model.parameters()])


def by_the_model(model):
    model.zero_grad(set_to_none=False)


def by_another_optimizer(model):
    sgd(model).zero_grad(set_to_none=False)


def by_fill(model):
    for param in model.parameters():
        param.grad.fill_(0.0)


def by_new_zeros(model):
    for param in model.parameters():
        param.grad = torch.zeros_like(param)


def after_a_product(model):
    clip_to_nothing(model)
    by_hand(model)


def before_a_product(model):
    by_hand(model)
    clip_to_nothing(model)


CLEARINGS = [by_hand, by_the_model, by_another_optimizer, by_fill, by_new_zeros, after_a_product, before_a_product]


@pytest.mark.parametrize("clear", CLEARINGS, ids=lambda clear: clear.__name__)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_zeros_in_place_clear_the_masters_gradients(level, clear):
    model, optimizer = start(level, momentum)
    before = masters(optimizer)
    backward(model, optimizer)
    clear(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    for master, old, param in zip(masters(optimizer), before, model.parameters(), strict=True):
        if param.dtype != torch.float32:
            assert torch.equal(master, old)


class Parts(torch.nn.Module):
    """Weights whose gradients are what ``forward`` says: of both signs, positive throughout, and zero."""

    def __init__(self):
        super().__init__()
        self.mixed, self.positive, self.zero = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))

    def forward(self, signs=(1.0, -1.0)):
        mixed = (self.mixed * torch.tensor(signs).to(self.mixed.dtype)).sum()
        return mixed.float() + self.positive.float().sum() + self.zero.float().sum() * 0.0


def parts(make=momentum):
    model, optimizer = start("O2", make, model=Parts())
    for _ in range(2):  # momentum that a step without a gradient would not use
        with amp.scale_loss(model() + model.zero.float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    with amp.scale_loss(model(), optimizer) as scaled:
        scaled.backward()
    return model, optimizer


def moved_by(optimizer):
    before = masters(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    return [not torch.equal(old, new) for old, new in zip(before, masters(optimizer), strict=True)]


@pytest.mark.parametrize("factor", [0.5, 0.0])
def test_every_weight_steps_after_a_product(factor):
    """Also those whose gradient has no sign to keep, beside one that has."""
    model, optimizer = parts()
    for param in model.parameters():
        param.grad.mul_(factor)
    assert moved_by(optimizer) == [True, True, True]


def test_a_zero_gradient_times_something_keeps_momentum():
    model, optimizer = parts()
    model.zero.grad.mul_(0.5)
    assert moved_by(optimizer)[2]


@pytest.mark.parametrize("name", ["mixed", "positive"])
@pytest.mark.parametrize("clear_first", [True, False])
def test_one_weight_cleared_beside_others_that_are_clipped(name, clear_first):
    """A layer held back by ``grad.zero_()``, and a norm of half gradients that is inf."""
    model, optimizer = parts()
    cleared = getattr(model, name).grad
    if clear_first:
        cleared.zero_()
    for param in model.parameters():
        param.grad.mul_(0.0)
    if not clear_first:
        cleared.zero_()
    index = ["mixed", "positive"].index(name)
    moved = moved_by(optimizer)
    # One that was positive throughout is told by its number of writes from the other, whose sign is still there.
    assert moved[index] is False
    if name == "positive":
        assert moved == [True, False, True]


@pytest.mark.parametrize("product", [True, False])
def test_sparse_gradients_cleared_or_multiplied(product):
    torch.manual_seed(0)
    model = torch.nn.Embedding(4, 2, sparse=True)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    with amp.scale_loss(model(torch.tensor([1])).sum() / 4, optimizer) as scaled:
        scaled.backward()
    if product:
        model.weight.grad = model.weight.grad.coalesce()
        model.weight.grad.mul_(-0.0)
    else:
        model.weight.grad.zero_()
    assert moved_by(optimizer) == [product]


@pytest.mark.on_cpu
def test_looking_at_edited_gradients_waits_once(monkeypatch):
    """One host sync for all of them, however many a script clips."""
    model, optimizer = start("O2")
    backward(model, optimizer)
    for param in halves(model):
        param.grad.mul_(0.5)
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or tolist(tensor))
    list(amp.master_params(optimizer))
    assert len(reads) == 1
