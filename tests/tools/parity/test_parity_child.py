import io
import json
import threading

import numpy
import pytest
import torch
from parity_runs import step

from ampcompat import amp
from ampcompat.tools.parity import child
from ampcompat.tools.parity.recorder import Recorder


def kinds(file):
    return [json.loads(line)["kind"] for line in file.getvalue().splitlines()]


def test_the_last_step_ends_the_script_and_a_script_that_will_not_leave_adds_nothing():
    file = io.StringIO()
    writer = child._Writer(file, 2)
    writer(step(1, 1.0))
    for number in (2, 3, 4):
        with pytest.raises(SystemExit) as left:
            writer(step(number, 1.0))
        assert left.value.code == 0
    assert kinds(file) == ["step", "step"]


def test_no_other_thread_is_made_to_exit():
    file, raised = io.StringIO(), []

    def train():
        try:
            child._Writer(file, 1)(step(1, 1.0))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert raised == []
    assert kinds(file) == ["step"]


def test_a_forked_copy_says_so_once_and_records_nothing(monkeypatch):
    file = io.StringIO()
    writer = child._Writer(file, 2)
    monkeypatch.setattr(child.os, "getpid", lambda: writer.process + 1)
    for number in (1, 2, 3):
        writer(step(number, 1.0))
    assert kinds(file) == ["forked"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, None),
        (SystemExit(), None),
        (SystemExit(0), None),
        (child.EnoughSteps(0), None),
        (SystemExit(3), "it exited with 3"),
        (SystemExit("no data"), "it exited with 'no data'"),
        (KeyError("x"), "KeyError: 'x'"),
        (RuntimeError("first\nsecond"), "RuntimeError: first"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_how_a_script_ended(error, said):
    assert child._ending(error) == {"error": said}


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
        child._seed(seed)
        numbers.append((numpy.random.rand(), torch.rand(1).item()))
    assert numbers[0] == numbers[1] != numbers[2]
