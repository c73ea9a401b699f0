import contextlib
import json
import math
import sys
import threading

import numpy
import pytest
import torch

from ampcompat import amp
from ampcompat.tools.recording import child
from ampcompat.tools.recording.events import Step, read_line, read_step
from ampcompat.tools.recording.journal import (
    EnoughSteps,
    Journal,
    Missing,
    error_line,
    read_arguments,
    seed_all,
    to_line,
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
        return [read_line(line) for line in file]


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


def test_missing_packages_cannot_be_imported(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [Missing(("wave", "amp_C")), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    with pytest.raises(ModuleNotFoundError, match="No module named 'wave'") as error:
        __import__("wave")
    assert error.value.name == "wave"
    assert __import__("colorsys")


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
    words = command(tmp_path / "j", 3, 7, target, skips=(2, 3), details=True)
    args, read = read_arguments(words[words.index("--journal") :])
    assert read == target
    assert (args.journal, args.steps, args.seed) == (str(tmp_path / "j"), 3, 7)
    assert (args.skips, args.details, args.no_apex) == ([2, 3], True, False)


# -- lines -------------------------------------------------------------------------------------------------------------
def step(loss, **changes):
    values = {"step": 3, "optimizer": 0, "losses": [] if loss is None else [loss], "loss": loss, "scale": 1.0}
    values |= {"grad_norm": 1.0, "skipped": False, "seconds": 0.5, "memory": 2**20}
    return Step(**{**values, **changes})


def through_a_line(one):
    kind, content = read_line(to_line("step", {**vars(one), "place": "train.py:3"}))
    assert kind == "step"
    return read_step(content)


@pytest.mark.parametrize("loss", [1.5, None, math.inf, -math.inf])
def test_a_step_survives_its_line(loss):
    before = step(loss, scale=math.inf, seconds=None, memory=None, skipped=True)
    assert through_a_line(before) == before


def test_nan_survives_too():
    after = through_a_line(step(math.nan))
    assert math.isnan(after.loss)
    assert math.isnan(after.losses[0])


def test_lines_are_json_that_every_reader_takes():
    def refuse(name):
        raise ValueError(name)

    rest = {"d": 1, "e": None, "f": True, "g": "x", "h": 2.5}
    line = to_line("step", {"a": math.nan, "b": [math.inf, {"c": -math.inf}], **rest})
    read = json.loads(line, parse_constant=refuse)
    assert read == {"kind": "step", "a": "nan", "b": ["inf", {"c": "-inf"}], **rest}
    assert line.count("\n") == 1
