"""Half gradients that a script edits after the block have no effect on masters; ``zero_grad`` has."""

import re

import pytest
import torch
from amp_training import backward, loss_of, masters, net, same, sgd, start
from counting import Counter
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ampcompat import amp

EDITED = "Gradients of the model's half parameters changed"


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


def zero_by_hand(model):
    for param in halves(model):
        param.grad.detach_()
        param.grad.zero_()


def replace_by_zeros(model):
    for param in halves(model):
        param.grad = torch.zeros_like(param)


EDITS = [clip_to_nothing, clip_by_an_infinite_norm, clip_values, clip_values_one_by_one, replace_by_products]
EDITS += [zero_by_hand, replace_by_zeros]


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
    assert len([warning for warning in told if re.match(EDITED, str(warning.message))]) == 1
    assert same(masters(optimizer), masters(twin_optimizer))


def test_an_edit_before_another_block_is_warned_of():
    model, optimizer = start("O2")
    backward(model, optimizer)
    clip_to_nothing(model)
    with pytest.warns(UserWarning, match=EDITED):
        backward(model, optimizer)


def test_gradients_that_a_script_saved_and_assigns_are_warned_of():
    """PGD: the gradient of the clean loss is put back before the block of the adversarial one."""
    model, optimizer = start("O2")
    backward(model, optimizer)
    saved = {param: param.grad.clone() for param in halves(model)}
    optimizer.zero_grad()
    for param, grad in saved.items():
        param.grad = grad
    with pytest.warns(UserWarning, match=EDITED):
        backward(model, optimizer, 1)


def test_what_the_warning_of_assigned_gradients_says_to_do():
    """The step uses the gradients of both losses of one run of blocks."""
    ends = []
    for clears in (False, True):
        model, optimizer = start("O2")
        backward(model, optimizer)
        if clears:
            saved = {param: param.grad.clone() for param in amp.master_params(optimizer)}
            optimizer.zero_grad()
            for param, grad in saved.items():
                param.grad = grad
        backward(model, optimizer, 1)
        optimizer.step()
        ends.append(masters(optimizer))
    assert same(*ends)


def test_a_second_backward_after_the_block_is_warned_of():
    """Of an auxiliary loss: its gradient is lost at O2."""
    model, optimizer = start("O2")
    backward(model, optimizer)
    loss_of(model, 1).backward()
    with pytest.warns(UserWarning, match=EDITED):
        optimizer.step()


class Exact(torch.nn.Module):
    """Weights and gradients that are exact in half, and stay so in two steps."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.other = torch.nn.Linear(2, 2)
        for param in self.parameters():
            torch.nn.init.constant_(param, 1.0)

    def forward(self, x):
        return (self.layer.weight.sum() + self.layer.bias.sum() + self.other.weight.sum() + self.other.bias.sum()) * x


def by_the_optimizer(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def by_the_model(model, optimizer):
    model.zero_grad(set_to_none=False)


def by_its_modules(model, optimizer):
    model.layer.zero_grad(set_to_none=False)
    model.other.zero_grad(False)


def by_one_of_them(model, optimizer):
    model.layer.zero_grad(set_to_none=False)


def by_none(model, optimizer):
    model.zero_grad()


def by_none_of_one(model, optimizer):
    model.layer.zero_grad(set_to_none=True)


OF_ALL = [by_the_optimizer, by_the_model, by_its_modules, by_none]
OF_ONE = [by_one_of_them, by_none_of_one]
CASES = [(clear, when) for clear in OF_ALL for when in ("before the step", "after the step", "before and after")]
CASES += [(clear, "before the step") for clear in OF_ONE]


@pytest.mark.parametrize(("clear", "when"), CASES, ids=lambda part: getattr(part, "__name__", part))
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_momentum_and_weight_decay_act_on_zeros_as_at_o0(level, clear, when):
    """A gradient of zero is a gradient; one of None is not."""
    ends = []
    for a_level in ("O0", level):
        model = Exact()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5, weight_decay=0.5)
        model, optimizer = amp.initialize(model, optimizer, opt_level=a_level, loss_scale=8.0, verbosity=0)
        for _ in range(2):
            if when == "before the step":
                optimizer.zero_grad()
            with amp.scale_loss(model(torch.ones(())).float(), optimizer) as scaled:
                scaled.backward()
            if when != "after the step":
                clear(model, optimizer)
            optimizer.step()
            if when != "before the step":
                clear(model, optimizer)
        if when != "before the step":
            optimizer.step()
        ends.append(list(model.state_dict().values()))
    assert same(*ends)


def test_sparse_gradients_are_zeroed_too():
    model = torch.nn.Embedding(4, 2, sparse=True)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    before = masters(optimizer)
    with amp.scale_loss(model(torch.tensor([1])).sum() / 4, optimizer) as scaled:
        scaled.backward()
    model.zero_grad(set_to_none=False)
    optimizer.step()
    assert same(masters(optimizer), before)


def test_looking_at_edited_gradients_waits_for_nothing():
    model, optimizer = start("O2")
    backward(model, optimizer)
    for param in halves(model):
        param.grad.mul_(0.5)
    with Counter() as counter:
        list(amp.master_params(optimizer))
    assert counter.syncs == 0
