"""What docs/performance.md says of page faults: after one freed block of 32 MiB glibc keeps what a step frees."""

import os
import platform

import pytest
from python_process import run_python

TRAIN = """
import torch
from counting import page_faults

from ampcompat import amp

torch.set_num_threads(1)
{first}
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
x = torch.randn(16, 512)

def step():
    with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()

for _ in range(20):
    step()
print(page_faults(step))
"""


@pytest.fixture(autouse=True)
def allocator_as_users_have_it(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)


def faults(first):
    """Page faults of a step in a process that begins with ``first``."""
    done = run_python(["-c", TRAIN.format(first=first)], fresh=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_a_freed_block_keeps_a_step_from_faulting():
    weight = 512 * 512 * 4 // 4096  # pages of one weight in float32
    # Without it nearly every process faults; where its memory lies decides.
    assert any(faults("") > weight for _ in range(5))
    assert faults("torch.empty(2**25 - 2**13, dtype=torch.uint8)") < weight // 8
