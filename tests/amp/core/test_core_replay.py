"""A captured step replays: what a CUDA graph does, played on the CPU.

The ops of one step are recorded with their tensors, and run again on the same tensors without any Python of ampcompat.
As in a capture, the host may read no number.
"""

import pytest
import torch
from amp_training import INF, assert_masters_agree, batch, masters, net, same
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ampcompat import _torch, amp, optimizers

pytestmark = [pytest.mark.device, pytest.mark.torch]

MAKERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=1e-2),
    "FusedSGD": lambda params: optimizers.FusedSGD(params, lr=0.1, momentum=0.9),
    "FusedLAMB": lambda params: optimizers.FusedLAMB(params, lr=1e-2),
    "FusedNovoGrad": lambda params: optimizers.FusedNovoGrad(params, lr=1e-2),
    "FusedAdagrad": lambda params: optimizers.FusedAdagrad(params, lr=1e-2),
}


def storages(tree):
    return {leaf.untyped_storage().data_ptr() for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)}


class Graph(TorchDispatchMode):
    """Records ops; ``replay`` writes their results where the recorded ones lie."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in func.name(), "a host sync in a capture"
        results = func(*args, **(kwargs or {}))
        self.ops.append((func, args, kwargs or {}, results))
        return results

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, recorded in self.ops:
            given = storages((args, kwargs))
            results = func(*args, **kwargs)
            for old, new in zip(tree_iter(recorded), tree_iter(results), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in given:
                    old.copy_(new)


@pytest.fixture
def captured(monkeypatch):
    """What ampcompat sees of the device while a graph is captured; the numbers of a device cannot be looked at."""

    def capture(step):
        graph = Graph()
        with monkeypatch.context() as patch:
            for module in (_torch, _torch.host):
                patch.setattr(module, "is_capturing", lambda: True)
                patch.setattr(module, "host_value", lambda number: None)
            with graph:
                step()
        return graph

    return capture


def started(level, blocks=1, make="AdamW", **options):
    model = net()
    optimizer = MAKERS[make](model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    x, y = batch()
    factor = torch.ones(())

    def step():
        for _ in range(blocks):
            with amp.scale_loss(F.cross_entropy(model(x), y) * factor, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(8):  # masters are compared by value in their first steps: host syncs
        step()
    return model, optimizer, step, factor


def scale():
    return amp.state_dict()["loss_scaler0"]["loss_scale"]


CASES = [*((make, 1) for make in MAKERS), ("AdamW", 2)]


@pytest.mark.parametrize(("make", "blocks"), CASES)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.on_cpu
def test_replays_are_the_eager_steps(level, make, blocks, captured):
    _, optimizer, step, _ = started(level, blocks, make)
    for _ in range(5):
        step()
    want, want_scale = masters(optimizer), scale()
    model, optimizer, step, _ = started(level, blocks, make)
    graph = captured(step)  # here the recorded step is made as well
    for _ in range(4):
        graph.replay()
    assert same(masters(optimizer), want)
    assert scale() == want_scale
    if level == "O2":
        assert_masters_agree(model)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflows_in_replays_move_the_scale_on_and_on(level, make, captured):
    model, optimizer, step, factor = started(level, make=make)
    graph = captured(step)
    before, first = masters(optimizer), scale()
    factor.fill_(INF)
    for halvings in (1, 2, 3):
        graph.replay()
        assert scale() == first / 2**halvings
    assert same(masters(optimizer), before)
    factor.fill_(1.0)
    graph.replay()
    assert scale() == first / 8
    assert not same(masters(optimizer), before)
    assert all(p.isfinite().all() for p in amp.master_params(optimizer))
    if level == "O2":
        assert_masters_agree(model)


def test_a_scale_at_its_floor_stays_there_in_replays(captured):
    _, _, step, factor = started("O2", min_loss_scale=2.0**14)
    graph = captured(step)
    factor.fill_(INF)
    for _ in range(5):
        graph.replay()
    assert scale() == 2.0**14


def test_the_scale_grows_in_replays(captured):
    _, _, step, _ = started("O2")
    amp._amp_state.loss_scalers[0]._scale_seq_len = 4
    amp._amp_state.loss_scalers[0]._unskipped = 0
    first = scale()
    graph = captured(step)
    for _ in range(7):
        graph.replay()
    assert scale() == 4 * first


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_eager_steps_go_on_after_replays(level, captured):
    model, optimizer, step, factor = started(level)
    graph = captured(step)
    factor.fill_(INF)
    graph.replay()
    factor.fill_(1.0)
    now = scale()
    for _ in range(2):
        step()
    assert scale() == now
    graph.replay()
    if level == "O2":
        assert_masters_agree(model)
