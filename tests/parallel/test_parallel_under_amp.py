"""apex's parallel package around initialized models, on two gloo processes; one process on all the data is the rule."""

import pytest
import torch
import torch.distributed as dist
from amp_training import make_step
from process_group import run_on_two_processes
from python_process import run_python
from torch import nn

from ampcompat import amp
from ampcompat.optimizers import FusedAdam
from ampcompat.parallel import LARC, DistributedDataParallel, ReduceOp, Reducer, SyncBatchNorm, convert_syncbn_model
from ampcompat.parallel.distributed import flat_dist_call

pytestmark = pytest.mark.torch

LEVELS = ("O0", "O1", "O2", "O3")


def net(norm=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.ReLU(), nn.Linear(8, 2))


def data(step):
    torch.manual_seed(step)
    return torch.randn(8, 4)


def train(model, optimizer, cut=slice(None)):
    for step in range(3):
        loss = model(data(step)[cut]).float().pow(2).mean()
        make_step(optimizer, loss)
        optimizer.zero_grad()


def equal_on_both(tensor):
    gathered = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(gathered, tensor.contiguous())
    return torch.equal(*gathered)


def check_training(rank):
    made = {
        "FusedAdam": lambda p: FusedAdam(p, lr=0.01, eps=1e-3),
        "LARC": lambda p: LARC(torch.optim.SGD(p, lr=0.05)),
    }
    for level in LEVELS:
        for name, make in made.items():
            whole = net()
            whole, optimizer = amp.initialize(
                whole, make(whole.parameters()), opt_level=level, loss_scale=64.0, verbosity=0
            )
            train(whole, optimizer)
            mine = net()
            mine, optimizer = amp.initialize(
                mine, make(mine.parameters()), opt_level=level, loss_scale=64.0, verbosity=0
            )
            wrapped = DistributedDataParallel(mine, delay_allreduce=True)
            assert wrapped.module is mine
            train(wrapped, optimizer, slice(4 * rank, 4 * rank + 4))
            for key, value in mine.state_dict().items():
                assert equal_on_both(value), (level, name, key)
                # Half gradients of half a batch and of the whole batch round differently; three steps of lr 0.05.
                tolerance = 1e-5 if level == "O0" else 4e-3
                torch.testing.assert_close(value, whole.state_dict()[key], rtol=tolerance, atol=tolerance)


def check_float32_reduction(rank):
    # Divided by 1/32 before the reduction a gradient of 40000 is 1.28e6: no float16 holds that, though the mean fits.
    for always, finite in ((False, False), (True, True)):
        model = nn.Linear(3, 2).half()
        wrapped = DistributedDataParallel(model, allreduce_always_fp32=always, gradient_predivide_factor=1 / 32)
        (wrapped(torch.ones(1, 3).half()).float() * 40000).sum().backward()
        assert bool(model.weight.grad.isfinite().all()) is finite
        if finite:
            assert torch.equal(model.weight.grad, torch.full((2, 3), 40000.0).half())


def check_flat_dist_call(rank):
    tensors = [torch.full((2, 3), float(rank)), torch.full((3,), 2.0 * rank).half(), torch.full((), 4.0 * rank)]
    flat_dist_call(tensors, dist.all_reduce)
    assert torch.equal(tensors[0], torch.full((2, 3), 0.5))
    assert torch.equal(tensors[1], torch.full((3,), 1.0).half())
    assert torch.equal(tensors[2], torch.tensor(2.0))
    tensors = [torch.full((2,), float(rank))]
    flat_dist_call(tensors, dist.broadcast, (1,))
    assert torch.equal(tensors[0], torch.ones(2))
    flat_dist_call(tensors, dist.all_reduce, (ReduceOp.MAX,))
    flat_dist_call([], dist.all_reduce)


def check_reducer(rank):
    """Ranks that started from different seeds train as one, low bits of the masters included."""
    for level in LEVELS:
        torch.manual_seed(rank)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
        reducer = Reducer(model)
        for step in range(3):
            with amp.scale_loss(model(data(step)[4 * rank : 4 * rank + 4]).float().pow(2).mean(), optimizer) as scaled:
                scaled.backward()
                reducer.reduce()
            optimizer.step()
            optimizer.zero_grad()
        for param in (*model.parameters(), *amp.master_params(optimizer)):
            assert equal_on_both(param.detach()), level


def check_sync_batch_norm(rank):
    torch.manual_seed(3)
    x, cut = torch.randn(6, 5, 3), slice(0, 2) if rank == 0 else slice(2, 6)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):  # half: one rounding at the end
        plain, sync = nn.BatchNorm1d(3), SyncBatchNorm(3, channel_last=True)
        expected = plain(x.to(dtype).float().movedim(-1, 1)).movedim(1, -1)
        got = sync(x[cut].to(dtype))
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), expected[cut], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(sync.running_var, plain.running_var)
    # One value per channel here, more in the world: fine, where plain batch norm refuses.
    value = SyncBatchNorm(3)(torch.full((1, 3), float(rank)))
    torch.testing.assert_close(value, torch.full((1, 3), 2.0 * rank - 1), rtol=1e-4, atol=1e-4)  # eps


