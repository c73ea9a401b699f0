"""A write through what ``p.data`` gave out is a fact, however long ago that was; to read it is nothing.

The numbers are exact in both halves, so each level agrees with O0 to the bit.
"""

import copy
import gc
import io
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from counting import counted
from internals import master_of
from known_gradients import STEPS, Run
from nets import MASTER_LEVELS

from ampcompat import amp

pytestmark = pytest.mark.torch


def masters_data(run):
    return [param.data for param in amp.master_params(run.optimizer)]


def models_data(run):
    return [param.data for param in run.model.parameters()]


# -- aliases that a script keeps ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kept", [masters_data, models_data])
@pytest.mark.parametrize("logs", [False, True])
@pytest.mark.parametrize("level", ["O0", *MASTER_LEVELS])
def test_writes_through_kept_aliases_last_while_the_model_is_logged(level, logs, kept):
    """Neither a log of the other copy nor ``sync_masters`` takes a write back."""
    norms = []
    for run_level in ("O0", level):
        run = Run(run_level)
        aliases = kept(run)
        norm = torch.zeros(())
        for index in range(STEPS):
            run.step()
            for alias in aliases:
                alias.clamp_(-0.125, 0.125)
            if index % 2:
                amp.sync_masters(run.model)
            if logs:
                seen = [param.data.float().norm() for param in run.model.parameters()]
            run.model(torch.ones(()))
            if not logs:
                seen = [param.detach().float().norm() for param in run.model.parameters()]
            norm += torch.stack(seen).sum()
            run.weights()
        norms.append(norm)
    assert torch.equal(*norms)


def clamp(alias):
    alias.clamp_(-0.125, 0.125)


def clamp_a_view(alias):
    alias.view(-1).clamp_(-0.125, 0.125)


def clamp_slices(alias):
    for part in alias:
        part.clamp_(-0.125, 0.125)


def clamp_detached(alias):
    alias.detach().clamp_(-0.125, 0.125)


def clamp_into(alias):
    torch.clamp(alias.clone(), -0.125, 0.125, out=alias)


def clamp_by_foreach(alias):
    torch._foreach_clamp_min_([alias], -0.125)
    torch._foreach_clamp_max_([alias], 0.125)


def clamp_in_inference_mode(alias):
    with torch.inference_mode():
        alias.clamp_(-0.125, 0.125)


def fill_by_init(alias):
    torch.nn.init.constant_(alias, 0.125)


def index_put(alias):
    alias[alias > 0.125] = 0.125


WRITES = (clamp, clamp_a_view, clamp_slices, clamp_detached, clamp_into, clamp_by_foreach, clamp_in_inference_mode)
WRITES += (fill_by_init, index_put)


def compiled(backend):
    def write(alias):
        torch.compile(clamp, backend=backend)(alias)

    return write


def trained(level, kept, write, *, takes_anew):
    """The saved weights after steps with a write after each, through aliases kept from before the first step."""
    run = Run(level)
    aliases = kept(run)
    for index in range(STEPS):
        run.step()
        if takes_anew:
            aliases = kept(run)
        if index != 3:  # one step without a write
            for alias in aliases:
                write(alias)
    return run.weights()


@pytest.mark.cover(2)
@pytest.mark.parametrize("takes_anew", [False, True])
@pytest.mark.parametrize("kept", [masters_data, models_data])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_each_way_to_write_counts(level, write, kept, takes_anew):
    want = trained("O0", kept, write, takes_anew=takes_anew)
    got = trained(level, kept, write, takes_anew=takes_anew)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("kept", [masters_data, models_data])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_writes_of_compiled_code_count(backend, kept):
    want = trained("O0", kept, clamp, takes_anew=False)
    got = trained("O2", kept, compiled(backend), takes_anew=False)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("level", ["O0", *MASTER_LEVELS])
