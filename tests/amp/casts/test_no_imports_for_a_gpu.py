"""A machine with CUDA costs no more imports and prints no more than one without: most users have one."""

import json

import pytest
from python_process import run_python

#: ``torch.cuda.is_available`` decides what torch's compiler imports; nothing touches a device. Each level has a fork.
PROGRAM = """
import json, os, sys
import torch
torch.cuda.is_available = lambda: True
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # torch imports a part of its compiler here
before = set(sys.modules)

from ampcompat import amp

for level in sys.argv[1:]:
    if os.fork() == 0:
        break
    os.wait()
else:
    sys.exit()

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if level == "init":
    handle = amp.init()
    optimizer = handle.wrap_optimizer(optimizer)
    scale_loss = optimizer.scale_loss
else:
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    handle = amp._amp_state.handle
    scale_loss = lambda loss: amp.scale_loss(loss, optimizer)
for factor in (1.0, float("inf")):
    with scale_loss(model(torch.ones(8, 4)).float().sum() * factor) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()
model.state_dict(), amp.state_dict()
handle._deactivate()
print(json.dumps({level: sorted(set(sys.modules) - before)}))
"""
LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5", "init"]


@pytest.fixture(scope="module")
def imported():
    """What each level imports, without a word on standard error."""
    done = run_python(["-c", PROGRAM, *LEVELS], fresh=True)
    assert (done.returncode, done.stderr) == (0, "")
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_of_the_compiler_is_imported_or_printed(level, imported):
    new = imported[level]
    assert not [name for name in new if name.split(".")[0] not in ("ampcompat", "packaging", "torch")]
    assert not [name for name in new if name.startswith(("torch._inductor", "torch._dynamo", "torch._functorch"))]
    assert len([name for name in new if name.startswith("torch")]) < 10
