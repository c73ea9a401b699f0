import contextlib
import json
import math
import threading

import numpy
import pytest
import torch

from ampcompat import amp
from ampcompat.tools.recording import child
from ampcompat.tools.recording.journal import (
    EnoughSteps,
    Journal,
    Settings,
    error_line,
    read_words,
    seed_all,
)
from ampcompat.tools.recording.process import command
from ampcompat.tools.recording.recorder import Recorder


@pytest.fixture
def journal(tmp_path):
    made = Journal(str(tmp_path / "journal.jsonl"), steps=2)
    yield made
    made.file.close()


def lines(journal):
    with open(journal.file.name, encoding="utf-8") as file:
        read = [json.loads(line) for line in file]
    return [(line.pop("kind"), line) for line in read]


def kinds(journal):
    return [kind for kind, _ in lines(journal)]


def test_the_last_step_ends_the_script(journal):
    """A script that will not leave adds nothing to the journal."""
    journal.step(optimizer=0)
    for _ in range(3):
        with pytest.raises(SystemExit) as left:
            journal.step(optimizer=0)
        assert left.value.code == 0
    assert kinds(journal) == ["step", "step"]


def test_no_other_thread_is_made_to_exit(tmp_path):
    journal = Journal(str(tmp_path / "journal.jsonl"), steps=1)
    raised = []

    def train():
        try:
            journal.step(optimizer=0)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    journal.file.close()
    assert raised == []
    assert kinds(journal) == ["step"]


def test_a_forked_copy_says_so_once(journal, monkeypatch):
    """It records nothing else, and is not made to exit: its steps are not those of the script."""
    monkeypatch.setattr("os.getpid", lambda: journal.process + 1)
    for _ in range(3):
        journal.step(optimizer=0)
        journal.loss(1.0, 1.0, torch.float32)
    with journal.ending():
        pass
    assert kinds(journal) == ["forked"]
    assert journal.made == 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, None),
        (SystemExit(), None),
        (SystemExit(0), None),
        (EnoughSteps(0), None),
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


def test_how_far_it_came():
    assert child._seen(Recorder(print)) == {"initialized": False, "enabled": False, "blocks": 0}
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, enabled=False)
    assert child._seen(Recorder(print)) == {"initialized": True, "enabled": False, "blocks": 0}
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert child._seen(Recorder(print)) == {"initialized": True, "enabled": True, "blocks": 0}


def test_seeds_beyond_what_numpy_takes():
    numbers = []
    for seed in (2**33 + 5, 2**33 + 5, 6):
        seed_all(seed)
        numbers.append((numpy.random.rand(), torch.rand(1).item()))
    assert numbers[0] == numbers[1] != numbers[2]


def test_modules_are_written_once(journal):
    """One line for each kind of module with weights, dtype of its result, and mode."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Embedding(3, 2))

    def returned(module, result):
        for each in (model, module):
            journal._before_forward(each, None)
        journal._after_forward(module, None, result)
        journal._after_forward(model, None, result)

    for module in model[:3]:
        returned(module, module(torch.ones(1, 2)))
    model.eval()
    returned(model[0], torch.ones(1, dtype=torch.bfloat16))
    returned(model[3], torch.ones(1, dtype=torch.int64))
    assert lines(journal) == [
        ("dtype", {"module": "Linear", "dtype": "torch.float32", "training": True}),
        ("dtype", {"module": "Linear", "dtype": "torch.bfloat16", "training": False}),
    ]


def test_a_whole_model_is_not_written(journal):
    """What it returns is float32 after a migration, whatever it computes in."""
    model = torch.nn.Linear(2, 2)
    journal._before_forward(model, None)
    journal._after_forward(model, None, model(torch.ones(1, 2)))
    assert lines(journal) == []


@pytest.mark.parametrize("target", [["train.py", "--steps", "3"], ["-m", "train"], ["-c", "pass", "--", "x"]])
def test_a_command_line_is_read_as_it_was_written(target, tmp_path):
    settings = Settings(str(tmp_path / "j"), 3, 7, [2, 3], details=True)
    assert read_words(command(settings, target)[3:]) == (settings, target)


@pytest.mark.parametrize("loss", [1.5, None, math.inf, -math.inf])
def test_a_step_survives_its_line(journal, loss):
    before = {"losses": [] if loss is None else [loss], "loss": loss, "seconds": None, "skipped": True}
    journal.step(**before)
    ((kind, content),) = lines(journal)
    assert kind == "step"
    del content["place"]
    assert content == before
