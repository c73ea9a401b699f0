"""``torchrun --max-restarts``: a rank is lost, all start again from the checkpoint, later with another number."""

import os
from pathlib import Path

import pytest
import torch
from python_process import run_python
from test_ddp import free_port

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_lost_rank_and_other_numbers_of_ranks(tmp_path, level):
    """The restarted run is bitwise the one that lost nothing; one and three ranks go on from its checkpoint."""

    def launch(folder, ranks, steps, fail_at=""):
        command = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={free_port()}"]
        command += ["--max-restarts=1", str(HERE / "elastic.py"), level, str(folder), str(steps)]
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", "FAIL_AT": fail_at}
        run = run_python(command, env=environment, timeout=300)
        assert run.returncode == 0, run.stderr[-4000:]
        starts = {path.read_text() for path in folder.glob("finished.*")}
        for path in folder.glob("finished.*"):
            path.unlink()
        return starts, torch.load(folder / "checkpoint.pt", weights_only=True)

    folders = [tmp_path / "whole", tmp_path / "lost"]
    for folder in folders:
        folder.mkdir()
    starts, whole = launch(folders[0], 2, 6)
    assert starts == {"0"}
    starts, lost = launch(folders[1], 2, 6, fail_at="4")
    assert starts == {"4"}
    assert whole["amp"] == lost["amp"] == {"loss_scaler0": {"loss_scale": 2.0**15, "unskipped": 4}}
    for name, value in whole["model"].items():
        assert torch.equal(value, lost["model"][name])
    for steps, ranks in ((8, 1), (10, 3)):
        starts, after = launch(folders[1], ranks, steps)
        assert starts == {str(steps - 2)}
        assert after["amp"]["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": steps - 2}
