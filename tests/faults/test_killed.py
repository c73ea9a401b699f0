"""A run that is killed while it trains and saves goes on, bitwise, from the last complete checkpoint."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "examples" / "digits.py"
STEPS = 40


def start(folder, *more):
    command = [sys.executable, "-m", "ampcompat", "run", SCRIPT, "--device", "cpu", "--opt-level", "O2"]
    command += ["--epochs", "4", "--stop-after", STEPS, "--batch-size", "8", "--accumulation", "1"]
    command += [
        "--checkpoint",
        folder / "last.pt",
        "--checkpoint-every",
        "1",
        "--result",
        folder / "result.json",
        *more,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(folder / "output.txt", "a") as output:
        return subprocess.Popen(list(map(str, command)), stdout=output, stderr=output, env=environment, cwd=folder)


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for key in value for t in tensors(value[key])]
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


@pytest.mark.slow
def test_killed_again_and_again(tmp_path):
    smooth, killed = tmp_path / "smooth", tmp_path / "killed"
    smooth.mkdir()
    killed.mkdir()
    assert start(smooth).wait(300) == 0
    moments, kills, last = random.Random(7), 0, killed / "last.pt"
    process = start(killed)
    while True:
        seen = last.stat().st_mtime_ns if last.exists() else 0
        while process.poll() is None and (not last.exists() or last.stat().st_mtime_ns == seen):
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.1))  # somewhere in a step, a save, or beyond the next ones
        if process.poll() is None and kills < 4:
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            kills += 1
            torch.load(last, weights_only=True)  # complete, whatever the moment was
        elif process.wait(300) == 0:
            break
        else:
            pytest.fail((killed / "output.txt").read_text()[-2000:])
        process = start(killed, "--resume", last)
    assert kills >= 3
    one, other = (torch.load(folder / "last.pt", weights_only=True) for folder in (smooth, killed))
    assert one["step"] == other["step"] == STEPS
    assert one["amp"] == other["amp"]
    assert len(tensors(one)) == len(tensors(other)) > 10
    assert all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))
    results = [json.loads((folder / "result.json").read_text()) for folder in (smooth, killed)]
    assert results[0]["accuracy"] == results[1]["accuracy"]
