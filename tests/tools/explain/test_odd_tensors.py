"""Tensors that explain cannot look at are left alone: the script runs on, and what else is lost is found."""

import json
import os

import pytest
import torch
from packaging.version import Version
from python_process import PATH_WITH_TESTS, run_python

from ampcompat._torch import TORCH

SCRIPT = """
import sys
import torch
from apex import amp

class Graph(torch.nn.Linear):
    def forward(self, x, neighbours=None):
        y = super().forward(x)
        return y if neighbours is None else torch.sparse.mm(neighbours, y)

model = Graph(8, 8)
more = ()
level = sys.argv[2]
if sys.argv[1] == "sparse":
    more = (torch.eye(4).to_sparse(),)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
for step in range(20):
    loss = model(torch.randn(4, 8), *more).float().pow(2).mean()
    if step % 5 == 3:
        loss = loss / torch.zeros(())
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("sparse", "O0"),
        pytest.param(
            "sharded",
            "O2",
            marks=pytest.mark.skipif(
                Version("2.7") > TORCH or not torch.distributed.is_available(),
                reason="amp takes no sharded models here",
            ),
        ),
    ],
)
def test_the_loss_is_explained(tmp_path, kind, level):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": PATH_WITH_TESTS, "GLOO_SOCKET_IFNAME": "lo"}
    done = run_python(["-m", "ampcompat", "run", "--explain=json", script, kind, level], env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"explain"')]
    assert [(one["op"], one["line"]) for one in lines if one["explain"] == "fault"] == [("div", 26)]
    assert lines[-1]["skipped"] == 4
