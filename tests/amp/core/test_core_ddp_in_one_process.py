"""Blocks and clears of a model in torch's DDP on one process: views of its buckets, and ``no_sync``."""

import pytest
import torch
from amp_training import INF, backward, loss_of, net, start
from torch.nn.parallel import DistributedDataParallel

from ampcompat import amp

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("group_of_one")]


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_gradients_that_are_views_of_buckets_are_zeroed(level):
    model, optimizer = start(level)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    for seed in range(2):
        backward(wrapped, optimizer, seed)
        optimizer.zero_grad(set_to_none=False)
        assert not any(p.grad.any() for p in (*model.parameters(), *amp.master_params(optimizer)))
        backward(wrapped, optimizer, seed)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def test_after_no_sync_blocks_at_a_scale_of_one_stay_plain():
    model, optimizer = start("O4")
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync():
        backward(wrapped, optimizer)
    backward(wrapped, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    loss = loss_of(wrapped)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss  # nothing to multiply by
        scaled.backward()


def test_delayed_gradients_of_no_sync_cannot_be_declared_unscaled():
    model, optimizer = start("O1")
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync():
        backward(wrapped, optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match="unscaled the gradients already"):
        optimizer._amp_stash.params_have_scaled_gradients = False


def gradients(optimizer):
    return [p.grad.clone() for p in amp.master_params(optimizer)]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("moves", [False, True])
def test_gradients_of_no_sync_are_averaged_with_the_next(level, moves):
    """DDP finds the sum in ``p.grad``, at the scale of the block, whatever the scale was before."""
    seen = []
    model, optimizer = start(level)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, lambda _, bucket: seen.append(bucket.buffer().clone()) or as_it_is(bucket))
    with wrapped.no_sync():
        backward(wrapped, optimizer, 1)
    assert not seen
    if moves:
        amp._amp_state.loss_scalers[0]._loss_scale /= 4
    scale = amp._amp_state.loss_scalers[0].loss_scale()
    backward(wrapped, optimizer, 2)
    reduced = sum(buffer.float().sum() for buffer in seen)
    torch.testing.assert_close(reduced / scale, sum(g.sum() for g in gradients(optimizer)), rtol=1e-3, atol=1e-4)
    twin, twin_optimizer = start(level, model=net())
    backward(twin, twin_optimizer, 1)
    backward(twin, twin_optimizer, 2)
    for got, want in zip(gradients(optimizer), gradients(twin_optimizer), strict=True):
        torch.testing.assert_close(got, want, rtol=4e-3, atol=1e-5)  # the sum is rounded to half at O2


def as_it_is(bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_block_that_raises_after_no_sync_adds_as_others_do(level):
    model, optimizer = start(level)
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync():
        backward(wrapped, optimizer, 1)
        block = amp.scale_loss(loss_of(wrapped, 2), optimizer)
        block.__enter__().backward()
        block.__exit__(ZeroDivisionError, ZeroDivisionError())
    backward(wrapped, optimizer, 3)
    twin, twin_optimizer = start(level, model=net())
    for seed in (1, 2, 3):
        backward(twin, twin_optimizer, seed)
    for got, want in zip(gradients(optimizer), gradients(twin_optimizer), strict=True):
        torch.testing.assert_close(got, want, rtol=4e-3, atol=1e-5)


@pytest.mark.parametrize("end", ["block", "step"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_in_no_sync_is_found_when_all_processes_have_it(level, end):
    """By the next block that averages; or by the step, where the script has averaged."""
    model, optimizer = start(level, loss_scale="dynamic")
    wrapped = DistributedDataParallel(model)
    (scaler,) = amp._amp_state.loss_scalers
    with wrapped.no_sync():
        backward(wrapped, optimizer, times=INF)
    assert not optimizer._amp_stash.already_patched
    assert (scaler.loss_scale(), scaler._has_overflow) == (2.0**16, False)
    if end == "block":
        backward(wrapped, optimizer)
        assert scaler.loss_scale() == 2.0**15
    optimizer.step()
    assert amp.step_was_skipped(optimizer)
    assert scaler.loss_scale() == 2.0**15
    optimizer.zero_grad()
    backward(wrapped, optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer)
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**15, 1)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_another_holder_has_gradients_of_no_sync_averaged(level):
    """Its synchronised block leaves them in ``p.grad``, where DDP averages them with the new ones."""
    model, first = start(level)
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize([], second, opt_level=level, verbosity=0)
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync():
        backward(wrapped, first)
    with amp.scale_loss(loss_of(wrapped, 1), second) as scaled:
        assert all(p.grad is not None for p in model.parameters())
        scaled.backward()
