"""Which steps a CUDA graph can capture, as docs/performance.md says. Kernels are emulated, so replays are bitwise."""

import pytest
import torch
from emulated_cuda import device

from ampcompat import amp, optimizers

pytestmark = [pytest.mark.device, pytest.mark.skipif(torch.version.cuda != "emulated", reason="needs --emulate-cuda")]

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
SCALING = ("O1", "O2")  # their steps are skipped after an overflow
#: On any level.
ON_THE_DEVICE = {
    "fused SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    # eps: at O3 the default one is zero in float16.
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-4, fused=True, capturable=True),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=1e-3, capturable=True),
    "FusedSGD": lambda params: optimizers.FusedSGD(params, lr=0.1, momentum=0.9),
    "FusedAdagrad": lambda params: optimizers.FusedAdagrad(params, lr=0.1),
}
#: Where nothing is scaled: with a scale the host asks whether a gradient overflowed.
UNSCALED = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, capturable=True),
}
#: They count their steps on the host where nothing is scaled.
COUNTING_ON_THE_HOST = {
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=1e-3),
    "FusedLAMB": lambda params: optimizers.FusedLAMB(params, lr=1e-3),
    "FusedNovoGrad": lambda params: optimizers.FusedNovoGrad(params, lr=1e-3),
}


def started(level, make, warm_up):
    """An optimizer, and a step that was made ``warm_up`` times in a side stream."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).cuda()
    model, optimizer = amp.initialize(model, make(model.parameters()), opt_level=level, verbosity=0)
    x = torch.randn(16, 8).cuda()

    def step():
        optimizer.zero_grad(set_to_none=True)
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            step()
    torch.cuda.current_stream().wait_stream(side)
    return optimizer, step


def captured(step):
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    finally:
        device.end_capture()
    return graph


def replays_are_the_eager_steps(level, make, warm_up):
    optimizer, step = started(level, make, warm_up)
    for _ in range(3):
        step()
    want = [master.detach().clone() for master in amp.master_params(optimizer)]
    optimizer, step = started(level, make, warm_up)
    graph = captured(step)
    for _ in range(3):
        graph.replay()
    return all(map(torch.equal, amp.master_params(optimizer), want))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ON_THE_DEVICE)
def test_optimizers_that_skip_and_count_on_the_device(name, level):
    assert replays_are_the_eager_steps(level, ON_THE_DEVICE[name], warm_up=8)


@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
@pytest.mark.parametrize("name", UNSCALED)
def test_optimizers_of_torch_where_nothing_is_scaled(name, level):
    assert replays_are_the_eager_steps(level, UNSCALED[name], warm_up=8)


@pytest.mark.parametrize("level", SCALING)
@pytest.mark.parametrize("name", UNSCALED)
def test_with_a_scale_they_refuse(name, level):
    _, step = started(level, UNSCALED[name], warm_up=8)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        captured(step)


@pytest.mark.parametrize("level", SCALING)
@pytest.mark.parametrize("name", COUNTING_ON_THE_HOST)
def test_with_a_scale_the_fused_optimizers_count_on_the_device(name, level):
    assert replays_are_the_eager_steps(level, COUNTING_ON_THE_HOST[name], warm_up=8)


@pytest.mark.parametrize("level", ["O0", "O5"])
@pytest.mark.parametrize("name", COUNTING_ON_THE_HOST)
def test_a_step_count_on_the_host_is_refused_or_moves(name, level):
    try:
        is_right = replays_are_the_eager_steps(level, COUNTING_ON_THE_HOST[name], warm_up=8)
    except RuntimeError as error:
        is_right = "captur" in str(error)
    assert is_right


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_one_warm_up_step_is_enough(level):
    assert replays_are_the_eager_steps(level, ON_THE_DEVICE["fused AdamW"], warm_up=1)


WITH_A_RATE = {
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=torch.tensor(1e-3, device="cuda"), capturable=True),
    "FusedLAMB": lambda params: optimizers.FusedLAMB(params, lr=torch.tensor(1e-3, device="cuda")),
    "FusedNovoGrad": lambda params: optimizers.FusedNovoGrad(params, lr=torch.tensor(1e-3, device="cuda")),
}


@pytest.mark.parametrize("level", SCALING)
@pytest.mark.parametrize("name", WITH_A_RATE)
def test_replays_read_a_learning_rate_that_is_a_tensor(name, level):
    """Schedulers write such a rate in place. A number is part of the graph."""

    def weights(steps, replays):
        optimizer, step = started(level, WITH_A_RATE[name], warm_up=8)
        move = captured(step).replay if replays else step
        for _ in range(steps):
            optimizer.param_groups[0]["lr"].mul_(0.5)
            move()
        return [master.detach().clone() for master in amp.master_params(optimizer)]

    assert all(map(torch.equal, weights(3, replays=True), weights(3, replays=False)))