def test_views_and_detached_aliases_are_followed_when_the_alias_is_gone(level):
    run = Run(level)
    row = run.model.head.weight.data[0]
    detached = run.model.codebook.weight.data.detach()
    run.step()
    gc.collect()
    row.fill_(0.5)
    detached[3] = 0.25
    saved = run.weights()
    assert (saved["head.weight"][0] == 0.5).all()
    assert (saved["codebook.weight"][3] == 0.25).all()


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_copies_keep_the_counts_of_the_original(level):
    """A deep copy, too, leaves an alias from before it what it is; the copy has none."""
    run = Run(level)
    alias = run.model.head.weight.data
    clone = copy.deepcopy(run.model)
    pickle.loads(pickle.dumps(run.model))
    alias.fill_(0.5)
    assert (run.weights()["head.weight"] == 0.5).all()
    assert not (clone.state_dict()["head.weight"] == 0.5).all()


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_what_data_was_before_it_was_assigned_is_of_no_weight(level):
    run = Run(level)
    before = run.model.head.weight.data
    run.model.head.weight.data = torch.full_like(before, 0.25)
    run.step()
    with torch.no_grad():
        next_master = list(amp.master_params(run.optimizer))[1]
        next_master.fill_(0.5)
    before.zero_()
    assert (run.weights()["head.weight"] == 0.5).all()


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_data_that_is_assigned_twice_counts(level):
    """The second tensor may be where the first one was."""
    run = Run(level)
    weight = run.model.head.weight
    for _ in range(4):
        weight.data = torch.zeros_like(weight.data)
        weight.data = torch.ones_like(weight.data)
    assert (run.weights()["head.weight"] == 1).all()


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_another_shape_of_the_same_memory(level):
    """``data`` is what the weight is now, not what it was at the first access."""
    run = Run(level)
    weight = run.model.head.weight
    assert weight.data.stride() == weight.stride()
    weight.data = weight.data.t().contiguous().t()
    assert weight.data.stride() == weight.stride() == (1, 2)
    weight.data[0] = 0.5
    assert (run.weights()["head.weight"][0] == 0.5).all()


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_data_that_is_assigned_with_other_strides(level):
    """The address is the same."""
    run = Run(level)
    weight = run.model.codebook.weight
    weight.data  # noqa: B018
    weight.data = weight.data.t()
    assert weight.data.stride() == weight.stride() == (1, 4)
    weight.data[0] = 0.5
    assert (run.weights()["codebook.weight"][0] == 0.5).all()


# -- the tensor itself -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_it_is_given_again_while_nobody_holds_it(level):
    run = Run(level)
    for weight in (run.model.head.weight, next(amp.master_params(run.optimizer))):
        first = id(weight.data)
        assert id(weight.data) == first
        held = weight.data
        assert weight.data is not held
        view = weight.data[0]  # by a view, which its script writes later
        assert weight.data is not view._base
        factor = torch.ones((), requires_grad=True)
        graph = factor * weight.data  # by a graph, which wants the version that it has saved
        weight.data.add_(0)
        graph.sum().backward()


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_what_a_script_makes_of_it_is_not_given_again(level):
    """``p.data.requires_grad = True``, which public scripts write for ``p.requires_grad = True``, has no effect."""
    run = Run(level)
    weight = run.model.head.weight
    weight.data.requires_grad = True
    assert not weight.data.requires_grad
    weight.data.zero_()
    assert (run.weights()["head.weight"] == 0).all()


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_threads_that_ask_at_once_lose_no_write(level):
    run = Run(level)
    weight = run.model.head.weight
    given = []

    def ask():
        given.extend(weight.data for _ in range(200))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for alias in given[::50]:
        run.weights()
        amp.sync_masters(run.model)
        alias.add_(1)
        assert master_of(weight).half_data_writes.happened
    del alias
    given.clear()
    run.step()
    assert len(master_of(weight).half_data_writes.held) <= 1


def assign(param):
    param.data = param.data / 2


def hand_to_a_collective(param):
    master_of(param).count_as_written(param)


def add_through_data(param):
    param.data.add_(0)


def add_through_a_view(param):
    param.data.view(-1)[0] += 0


@pytest.mark.parametrize("write", [assign, hand_to_a_collective, add_through_data, add_through_a_view])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_write_through_data_leaves_graphs_alone(level, write):
    """A layer that multiplies by ``weight.data`` and then updates it, as a codebook does; torch notices nothing."""
    run = Run(level)
    weight = run.model.head.weight
    factor = torch.ones((), requires_grad=True)
    loss = (factor * weight.data).float().sum()
    want = weight.detach().float().sum()
    for _ in range(3):
        write(weight)
    loss.backward()
    assert torch.equal(factor.grad, want)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_each_of_several_held_aliases_counts(level):
    run = Run(level)
    weight = run.model.head.weight
    for index in range(3):  # those of the round before are gone
        held = [weight.data for _ in range(3)]
        for number, alias in enumerate(held):
            run.step()
            alias.fill_(number / 4)
            assert (run.weights()["head.weight"] == number / 4).all(), index
        del alias
        held[1].zero_()
        del held
        assert (run.weights()["head.weight"] == 0).all(), index
    writes = master_of(weight).half_data_writes
    weight.data.sum()
    assert len(writes.held) <= 3


