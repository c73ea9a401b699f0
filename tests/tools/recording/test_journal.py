"""The journal that a recorded script writes: one line a step, and how the script ended."""

import contextlib
import dataclasses
import json
import math
import os
import random
import threading

import numpy
import pytest
import torch

from ampcompat.tools.generators import seed_all
from ampcompat.tools.recording.journal import Journal, error_line, read_step
from ampcompat.tools.recording.process import command
from ampcompat.tools.recording.steps import Scale, Step

STEP = Step(1, 1, False, [Scale(0, 2.0, 1)], [1.5])


@pytest.fixture
def journal(tmp_path):
    made = Journal(str(tmp_path / "journal.jsonl"), steps=2)
    yield made
    made.file.close()


def lines(journal):
    with open(journal.file.name, encoding="utf-8") as file:
        return [(line["kind"], line["content"]) for line in map(json.loads, file)]


def kinds(journal):
    return [kind for kind, _ in lines(journal)]


def test_the_last_step_ends_the_script(journal):
    """A script that will not leave adds nothing to the journal."""
    journal.step(STEP)
    for _ in range(3):
        with pytest.raises(SystemExit) as left:
            journal.step(STEP)
        assert left.value.code == 0
    assert kinds(journal) == ["step", "step"]


def test_no_other_thread_is_made_to_exit(tmp_path):
    journal = Journal(str(tmp_path / "journal.jsonl"), steps=1)
    raised = []

    def train():
        try:
            journal.step(STEP)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    journal.file.close()
    assert raised == []
    assert kinds(journal) == ["step"]


def test_a_forked_copy_writes_nothing(journal, monkeypatch):
    """It is not made to exit either: its steps are not the script's."""
    process = os.getpid()
    monkeypatch.setattr("os.getpid", lambda: process + 1)
    for _ in range(3):
        journal.step(STEP)
    with journal.ending(dict):
        pass
    assert kinds(journal) == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, None),
        (SystemExit(), None),
        (SystemExit(0), None),
        (SystemExit(3), "it exited with 3"),
        (SystemExit("no data"), "it exited with 'no data'"),
        (KeyError("x"), "KeyError: 'x'"),
        (RuntimeError("first\nsecond"), "RuntimeError: first"),
        (RuntimeError(), "RuntimeError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_how_a_script_ended(error, said, journal):
    assert error_line(error) == said
    leaves = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with leaves, journal.ending(lambda: {"blocks": 4}):
        if error is not None:
            raise error
    assert lines(journal) == [("end", {"error": said, "blocks": 4})]


def test_all_generators_are_seeded():
    numbers = []
    for _ in range(2):
        seed_all()
        numbers.append((random.random(), numpy.random.rand(), torch.rand(1).item()))
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("target", [["train.py", "--steps", "3"], ["-m", "train"], ["-c", "pass", "--", "x"]])
def test_the_script_ends_the_command_line(target, tmp_path):
    assert command(tmp_path / "j", 3, (1, 2), target)[3:] == [str(tmp_path / "j"), "3", "1,2", *target]


@pytest.mark.parametrize("losses", [[1.5, 2.0], [], [math.inf], [-math.inf]])
def test_a_step_survives_its_line(journal, losses):
    step = dataclasses.replace(STEP, losses=losses, skipped=True)
    journal.step(step)
    ((kind, content),) = lines(journal)
    assert kind == "step"
    assert read_step(content) == step
