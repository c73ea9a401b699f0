"""Receipts of several processes: what each leaves, and what is added up."""

import dataclasses
import os
import pickle
import re
import sys

import pytest
import torch
from amp_training import initialized, make_step, reset
from receipts import train
from torch import nn

from ampcompat.tools.report import Receipt, processes, schema
from ampcompat.tools.report import receipt as receipt_module


def test_a_forked_copy_begins_anew(tmp_path, monkeypatch):
    acts = []
    monkeypatch.setattr(processes, "at_exit", acts.append)
    seen = Receipt(1, str(tmp_path))
    seen.start()
    model, optimizer = initialized(nn.Linear(8, 8), "O1")
    for _ in range(2):
        make_step(optimizer, model(torch.ones(8, 8)).mean())
    before = seen.facts()
    monkeypatch.setattr(receipt_module.os, "getpid", lambda: 4711)
    monkeypatch.setenv("RANK", "1")
    make_step(optimizer, model(torch.ones(8, 8)).mean())
    assert seen.facts()["steps"] == 1
    (written,) = processes.left(str(tmp_path))
    assert (written.process.pid, written.process.rank) == (4711, 1)
    assert (written.process.ended, written.traced_steps) == (False, 1)

    def exit_of_a_worker():
        try:
            raise ValueError("mine")
        except ValueError:
            sys.exit(1)
        finally:
            acts[0]()

    with pytest.raises(SystemExit):
        exit_of_a_worker()
    (written,) = processes.left(str(tmp_path))
    assert written.process.ended
    assert written.process.error == "ValueError: mine"
    assert written.tally.flops["forward", "float16"] == before["flops"]["forward"]["float16"]


def left_behind(tmp_path, pid, process=None, **changes):
    """The record of another process of two steps."""
    _, receipt = train("O1", steps=2, traced=2)
    record = receipt._own()
    receipt.stop()
    of_process = schema.Process(pid=pid, rank=pid, world=2, ended=True)
    record = dataclasses.replace(record, process=dataclasses.replace(of_process, **(process or {})), **changes)
    (tmp_path / f"{pid}.pickle").write_bytes(pickle.dumps(record))
    reset()
    return processes.left(str(tmp_path))


def test_processes_are_added_up(tmp_path):
    left_behind(tmp_path, 0)
    one = Receipt(2, str(tmp_path)).facts()
    left_behind(tmp_path, 1)
    receipt = Receipt(2, str(tmp_path))
    facts = receipt.facts()
    assert facts["steps"] == 4
    assert facts["traced_steps"] == 4
    assert facts["flops"]["forward"] == {"float16": 2 * one["flops"]["forward"]["float16"]}
    assert facts["modules"][0]["flops"] == {"float16": 2 * one["modules"][0]["flops"]["float16"]}
    assert [c["count"] for c in facts["casts"]] == [2 * c["count"] for c in one["casts"]]
    assert facts["setting"]["opt_level"] == "O1"
    assert facts["sentences"][0] == "Half precision is on: 100.0 % of the FLOPs ran in float16."
    assert facts["sentences"][-1] == "2 processes trained (ranks 0, 1); their counts are added up."
    assert "ops in 4 traced steps of 2 processes" in str(receipt)
    assert re.search(r"^  1 +1 +100.0 % +2 +2 +0$", str(receipt), re.MULTILINE)


def test_processes_that_are_missing_are_named(tmp_path):
    left_behind(tmp_path, 0)
    left_behind(tmp_path, 1, traced_steps=0, whole_steps=False, process={"ended": False})
    left_behind(tmp_path, 2, process={"ended": False})
    left_behind(tmp_path, 3, process={"error": "ValueError: no"})
    receipt = Receipt(2, str(tmp_path))
    assert "FLOPs in all" in str(receipt)  # counts of unequal numbers of steps are not divided by them
    said = receipt.facts()["sentences"]
    assert said[-4:] == [
        "4 processes trained (ranks 0, 1, 2, 3); their counts are added up.",
        "Process 1 (rank 1) is missing: it called amp.initialize, and was killed, or still runs, before it counted.",
        "Process 2 (rank 2) was killed, or still runs: its first 2 steps are counted, no more.",
        "Process 3 (rank 3) crashed: ValueError: no",
    ]


def test_ranks_of_a_launcher_are_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    _, receipt = train("O1")
    assert receipt.facts()["sentences"][-1] == (
        "3 of 4 ranks are not in this receipt: it counts one process, of rank 0. `ampcompat run --receipt` adds up the"
        " ranks of a machine."
    )


def launched(monkeypatch, tmp_path, **changes):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    torchrun = {"MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**torchrun, **changes}.items():
        monkeypatch.setenv(name, value)


def test_ranks_of_one_launch_share_a_private_folder(monkeypatch, tmp_path):
    launched(monkeypatch, tmp_path)
    folder = processes.folder_of_ranks()
    assert folder == processes.folder_of_ranks()
    assert os.stat(folder).st_mode & 0o77 == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert processes.folder_of_ranks() != folder


@pytest.mark.parametrize(
    ("name", "value"), [("GROUP_RANK", "1"), ("LOCAL_WORLD_SIZE", "1"), ("MASTER_PORT", "../x"), ("GROUP_RANK", "")]
)
def test_others_share_none(monkeypatch, tmp_path, name, value):
    launched(monkeypatch, tmp_path, **{name: value})
    assert processes.folder_of_ranks() is None
    assert not list(tmp_path.iterdir())


def test_a_symbolic_link_is_not_used_as_folder(monkeypatch, tmp_path):
    """Another user could have put it in the folder's place."""
    launched(monkeypatch, tmp_path)
    folder = processes.folder_of_ranks()
    os.rename(folder, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder)
    assert processes.folder_of_ranks() is None


def test_rank_0_waits_for_the_others_and_not_for_ever(monkeypatch, tmp_path):
    launched(monkeypatch, tmp_path, LOCAL_WORLD_SIZE="3")
    left_behind(tmp_path, 1)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        left_behind(tmp_path, 2, process={"ended": len(waits) == 3})

    monkeypatch.setattr(processes.time, "sleep", sleep)
    processes.wait_for_ranks(str(tmp_path))
    assert len(waits) == 3
    (tmp_path / "2.pickle").unlink()
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(processes, "PATIENCE", 0.01)
    processes.wait_for_ranks(str(tmp_path))
