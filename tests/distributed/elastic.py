"""A script for ``torchrun --max-restarts``: ``elastic.py LEVEL FOLDER STEPS``; saves each step, fails once if asked.

With ``FAIL_AT`` in the environment, the last rank raises before that step, the first time that it comes there.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from checks import everything_is_equal, made, step

from ampcompat import amp

dist.init_process_group("gloo")
torch.set_num_threads(1)
level, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
saved, failed = folder / "checkpoint.pt", folder / "failed"
model, optimizer, run = made(level)
start = 0
if saved.exists():
    state = torch.load(saved, weights_only=True)
    run.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(state["amp"])
    start = state["step"]
for at in range(start, steps):
    if str(at) == os.environ.get("FAIL_AT") and dist.get_rank() == dist.get_world_size() - 1 and not failed.exists():
        failed.touch()
        raise KeyError("this rank is lost")
    step(run, optimizer, at, factor=float("inf") if at == 1 and dist.get_rank() == 0 else 1 / 64)
    everything_is_equal(model, optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        parts = {"model": run.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
        torch.save({**parts, "step": at + 1}, folder / "next.pt")
        (folder / "next.pt").rename(saved)
dist.barrier()
(folder / f"finished.{dist.get_rank()}").write_text(str(start))
os._exit(0)  # torch hangs or aborts now and then when it takes gloo down
