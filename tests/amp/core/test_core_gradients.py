"""What a block does with gradients: accumulation, overflow in the new ones alone, sparse ones, windows into buckets."""

import pytest
import torch
from core_kit import Net, assert_tied, backward, loss_of, masters, net, same, sgd, start, train
from internals import float32_masters, has_scaled_gradients

from ampcompat import amp

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


def grads(optimizer):
    return [None if p.grad is None else p.grad.clone() for p in amp.master_params(optimizer)]


def single(level, seed, times=1.0):
    """The gradients of one batch alone."""
    model, optimizer = start(level)
    backward(model, optimizer, seed, times)
    return grads(optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_blocks_add_up(level):
    first, second = single(level, 1), single(level, 2)
    model, optimizer = start(level)
    backward(model, optimizer, 1)
    backward(model, optimizer, 2)
    for got, a, b in zip(grads(optimizer), first, second, strict=True):
        assert got.dtype == (torch.float16 if level == "O3" and got.dtype != torch.float32 else torch.float32)
        assert torch.equal(got, a + b)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delayed_blocks_are_unscaled_together(level):
    model, optimizer = start(level)
    scale = amp._amp_state.loss_scalers[0]
    backward(model, optimizer, 1, delay_unscale=True)
    assert has_scaled_gradients(optimizer)
    assert scale._unskipped == 0
    backward(model, optimizer, 2)
    assert not has_scaled_gradients(optimizer)
    assert scale._unskipped == 1
    for got, a, b in zip(grads(optimizer), single(level, 1), single(level, 2), strict=True):
        # The half sum rounds once more than the float32 one.
        torch.testing.assert_close(got, a + b, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_after_delayed_blocks_alone_unscales_first(level):
    model, optimizer = start(level)
    plain, plain_optimizer = start(level, model=net())
    backward(model, optimizer, 1, delay_unscale=True)
    optimizer.step()
    backward(plain, plain_optimizer, 1)
    plain_optimizer.step()
    assert same(masters(optimizer), masters(plain_optimizer))


def test_zero_grad_ends_a_delay():
    model, optimizer = start("O2")
    backward(model, optimizer, 1, delay_unscale=True)
    optimizer.zero_grad()
    backward(model, optimizer, 2)
    assert same(grads(optimizer), single("O2", 2))


@pytest.mark.parametrize("loss_scale", [1.0, 8.0])
def test_gradients_where_only_float32_params_train(loss_scale):
    """Batch norm alone is trained, at O2."""
    found = []
    for frozen in (False, True):
        model, optimizer = start("O2", loss_scale=loss_scale)
        for param in (*model.a.parameters(), *model.b.parameters()) if frozen else ():
            param.requires_grad_(False)
        backward(model, optimizer)
        found.append([p.grad for p in model.bn.parameters()])
        optimizer.step()
    assert same(*found)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_is_found_in_the_new_gradients_alone(level):
    scaler_of = lambda: amp._amp_state.loss_scalers[0]  # noqa: E731
    model, optimizer = start(level)
    backward(model, optimizer, 1, times=float("inf"))
    assert scaler_of().loss_scale() == 2.0**15
    backward(model, optimizer, 2)
    # The old infinities are still there, and are not counted a second time.
    assert (scaler_of().loss_scale(), scaler_of()._unskipped) == (2.0**15, 1)
    before = masters(optimizer)
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert same(masters(optimizer), before)
    optimizer.zero_grad()
    backward(model, optimizer, 2)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_non_finite_gradients_stay_visible_until_the_step(level):
    model, optimizer = start(level)
    backward(model, optimizer, 1, times=float("inf"))
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    assert not torch.isfinite(norm)
    optimizer.step()
    if level == "O2":
        half = float32_masters(optimizer)
        assert half
        assert all(p.grad is None for p in half)


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
            assert_tied(model)
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


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_exception_in_a_block_keeps_gradients(level):
    """They are those from before the block, and the scaler is unchanged."""
    model, optimizer = start(level, loss_scale=8.0)
    backward(model, optimizer, 1)
    before, scaler = grads(optimizer), amp.state_dict()
    with pytest.raises(ZeroDivisionError):
        fail_in_block(model, optimizer)
    assert same(grads(optimizer), before)
    assert amp.state_dict() == scaler
    backward(model, optimizer, 2)
    want = [a + b for a, b in zip(before, single_static(level, 2), strict=True)]
    assert same(grads(optimizer), want)
    optimizer.step()


def fail_in_block(model, optimizer):
    with amp.scale_loss(loss_of(model, 2), optimizer) as scaled:
        scaled.backward()
        raise ZeroDivisionError


def single_static(level, seed):
    model, optimizer = start(level, loss_scale=8.0)
    backward(model, optimizer, seed)
    return grads(optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exception_after_a_delayed_block_warns(level):
    """The scaled gradients of the delayed block are lost, a warning says so, and the step changes nothing."""
    model, optimizer = start(level)
    backward(model, optimizer, 1, delay_unscale=True)
    with (
        pytest.warns(UserWarning, match="raised in its backward pass while scaled gradients"),
        pytest.raises(ZeroDivisionError),
    ):
        fail_in_block(model, optimizer)
    before = masters(optimizer)
    optimizer.step()
    assert same(masters(optimizer), before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("clear", ["optimizer", "optimizer, zeros", "model", "model, zeros", "each", "masters"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_cleared_gradients_do_not_come_back(level, clear):
    def clear_gradients(model, optimizer):
        if clear.startswith("optimizer"):
            optimizer.zero_grad(set_to_none=clear == "optimizer")
        elif clear.startswith("model"):
            model.zero_grad(set_to_none=clear == "model")
        else:
            for param in model.parameters() if clear == "each" else amp.master_params(optimizer):
                param.grad = None

    model, optimizer = start(level)
    backward(model, optimizer, 1)
    optimizer.step()
    clear_gradients(model, optimizer)
    backward(model, optimizer, 2)
    got = grads(optimizer)
    model, optimizer = start(level)
    backward(model, optimizer, 1)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, optimizer, 2)
    assert same(got, grads(optimizer))


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_zero_grad_inside_the_block_clears_what_was_accumulated(level, delay):
    model, optimizer = start(level)
    backward(model, optimizer, 1, delay_unscale=delay)
    with amp.scale_loss(loss_of(model, 2), optimizer) as scaled:
        optimizer.zero_grad()
        scaled.backward()
    assert same(grads(optimizer), single(level, 2))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_zero_grad_with_zeros_keeps_the_gradient_tensors(level):
    model, optimizer = start(level)
    backward(model, optimizer, 1)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in amp.master_params(optimizer))
    optimizer.zero_grad()
    assert all(p.grad is None for p in (*amp.master_params(optimizer), *model.parameters()))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_frozen_params_params_without_gradients_and_shared_ones(level):
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.frozen = (torch.nn.Linear(6, 6) for _ in range(3))
            self.tied = self.used
            self.head = torch.nn.Linear(6, 3, bias=False)
            self.tied_head = torch.nn.Linear(6, 3, bias=False)
            self.tied_head.weight = self.head.weight
            self.frozen.requires_grad_(False)

        def forward(self, x):
            x = self.tied(self.frozen(self.used(x)))
            return self.head(x) + self.tied_head(x)

    torch.manual_seed(0)
    model, optimizer = start(level, model=Odd())
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, optimizer, 1)
    optimizer.step()
    moved = {n for (n, p), old in zip(model.named_parameters(), before, strict=True) if not torch.equal(p, old)}
    assert moved == {"used.weight", "used.bias", "head.weight"}
    assert model.tied_head.weight is model.head.weight
    assert len(list(amp.master_params(optimizer))) == 7
    if level == "O2":
        assert_tied(model)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_may_list_an_optimizer_twice(level):
    """What was accumulated before the block is kept and counted once."""
    model, optimizer = start(level)
    backward(model, optimizer, 1)
    with amp.scale_loss(loss_of(model, 2), [optimizer, optimizer]) as scaled:
        scaled.backward()
    want = [a + b for a, b in zip(single(level, 1), single(level, 2), strict=True)]
    assert same(grads(optimizer), want)


@pytest.mark.parametrize("level", LEVELS)
def test_params_added_later_are_trained(level):
    model = Net()
    optimizer = torch.optim.SGD(model.a.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    groups = optimizer.param_groups
    optimizer.add_param_group({"params": list(model.b.parameters()), "lr": 0.5})
    assert optimizer.param_groups is groups
    before = masters(optimizer)
    backward(model, optimizer, 1)
    optimizer.step()
    assert len(before) == 4
    for index in (0, 2, 3):  # not the bias before the batch norm, which takes it away again
        assert not torch.equal(before[index], masters(optimizer)[index])
    if level in ("O2", "O5"):
        assert_tied(model)
        assert all(p.dtype == torch.float32 for p in amp.master_params(optimizer))
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": [next(iter(amp.master_params(optimizer)))]})


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


def test_sgd_is_the_default_of_the_kit():
    assert isinstance(sgd(net()), torch.optim.SGD)
