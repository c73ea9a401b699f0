"""Frameworks that drove apex, as they install from the index, train unedited under ``ampcompat run`` on the CPU.

Opt-in: ``pip install -r .ci/integrations.txt``, then ``pytest -m integrations``. Two of them refuse fp16 on a CPU in
their own argument checks, before apex comes in; how the scripts pass is said where they do it. Nothing else is patched.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
LEVELS = ["O0", "O1", "O2", "O3"]
FRAMEWORKS = {
    "transformers": "transformers_trainer.py",
    "pytorch_lightning": "lightning_plugin.py",
    "ignite": "ignite_trainer.py",
    "mmengine": "mmengine_runner.py",
    "catalyst": "catalyst_runner.py",
}
# mmengine loads its checkpoints by torch.load's default of before torch 2.6.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}


@pytest.mark.integrations
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_trains_at_every_level(framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed; see .ci/integrations.txt")
    command = [sys.executable, "-m", "ampcompat", "run", str(SCRIPTS / FRAMEWORKS[framework]), *LEVELS]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"level"')]
    for level in LEVELS:
        losses = [row["loss"] for row in rows if row["level"] == level]
        assert len(losses) >= 16
        assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), level
