"""Everything ampcompat does, on a second device: one made of Python, in a process of its own."""

import json
import os
from pathlib import Path

import pretended_checks
import pytest
from python_process import PATH_WITH_TESTS, run_python
from torch.utils import backend_registration

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no backends made of Python",
)


@pytest.fixture(scope="module")
def outcomes(request):
    """What became of the checks that are to run, by name: one process serves them all."""
    program = Path(pretended_checks.__file__)
    root = program.parents[3]
    path = os.pathsep.join([PATH_WITH_TESTS, str(root / "tests" / "parity")])
    names = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    done = run_python([program, *names], cwd=root, env={**os.environ, "PYTHONPATH": path}, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * slow) for name, slow in pretended_checks.SLOW.items()]
)
def test_on_a_pretended_device(name, outcomes):
    assert outcomes[name] == "passed"
