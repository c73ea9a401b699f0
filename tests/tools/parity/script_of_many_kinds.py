"""A training script that behaves or misbehaves as its first argument says."""

import multiprocessing
import os
import random
import subprocess
import sys
import time

import numpy
import torch
from apex import amp

torch.set_num_threads(1)
kind = sys.argv[1]


def train(steps=3):
    if kind == "seeds from the clock":
        torch.manual_seed(time.time_ns())
    if kind == "needs torchrun":
        torch.distributed.init_process_group("gloo")
        print("local rank", int(os.environ["LOCAL_RANK"]))
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "never initializes":
        return
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0)
    print("numbers", random.random(), numpy.random.rand(), torch.rand(1).item(), hash("a"), sys.argv[2:], flush=True)
    for step in range(steps):
        if kind == "crashes" and step == 2:
            raise KeyError("batch 2")
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).float().square().mean()
        if kind == "never scales":
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        try:
            optimizer.step()
        except SystemExit:
            if kind != "will not leave":
                raise


if __name__ == "__main__":
    if kind == "runs for ever":
        children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])]
        print("child", children[0].pid, flush=True)
        train(1)
        time.sleep(600)
    elif kind == "forks":
        worker = multiprocessing.get_context("fork").Process(target=train)
        worker.start()
        worker.join()
    elif kind == "spawns":
        worker = multiprocessing.get_context("spawn").Process(target=train)
        worker.start()
        worker.join()
    elif kind == "is killed":
        train(2)
        os.kill(os.getpid(), 9)
    else:
        train()