def check_convert(rank):
    for level, options in (("O1", {}), ("O2", {}), ("O2", {"keep_batchnorm_fp32": False}), ("O3", {})):
        ends = []
        for before in (True, False):
            model = net(norm=True)
            model = convert_syncbn_model(model) if before else model
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            model, optimizer = amp.initialize(
                model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0, **options
            )
            model = model if before else convert_syncbn_model(model)
            assert type(model[1]) is SyncBatchNorm
            half = level == "O3" or bool(options)
            assert model[1].weight.dtype == (torch.float16 if half else torch.float32)
            start = model[1].weight.detach().clone()
            train(DistributedDataParallel(model), optimizer, slice(4 * rank, 4 * rank + 4))
            assert not torch.equal(start, model[1].weight)
            ends.append({k: v.clone() for k, v in model.state_dict().items()})
        for key, value in ends[0].items():
            assert value.dtype in (torch.float32, torch.int64)
            assert torch.equal(value, ends[1][key]), (level, options, key)


def check_reduction_by_hand(rank):
    """``disable_allreduce``, and a reduction over ``master_params``: each rank steps with the mean of the gradients."""
    for level in ("O0", "O1", "O2"):
        for loss_scale in (64.0, "dynamic"):
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=loss_scale, verbosity=0)
            wrapped = DistributedDataParallel(model)
            wrapped.disable_allreduce()
            for step in range(3):
                with amp.scale_loss(wrapped(data(step)[4 * rank : 4 * rank + 4]).float().pow(2).mean(), optimizer) as s:
                    s.backward()
                own = [param.grad.clone() for param in amp.master_params(optimizer)]
                for param in amp.master_params(optimizer):
                    dist.all_reduce(param.grad)
                    param.grad /= 2
                for param, grad in zip(amp.master_params(optimizer), own, strict=True):
                    assert equal_on_both(param.grad), level
                    both = [torch.empty_like(grad) for _ in range(2)]
                    dist.all_gather(both, grad)
                    assert torch.equal(param.grad, (both[0] + both[1]) / 2), level
                    assert param.grad.abs().max() < 8.0, "still multiplied by the loss scale"
                optimizer.step()
                optimizer.zero_grad()
            for param in amp.master_params(optimizer):
                assert equal_on_both(param.detach()), level


def check_accumulation_without_reduction(rank):
    """``disable_allreduce`` for all passes but the last, which reduces the sum of all."""
    for level in ("O1", "O2"):
        ends = []
        for parts in (1, 2):
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
            wrapped = DistributedDataParallel(model)
            mine = data(0)[4 * rank : 4 * rank + 4].chunk(parts)
            for number, part in enumerate(mine, 1):
                wrapped.enable_allreduce() if number == parts else wrapped.disable_allreduce()
                with amp.scale_loss(wrapped(part).float().pow(2).mean() / parts, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
            ends.append(list(amp.master_params(optimizer)))
            assert all(equal_on_both(param.detach()) for param in ends[-1]), level
        for one, other in zip(*ends, strict=True):
            torch.testing.assert_close(one, other, rtol=4e-3, atol=4e-3)  # half gradients of halves of a batch


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_two_processes(check):
    run_on_two_processes(check)


@pytest.mark.usefixtures("group_of_one")
def test_unused_keywords_are_said_once_on_rank_0(capsys):
    DistributedDataParallel(net(), num_allreduce_streams=2, retain_allreduce_buffers=True)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "no effect: retain_allreduce_buffers, num_allreduce_streams" in said
    DistributedDataParallel(net(), prof=True, message_size=1000)
    assert capsys.readouterr().out == ""


def test_a_batch_norm_that_is_itself_the_model_converts():
    model = amp.initialize(nn.BatchNorm1d(3), opt_level="O3", verbosity=0)
    model = convert_syncbn_model(model)
    assert isinstance(model, SyncBatchNorm)
    out = model(torch.randn(4, 3))  # cast in and out as before
    assert out.dtype == torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_larc_outside_sees_unscaled_gradients_and_written_weights(level):
    """It scales gradients before the optimizer's own step, which unscales the gradients of a delayed block."""
    ends = []
    for delay in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
        outside = LARC(optimizer)
        for step in range(2):
            for param in model.parameters():
                param.data.clamp_(-0.25, 0.25)
            if delay:  # else amp.master_params does it
                with amp.scale_loss(model(data(step)).float().pow(2).mean(), optimizer, delay_unscale=True) as scaled:
                    scaled.backward()
            else:
                make_step_without(optimizer, model(data(step)).float().pow(2).mean())
                list(amp.master_params(optimizer))
            outside.step()
            outside.zero_grad()
        ends.append(list(model.state_dict().values()))
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


def make_step_without(optimizer, loss):
    """A block alone."""
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()


@pytest.mark.parametrize("level", LEVELS)
def test_larc_outside_and_inside_train_alike(level):
    ends = []
    for outside in (False, True):
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(
            model, inner if outside else LARC(inner), opt_level=level, loss_scale="dynamic", verbosity=0
        )
        optimizer = LARC(optimizer) if outside else optimizer
        make_step(optimizer, model(data(0)).sum() * torch.inf)
        assert amp.step_was_skipped(optimizer)
        optimizer.zero_grad()
        train(model, optimizer)
        ends.append(model.state_dict())
    for key in ends[0]:
        assert torch.equal(ends[0][key], ends[1][key])


def test_multiproc_starts_the_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        f"open(os.path.join({str(tmp_path)!r}, 'rank' + os.environ['RANK']), 'w').write("
        "os.environ['WORLD_SIZE'] + ' ' + ' '.join(sys.argv[1:]))\n"
    )
    command = ["-m", "ampcompat.parallel.multiproc", script, "--world-size", "2"]
    done = run_python(command)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(p.name for p in tmp_path.glob("rank*")) == ["rank0", "rank1"]
