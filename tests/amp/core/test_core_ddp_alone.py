"""Blocks and clears of a model in torch's DDP on one process: views of its buckets, and ``no_sync``."""

import pytest
import torch
import torch.distributed as dist
from core_kit import backward, loss_of, net, same, start
from torch.nn.parallel import DistributedDataParallel

from ampcompat import amp


@pytest.fixture(autouse=True)
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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


def test_a_block_of_some_of_the_unreduced_tensors_is_refused():
    model = net()
    pair = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.a, model.b)]
    model, pair = amp.initialize(model, pair, opt_level="O1", loss_scale=128.0, verbosity=0)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    with wrapped.no_sync():
        backward(wrapped, pair)
    shown = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"no_sync\(\) has left .* - give the block all of them"):
        amp.scale_loss(loss_of(wrapped), pair[0]).__enter__()
    assert same(shown, [p.grad for p in model.parameters()])
    backward(wrapped, pair)
    for optimizer in pair:
        optimizer.step()
