"""A captured step with an optimizer that takes ``found_inf`` replays; ``test_core_replay.py`` plays it on the CPU."""

import pytest
import torch

from ampcompat import amp, optimizers

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MAKERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True, capturable=True),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=1e-3, capturable=True),
}


def started(level, make):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).cuda()
    model, optimizer = amp.initialize(model, MAKERS[make](model.parameters()), opt_level=level, verbosity=0)
    x, factor = torch.randn(32, 64, device="cuda"), torch.ones((), device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        with amp.scale_loss(model(x).float().square().mean() * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(8):  # masters are compared by value in their first steps: host syncs
            step()
    torch.cuda.current_stream().wait_stream(side)
    return optimizer, step, factor


def captured(step):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def scale():
    return amp.state_dict()["loss_scaler0"]["loss_scale"]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_replays_are_the_eager_steps(level, make):
    optimizer, step, _ = started(level, make)
    for _ in range(3):
        step()
    want = [p.detach().clone() for p in amp.master_params(optimizer)]
    optimizer, step, _ = started(level, make)
    graph = captured(step)
    for _ in range(3):
        graph.replay()
    for master, value in zip(amp.master_params(optimizer), want, strict=True):
        torch.testing.assert_close(master, value, rtol=1e-5, atol=1e-6)  # kernels may be chosen anew in a capture


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflows_in_replays_move_the_scale_on_and_on(level, make):
    optimizer, step, factor = started(level, make)
    graph = captured(step)
    graph.replay()
    before, first = [p.detach().clone() for p in amp.master_params(optimizer)], scale()
    factor.fill_(float("inf"))
    for halvings in (1, 2, 3):
        graph.replay()
        assert scale() == first / 2**halvings
    assert all(torch.equal(a, b) for a, b in zip(amp.master_params(optimizer), before, strict=True))
    factor.fill_(1.0)
    graph.replay()
    assert scale() == first / 8
    assert all(p.isfinite().all() for p in amp.master_params(optimizer))
    assert not all(torch.equal(a, b) for a, b in zip(amp.master_params(optimizer), before, strict=True))
