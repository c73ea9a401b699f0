"""A captured O2 step with an optimizer that takes ``found_inf`` replays."""

import pytest
import torch

from ampcompat import amp

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_captured_step_at_o2_replays_as_eager_steps():
    def started():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        x = torch.randn(32, 64, device="cuda")

        def step():
            optimizer.zero_grad(set_to_none=True)
            with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(8):  # masters are compared by value in their first steps: host syncs
                step()
        torch.cuda.current_stream().wait_stream(side)
        return step, optimizer

    step, optimizer = started()
    for _ in range(3):
        step()
    want = [p.detach().clone() for p in amp.master_params(optimizer)]
    step, optimizer = started()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    for master, value in zip(amp.master_params(optimizer), want, strict=True):
        torch.testing.assert_close(master, value, rtol=1e-5, atol=1e-6)  # kernels may be chosen anew in a capture
