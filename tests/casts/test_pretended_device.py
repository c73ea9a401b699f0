"""Everything ampcompat does, on a second device: one made of Python, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pretended_checks
import pytest
from torch.utils import backend_registration

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no backends made of Python",
)


@pytest.fixture(scope="module")
def outcomes():
    program = Path(pretended_checks.__file__)
    root = program.parents[2]
    path = os.pathsep.join([str(root), str(root / "tests" / "parity")])
    command = [sys.executable, "-W", "ignore", program]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", pretended_checks.CHECKS)
def test_on_a_pretended_device(name, outcomes):
    assert outcomes[name] == "passed"
