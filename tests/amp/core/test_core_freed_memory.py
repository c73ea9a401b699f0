"""After ``initialize``, what a step frees stays with the process: the next one does not fault it in again."""

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from ampcompat import amp

def faults(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for more in range(20):  # each larger than all before: glibc maps it anew, unless it keeps blocks of that size
        torch.zeros(size + more * 2**14)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults(2**18)
model = torch.nn.Linear(4, 4)
amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O5", verbosity=0)
after = faults(2**20)
held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O5", verbosity=0)
print(before, after, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back by this rule")
def test_freed_memory_stays():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "LD_PRELOAD"))}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    before, after, grown = map(int, done.stdout.split())
    assert before > 4_000  # 20 times 1 MiB and more
    assert after < 16_000  # once 5 MiB and what lay in the way, instead of 20 times 4 to 5 MiB
    assert grown < 8192  # KiB: a call touches no page of the 32 MiB that it allocates