# -- a read is nothing -------------------------------------------------------------------------------------------------
def loop(level, reads):
    """A step that logs the norm of each weight, or (``reads`` is None) does not."""
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    params = list(model.parameters())
    x = torch.ones(2, 8)

    def step():
        if reads is not None:
            reads(params)
        with amp.scale_loss(model(x).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def look(params):
    return [param.data for param in params]


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_to_read_data_costs_no_kernel(level):
    """An average, a log, a histogram: all that is counted is that ``data`` is asked for."""
    plain = loop(level, None)
    reading = loop(level, look)
    for _ in range(3):  # the first step makes scales, the first access the counters
        plain()
        reading()
    assert counted(reading) == counted(plain)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_to_read_data_keeps_every_bit(level):
    """Adam's masters are no half numbers: a comparison, or a merge, would be seen."""
    runs = [Run(level, torch.optim.Adam) for _ in range(2)]
    for _ in range(STEPS):
        for param in (*runs[0].model.parameters(), *amp.master_params(runs[0].optimizer)):
            param.data.abs()
        for run in runs:
            run.step()
    got, want = (run.weights() for run in runs)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_what_data_gives_out_is_what_torch_gives_out(level):
    run = Run(level)
    for param in (run.model.head.weight, next(amp.master_params(run.optimizer))):
        data = param.data
        assert type(data) is torch.Tensor
        assert vars(data) == {}
        assert data._base is None
        assert not data.requires_grad
        assert data.data_ptr() == param.data_ptr()
        assert (data.dtype, data.shape, data.stride()) == (param.dtype, param.shape, param.stride())
        assert torch.equal(pickle.loads(pickle.dumps(data)), data)
        buffer = io.BytesIO()
        torch.save(data, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=True), data)
        with torch.inference_mode():
            assert not param.data.is_inference()


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_the_memory_of_aliases_is_not_held(level):
    """What ``data`` was before it was assigned is freed with the script's own reference."""
    run = Run(level)
    weight = run.model.head.weight
    storage = weight.data.untyped_storage()
    weight.data = torch.zeros_like(weight.data)
    held_by_us_alone = torch._C._storage_Use_Count(torch.ones(1).untyped_storage()._cdata)
    assert torch._C._storage_Use_Count(storage._cdata) <= held_by_us_alone + 1


# -- where versions do not tell ----------------------------------------------------------------------------------------
def itself(param):
    return param


def alias_of(param):
    return param.data


def detached(param):
    return param.detach()


def view_of_alias(param):
    return param.data.view(-1)


def rows_of_alias(param):
    return param.data[2:]


def broadcast_from_rank_0(tensor):
    dist.broadcast(tensor, 0)


@pytest.mark.cover(2)
@pytest.mark.usefixtures("group_of_one")
@pytest.mark.on_cpu
@pytest.mark.parametrize("handed", [itself, alias_of, detached, view_of_alias, rows_of_alias])
@pytest.mark.parametrize("call", [broadcast_from_rank_0, dist.all_reduce])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_what_a_collective_is_handed_counts_as_written(level, call, handed):
    """Collectives move no version. Numpy stands for what another rank would have sent."""
    run = Run(level)
    for index in range(6):
        if index == 3:  # other memory than when the first collective looked
            run.model.codebook.weight.data = run.model.codebook.weight.data.clone()
        run.step()
        master = next(amp.master_params(run.optimizer))
        row = 2 + index % 2
        run.model.codebook.weight.detach().view(torch.int16).numpy()[row] = 0
        with torch.no_grad():
            call(handed(run.model.codebook.weight))
        run.step()
        assert (master[row] == 0).all()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.on_cpu
@pytest.mark.parametrize("handed", [itself, alias_of, detached])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_master_that_a_collective_is_handed_counts_as_written(level, handed):
    run = Run(level)
    run.step()
    master = next(amp.master_params(run.optimizer))
    for _ in range(2):
        master.detach().numpy()[2] = 0.5
        with torch.no_grad():
            dist.broadcast(handed(master), 0)
        run.model(torch.ones(()))
        assert (run.model.codebook.weight[2] == 0.5).all()
        master.data = master.data.clone()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.on_cpu
def test_a_collective_on_other_tensors_writes_no_weight():
    run = Run("O2")
    run.step()
    before = counted(lambda: run.model(torch.ones(())))
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(run.model.head.weight.detach().clone())
    assert counted(lambda: run.model(torch.ones(()))) == before


@pytest.mark.on_cpu
def test_data_inside_a_transform_or_a_trace():
    """There torch refuses, or records, how a version is shared: what ``data`` gives out counts as written."""
    run = Run("O2")
    weight = run.model.head.weight
    want = weight.detach().sum().float()
    assert torch.equal(torch.func.grad(lambda x: x * weight.data.sum().float())(torch.ones(())), want)

    def write(x):
        weight.data.fill_(0.25)
        return x

    torch.func.vmap(write)(torch.ones(2))
    assert (run.weights()["head.weight"] == 0.25).all()
    traced = torch.jit.trace(lambda x: x * weight.data.sum().float(), torch.ones(2))
    assert torch.equal(traced(torch.ones(2)), torch.full((2,), 2.0))
