"""Gradients of unusual kinds (sparse ones, windows into buckets), and gradients of parameters that join later."""

import pytest
import torch
from amp_training import assert_masters_agree, backward, loss_of, masters, same, sgd, start, train

from ampcompat import amp

pytestmark = [pytest.mark.device, pytest.mark.torch]


def grads(optimizer):
    return [None if p.grad is None else p.grad.clone() for p in amp.master_params(optimizer)]


def single(level, seed, times=1.0):
    """The gradients of one batch alone."""
    model, optimizer = start(level)
    backward(model, optimizer, seed, times)
    return grads(optimizer)


class Bag(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table, self.out = torch.nn.Embedding(9, 4, sparse=sparse), torch.nn.Linear(4, 1)

    def forward(self, indices):
        return self.out(self.table(indices)).sum()


def run_bag(level, sparse, steps=3):
    torch.manual_seed(0)
    model = Bag(sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
    for step in range(steps):
        for part in range(2):
            indices = torch.tensor([step, 3, 3, 8 - part])
            with amp.scale_loss(model(indices), optimizer) as scaled:
                scaled.backward()
        assert model.table.weight.grad is None or model.table.weight.grad.is_sparse == sparse
        optimizer.step()
        optimizer.zero_grad()
        if level == "O2":
            assert_masters_agree(model)
    return masters(optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_sparse_gradients_as_dense_ones(level):
    for got, want in zip(run_bag(level, True), run_bag(level, False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # duplicates are summed in another order


def test_sparse_duplicates_are_summed_in_float32():
    """Entries of one row in a sparse half gradient, whose sum would overflow in half."""
    model, optimizer = start("O2", model=torch.nn.Embedding(3, 2, sparse=True), loss_scale=1.0)
    with amp.scale_loss(model(torch.tensor([1, 1])).float().sum() * 4e4, optimizer) as scaled:
        scaled.backward()
    (master,) = amp.master_params(optimizer)
    assert torch.equal(master.grad.to_dense()[1], torch.full((2,), 8e4))  # half ends at 65504
    optimizer.step()


def test_an_overflow_in_a_sparse_gradient_skips(capsys):
    model, optimizer = start("O1", model=torch.nn.Embedding(3, 2, sparse=True))
    with amp.scale_loss(model(torch.tensor([1])).sum() * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("delay", [False, True])
def test_sparse_gradients_of_delayed_blocks(level, delay):
    torch.manual_seed(0)
    model = torch.nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    before = model.state_dict()["weight"].clone()
    for last in (False, True):
        loss = model(torch.tensor([1, 1, 4])).float().sum() / 4
        with amp.scale_loss(loss, optimizer, delay_unscale=delay and not last) as scaled:
            scaled.backward()
    (grad,) = [p.grad.to_dense().float() for p in amp.master_params(optimizer)]
    want = torch.zeros(6, 3)
    want[1], want[4] = 1.0, 0.5
    assert torch.equal(grad, want)
    optimizer.step()
    assert torch.equal(model.state_dict()["weight"], before - 0.5 * want)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_gradients_that_are_windows_into_a_bucket(level):
    # DistributedDataParallel(gradient_as_bucket_view=True) makes every gradient a view of one buffer, which the next
    # backward overwrites.
    want = [a + b for a, b in zip(single(level, 1), single(level, 2), strict=True)]
    model, optimizer = start(level)
    bucket = {p: torch.zeros(p.numel() + 3, dtype=p.dtype) for p in model.parameters()}

    def into_bucket(param):
        window = bucket[param][1 : 1 + param.numel()].view_as(param)
        window.copy_(param.grad)
        param.grad = window

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(into_bucket)
    backward(model, optimizer, 1)
    backward(model, optimizer, 2)
    if level == "O0":  # nothing is put aside: plain PyTorch accumulates in place
        assert all(torch.isfinite(g).all() for g in grads(optimizer))
    else:
        assert same(grads(optimizer), want)
    if level == "O1":  # the sum is in the bucket, which DDP reduces next
        assert all(param.grad.data_ptr() == window[1:].data_ptr() for param, window in bucket.items())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_may_list_an_optimizer_twice(level):
    """What was accumulated before the block is kept and counted once."""
    model, optimizer = start(level)
    backward(model, optimizer, 1)
    with amp.scale_loss(loss_of(model, 2), [optimizer, optimizer]) as scaled:
        scaled.backward()
    want = [a + b for a, b in zip(single(level, 1), single(level, 2), strict=True)]
    assert same(grads(optimizer), want)


def by_the_optimizer(model, optimizer, set_to_none):
    optimizer.zero_grad(set_to_none)


def by_the_model(model, optimizer, set_to_none):
    model.zero_grad(set_to_none)


def by_its_modules(model, optimizer, set_to_none):
    for module in model.children():
        module.zero_grad(set_to_none)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clear", [by_the_optimizer, by_the_model, by_its_modules])
def test_zero_grad_reaches_the_gradients_of_earlier_blocks(level, set_to_none, clear):
    """In an open block, which has set them aside, and after a delayed one."""
    model, optimizer = start(level)
    backward(model, optimizer, 1)
    with amp.scale_loss(loss_of(model, 2), optimizer) as scaled:
        clear(model, optimizer, set_to_none)
        scaled.backward()
    assert same(grads(optimizer), single(level, 2))
    backward(model, optimizer, 1, delay_unscale=True)
    clear(model, optimizer, set_to_none)
    backward(model, optimizer, 3)
    assert same(grads(optimizer), single(level, 3))


def test_gradients_that_are_views_of_the_gradient_of_one_flat_parameter():
    """As contiguous_params makes them: a block cannot keep older gradients apart from new ones."""
    layers = torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)
    model = torch.nn.Sequential(*layers)
    params = list(model.parameters())
    flat = torch.nn.Parameter(torch.cat([p.detach().flatten() for p in params]))
    flat.grad = torch.zeros_like(flat)
    at = 0
    for param in params:
        param.data = flat.data[at : at + param.numel()].view_as(param)
        param.grad = flat.grad[at : at + param.numel()].view_as(param)
        at += param.numel()
    optimizer = torch.optim.SGD([flat], lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    before = flat.detach().clone()
    with (
        pytest.raises(RuntimeError, match="had before the block was written .*contiguous_params"),
        amp.scale_loss(model(torch.ones(2, 4)).float().sum(), optimizer) as scaled,
    ):
        scaled.backward()
    assert flat.grad is None
    optimizer.step()
    assert torch.equal(flat.detach(), before)


def a_head(model):
    """An optimizer of the last layer alone; blocks give gradients to the batch norm, too."""
    return sgd(model.b)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_gradients_of_a_later_param_begin_with_it(level):
    """Blocks have left it gradients that are still scaled; the script unfreezes it by ``add_param_group`` alone."""
    model, optimizer = start(level, a_head, loss_scale=2.0**10)
    for seed in range(3):
        backward(model, optimizer, seed)
        optimizer.step()
        optimizer.zero_grad()
    assert model.bn.weight.grad.any()
    optimizer.add_param_group({"params": [model.bn.weight]})
    before = model.bn.weight.detach().clone()
    backward(model, optimizer, 3)
    grad = model.bn.weight.grad.clone()
    wanted = torch.autograd.grad(loss_of(model, 3), model.bn.weight)[0]
    torch.testing.assert_close(grad, wanted, rtol=5e-2, atol=1e-3)
    optimizer.step()
    torch.testing.assert_close(model.bn.weight.detach(), before - 0.1 * grad)


def unscaled_by_another_optimizer(level):
    model, optimizer = start(level, a_head, loss_scale=2.0**10)
    other = sgd(model.bn)
    amp.initialize(model, [optimizer, other], opt_level=level, verbosity=0, loss_scale=2.0**10)
    backward(model, [optimizer, other])
    return model, optimizer, other


def never_scaled(level):
    model, optimizer = start(level, a_head, loss_scale=1.0)
    backward(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("way", [unscaled_by_another_optimizer, never_scaled], ids=lambda f: f.__name__)
def test_a_later_param_may_bring_gradients(level, way):
    model, optimizer, *_others = way(level)
    grad = model.bn.weight.grad
    optimizer.add_param_group({"params": [model.bn.weight]})
    assert grad is not None
    assert model.bn.weight.grad is grad


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_param_cannot_join_in_a_block(level):
    """The backward pass may give it a gradient that the block does not unscale."""
    model, optimizer = start(level, a_head, loss_scale=128.0)
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        with pytest.raises(RuntimeError, match=r"add_param_group\(\) inside its scale_loss block - .* - add the group"):
            optimizer.add_param_group({"params": [model.bn.weight]})
        scaled.backward()
    twin, twin_optimizer = start(level, a_head, loss_scale=128.0)
    backward(twin, twin_optimizer)
    assert same(grads(optimizer), grads(twin_optimizer))


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("listed_anew", [False, True])
def test_a_param_put_in_the_place_of_another_is_trained(level, listed_anew):
    """Pruning and densification write ``group["params"][i] = nn.Parameter(...)``."""
    model, optimizer = start(level, loss_scale=128.0)
    train(model, optimizer, 1)
    new = torch.nn.Parameter(torch.zeros_like(model.bn.weight))
    model.bn.weight = new
    params = optimizer.param_groups[0]["params"]
    if listed_anew:
        params = optimizer.param_groups[0]["params"] = list(params)
    params[2] = new
    backward(model, optimizer)
    grad = new.grad.clone()
    optimizer.zero_grad()
    torch.testing.assert_close(grad, torch.autograd.grad(loss_of(model), new)[0], rtol=5e-2, atol=1e-3)
    backward(model, optimizer)
    optimizer.step()
    assert torch.equal(new.detach(), -0.1 * grad)


def test_a_later_param_keeps_a_gradient_of_no_block():
    """No loss was scaled yet: what is there is the script's own."""
    model, optimizer = start("O1", a_head)
    loss_of(model).backward()
    grad = model.bn.weight.grad
    optimizer.add_param_group({"params": [model.bn.weight]})
    assert model.bn.weight.grad is grad


class Branches(torch.nn.Module):
    """Two layers, each left out of some passes (stochastic depth, a discriminator's head)."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        for param in self.parameters():
            torch.nn.init.constant_(param, 0.5)

    def forward(self, x, uses_b):
        return self.a(x) + self.b(x) if uses_b else self.a(x)


def weights_of_b(level, clear, passes):
    """The float32 weights of ``b`` after each of six steps. All gradients are exact in half."""
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5, weight_decay=0.25)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=None if level == "O0" else 8.0)
    seen = []
    for step in range(6):
        clear(model, optimizer)
        for uses_b in passes(step):
            with amp.scale_loss(model(torch.ones(2, 4), uses_b).float().sum(), optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        seen.append(list(amp.master_params(optimizer))[2].detach().clone())
    return seen


CLEARS = {
    "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "to zero, by the model": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "to None": lambda model, optimizer: optimizer.zero_grad(),
}
PASSES = {
    "once": lambda step: [step == 0],
    "every third step": lambda step: [step % 3 == 0],
    "in the first of two passes": lambda step: [step % 2 == 0, False],
}


@pytest.mark.cover(2)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("clear", CLEARS)
def test_a_layer_that_gets_no_gradient_moves_as_in_float32(level, clear, passes):
    """``zero_grad(set_to_none=False)`` leaves gradients of zero: momentum and weight decay move it."""
    wanted = weights_of_b("O0", CLEARS[clear], PASSES[passes])
    assert same(weights_of_b(level, CLEARS[clear], PASSES[passes]), wanted)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("raises", [False, True])
def test_a_gradient_that_a_script_clears_is_gone_where_the_last_pass_gave_none(level, raises):
    """SwAV and DINO set ``p.grad = None`` between a block and its step: older passes count too."""
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
    for uses_b in (True, False):
        with amp.scale_loss(model(torch.ones(2, 4), uses_b).float().sum(), optimizer) as scaled:
            scaled.backward()
    if raises:
        with pytest.raises(ZeroDivisionError), amp.scale_loss(model(torch.ones(2, 4), True).float().sum(), optimizer):
            raise ZeroDivisionError
    for param in model.b.parameters():
        assert param.grad is not None
        param.grad = None
    optimizer.step()
    assert model.b.weight.detach().eq(0.5).all()
    assert model.a.weight.detach().ne(0.5).all()
