"""The classes of ``apex.parallel``, on two gloo processes: each check compares with the whole batch on one."""

import pickle

import pytest
import torch
import torch.distributed as dist
from process_group import run_on_two_processes
from torch import nn

from ampcompat.parallel import (
    LARC,
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)
from ampcompat.parallel.distributed import apply_flat_dist_call, split_half_float_double
from ampcompat.parallel.multiproc import launch_arguments

pytestmark = pytest.mark.torch


def model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def batch():
    return torch.arange(12.0).reshape(4, 3) / 12


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = model(), model()

    def forward(self, x):
        return self.used(x)


def check_gradients(rank):
    mine, whole = batch()[2 * rank : 2 * rank + 2], model()
    whole(batch()).mean().backward()
    cases = [
        ({}, 1.0),
        ({"gradient_predivide_factor": 2.0}, 1.0),
        ({"gradient_predivide_factor": 8.0}, 1.0),
        ({"gradient_average": False}, 2.0),
        ({"delay_allreduce": True, "message_size": 10}, 1.0),
        ({"allreduce_always_fp32": True}, 1.0),
    ]
    for options, factor in cases:
        wrapped = DistributedDataParallel(model(), **options)
        wrapped(mine).mean().backward()
        torch.testing.assert_close(wrapped.module.weight.grad, whole.weight.grad * factor)  # sums in another order


def check_wrapper(rank):
    wrapped = DistributedDataParallel(Unused(), delay_allreduce=True)
    for _ in range(2):
        wrapped(batch()).sum().backward()
    assert wrapped.module.idle.weight.grad is None
    assert set(wrapped.state_dict()) == {f"module.{k}" for k in Unused().state_dict()}
    with pytest.raises(ValueError, match="delay_allreduce=True"):
        DistributedDataParallel(model(), shared_param=True)
    wrapped.zero_grad()
    wrapped.disable_allreduce()
    wrapped(batch() * (rank + 1)).sum().backward()
    local = wrapped.module.used.weight.grad.clone()
    gathered = [torch.empty_like(local) for _ in range(2)]
    dist.all_gather(gathered, local)
    assert not torch.equal(*gathered)


def check_fallback(rank):
    """As scripts do that reduce by hand: passes of local gradients, then one reduction of their sums."""
    mine, whole = batch()[2 * rank : 2 * rank + 2], Unused()
    for _ in range(2):
        whole(batch()).mean().backward()
    for options in ({}, {"gradient_predivide_factor": 2.0}, {"delay_allreduce": True}):
        wrapped = DistributedDataParallel(Unused(), **options)
        wrapped(mine).mean().backward()  # a pass that reduces, by which buckets are made
        wrapped.zero_grad()
        wrapped.disable_allreduce()
        for _ in range(2):
            wrapped(mine).mean().backward()
        wrapped.allreduce_fallback()
        used, idle = wrapped.module.used, wrapped.module.idle
        torch.testing.assert_close(used.weight.grad, whole.used.weight.grad)  # sums in another order
        assert idle.weight.grad is None
        if rank == 1:  # a parameter that one rank alone has a gradient of
            idle.weight.grad = torch.ones_like(idle.weight)
        used.weight.grad = None
        wrapped.allreduce_fallback()
        assert torch.equal(idle.weight.grad, torch.full_like(idle.weight, 0.5))
        assert used.weight.grad is None
        wrapped.enable_allreduce()
        wrapped.zero_grad()
        wrapped(mine).mean().backward()
        torch.testing.assert_close(used.weight.grad, whole.used.weight.grad / 2)


def check_reducer(rank):
    net = model()
    with torch.no_grad():
        net.weight += rank
    reducer = Reducer(net)
    assert torch.equal(net.weight, model().weight)
    net.weight.grad = torch.full_like(net.weight, float(rank))
    reducer.reduce()
    assert torch.equal(net.weight.grad, torch.full_like(net.weight, 0.5))


