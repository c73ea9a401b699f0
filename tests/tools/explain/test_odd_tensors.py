"""Tensors that explain cannot look at are left alone: the script runs on, and what else is lost is found."""

import json

import pytest
import torch
from amp_training import initialized, make_step
from explain_kit import explain, told
from packaging.version import Version
from python_process import run_python
from torch import nn

from ampcompat._torch import TORCH

SHARDED = """
import torch
from apex import amp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(8, 8)
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
for step in range(20):
    loss = model(torch.randn(4, 8)).float().pow(2).mean()
    if step % 5 == 3:
        loss = loss / torch.zeros(())
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""


def test_sparse_tensors(capsys):
    class Graph(nn.Linear):
        def forward(self, x, neighbours):
            return torch.sparse.mm(neighbours, super().forward(x))

    model, optimizer = initialized(Graph(8, 8), "O0", lr=1e-3, loss_scale="dynamic")
    explain()
    for step in range(10):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8), torch.eye(4).to_sparse()).pow(2).mean()
        make_step(optimizer, loss / torch.zeros(()) if step % 5 == 3 else loss)
    seen = told(capsys)
    assert [fault["op"] for fault in seen.faults] == ["div"]
    assert seen.counts["skipped"] == 2


@pytest.mark.skipif(
    Version("2.7") > TORCH or not torch.distributed.is_available(), reason="amp takes no sharded models here"
)
def test_sharded_tensors(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SHARDED)
    variables = {"GLOO_SOCKET_IFNAME": "lo"}
    done = run_python(["-m", "ampcompat", "run", "--explain=json", script], variables=variables, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"explain"')]
    assert [(one["op"], one["line"]) for one in lines if one["explain"] == "fault"] == [("div", 15)]
    assert lines[-1]["skipped"] == 4
