"""``python -m tests.bench.explain``: what ``amp.explain_overflows`` costs a step in which nothing overflows."""

from __future__ import annotations

import time

import torch

from ampcompat import amp
from ampcompat._state import state

#: Width and depth of a net of linear layers, its batch, and the steps that are timed.
NETS = ((64, 4, 32, 200), (512, 8, 64, 20))
RUNS = 3


def step_times(level: str, width: int, depth: int, batch: int, steps: int, explain: bool) -> list[float]:
    """The seconds of each step."""
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if explain:
        amp.explain_overflows()
    x = torch.randn(batch, width)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        with amp.scale_loss(model(x).float().pow(2).mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    state.reset()
    return times


def main() -> None:
    """Print milliseconds a step, the fastest tenth, without explain and with it."""
    torch.set_num_threads(1)
    for level in ("O0", "O1", "O2"):
        for width, depth, batch, steps in NETS:
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(RUNS):
                for explain, seen in times.items():
                    seen += step_times(level, width, depth, batch, steps, explain)
            plain, explained = (1e3 * sorted(seen)[len(seen) // 10] for seen in times.values())
            print(f"{level}, {depth} layers of {width}: {plain:.2f} ms, under explain {explained:.2f} ms")


if __name__ == "__main__":
    main()