def check_sync_batch_norm(rank):
    torch.manual_seed(1)
    x = torch.randn(6, 3, 4)
    cut = slice(0, 2) if rank == 0 else slice(2, 6)  # uneven on purpose
    plain, sync = nn.BatchNorm1d(3), convert_syncbn_model(nn.BatchNorm1d(3))
    whole, mine = x.clone().requires_grad_(), x[cut].clone().requires_grad_()
    expected, got = plain(whole), sync(mine)
    torch.testing.assert_close(got, expected[cut], rtol=1e-5, atol=1e-5)  # float32 sums in another order
    expected.pow(3).sum().backward()
    got.pow(3).sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad[cut], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sync.running_mean, plain.running_mean)
    torch.testing.assert_close(sync.running_var, plain.running_var)
    alone = create_syncbn_process_group(1)
    local = SyncBatchNorm(3, process_group=alone)
    torch.testing.assert_close(local(x[cut]), nn.BatchNorm1d(3)(x[cut]))
    with pytest.raises(ValueError, match="divisor"):
        create_syncbn_process_group(3)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_two_processes(check):
    run_on_two_processes(check)


@pytest.mark.parametrize("make", [lambda: DistributedDataParallel(model()), lambda: Reducer(model())])
def test_without_a_process_group(make):
    with pytest.raises(RuntimeError, match="init_process_group"):
        make()


def test_convert_keeps_parameters_and_mode():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.InstanceNorm1d(3)).eval()
    weight, keys = net[1].weight, list(net.state_dict())
    assert convert_syncbn_model(net) is net
    assert isinstance(net[1], SyncBatchNorm)
    assert net[1].weight is weight
    assert not net[1].training
    assert type(net[2]) is nn.InstanceNorm1d
    assert list(net.state_dict()) == keys


@pytest.mark.parametrize("training", [True, False])
def test_alone_it_is_batch_norm_with_apex_extras(training):
    x = torch.randn(4, 5, 3)
    layer, plain = (
        SyncBatchNorm(3, channel_last=True, fuse_relu=True).train(training),
        nn.BatchNorm1d(3).train(training),
    )
    expected = (plain(x.movedim(-1, 1)).movedim(1, -1) + 1).relu()
    assert torch.equal(layer(x, torch.ones_like(x)), expected)
    assert torch.equal(layer.running_var, plain.running_var)


def test_larc_is_the_class_both_ways():
    from ampcompat.parallel.LARC import LARC as from_module

    assert LARC is from_module
    assert isinstance(LARC, type)


def test_multiproc_arguments():
    assert launch_arguments(["a.py", "-x"], 4) == ["--standalone", "--nproc_per_node=4", "a.py", "-x"]
    assert launch_arguments(["a.py", "--world-size", "2"], 8)[1] == "--nproc_per_node=2"
    assert launch_arguments(["a.py"], 0)[1] == "--nproc_per_node=1"


def test_a_layer_that_apexs_python_build_saved():
    """Its ``SyncBatchNorm`` had ``process_group`` and nothing else beside what batch norm has."""
    norm = SyncBatchNorm(3)
    for name in ("channel_last", "fuse_relu"):
        del norm.__dict__[name]
    loaded, x = pickle.loads(pickle.dumps(norm)), batch()
    assert torch.equal(loaded(x), nn.BatchNorm1d(3)(x))
    assert (loaded.channel_last, loaded.fuse_relu) == (False, False)


def test_flat_calls_by_dtype():
    tensors = [torch.ones(2), torch.ones(3).half(), torch.ones(2, 2)]
    halves_last = split_half_float_double(tensors)
    assert [[t.dtype for t in bucket] for bucket in halves_last] == [[torch.float32] * 2, [torch.float16]]
    apply_flat_dist_call(halves_last[0], lambda flat, factor: flat.mul_(factor), (2,))
    assert torch.equal(tensors[0], torch.full((2,), 2.0))
    assert torch.equal(tensors[2], torch.full((2, 2), 2.0))
