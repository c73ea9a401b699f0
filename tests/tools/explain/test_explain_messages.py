"""How explain is asked, the lines of JSON that it writes, and its end."""

import json

import pytest
import torch
from amp_training import initialized, make_step
from lossy_steps import adam, train
from torch import nn

from ampcompat import amp
from ampcompat.amp.observers import observers
from ampcompat.tools.explain import explain_as, explain_as_asked
from ampcompat.tools.explain.observer import OverflowExplainer


def started():
    """How many faults are explained, whether the script then ends, and whether in JSON; None for no explaining."""
    found = [one for one in observers() if isinstance(one, OverflowExplainer)]
    return (found[0].telling.limit, found[0].telling.stop, found[0].telling.json) if found else None


WORDS = {"1": (1, False, False), "5": (5, False, False), "first": (1, True, False), "json": (3, False, True)}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("from_environment", [False, True])
def test_words(monkeypatch, word, from_environment):
    if from_environment:
        monkeypatch.setenv("AMPCOMPAT_EXPLAIN", word)
        explain_as_asked()
    else:
        explain_as(word)
    assert started() == WORDS[word]


@pytest.mark.parametrize("word", ["ranges", "json,first", "-1", "yes", ""])
def test_other_words_are_answered_by_those_that_there_are(monkeypatch, word):
    with pytest.raises(ValueError, match=r"explain=.* - it takes a number of faults, first or json - "):
        explain_as(word)
    if word:
        monkeypatch.setenv("AMPCOMPAT_EXPLAIN", word)
        with pytest.raises(ValueError, match="^AMPCOMPAT_EXPLAIN: explain="):
            explain_as_asked()
    assert started() is None


@pytest.mark.parametrize("text", ["0", "", " "])
def test_the_environment_can_say_no(monkeypatch, text):
    monkeypatch.setenv("AMPCOMPAT_EXPLAIN", text)
    explain_as_asked()
    assert started() is None


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_every_message_is_a_line_of_json(capsys):
    amp.explain_overflows(json=True)
    train(adam(weight_decay=1e-9))
    told_numbers, weights = lines(capsys.readouterr().err)
    assert (told_numbers["explain"], told_numbers["number"]) == ("fault", 1e-9)
    assert told_numbers["cause"] == "weight_decay=1e-09 is 0 in float16"
    assert weights["explain"] == "fault"
    assert weights["cause"] == "step 1 of Adam, which left embeddings.weight not finite"
    assert (weights["optimizer"], weights["parameter"], weights["step"]) == ("Adam", "embeddings.weight", 1)
    assert (weights["not_finite"], weights["elements"]) == (32, 40)
    assert weights["hints"][0] == "pass eps=1e-4 to Adam"


def test_a_fault_as_json_has_strings_for_what_json_has_not(capsys):
    amp.explain_overflows(json=True)
    x = torch.tensor([[float("inf"), 1.0]])
    train(lambda p: torch.optim.SGD(p, lr=0.1), "O1", 1, lambda: nn.Linear(2, 2), x)
    (found,) = lines(capsys.readouterr().err)
    assert (found["explain"], found["op"], found["number"], found["step"]) == ("fault", "input", "inf", 1)
    assert (found["file"], found["line"]) == (None, None)


def test_a_skipped_step_has_its_own_number(capsys):
    amp.explain_overflows(json=True)
    x = torch.ones(1, 2)
    train(lambda p: torch.optim.SGD(p, lr=1e-12), "O2", 17, lambda: nn.Linear(2, 2), x, lambda y: y.float().sum() * 1e7)
    (found,) = lines(capsys.readouterr().err)
    assert (found["step"], found["message"].partition(" was")[0]) == (4, "Step 4")  # the first that was watched


def test_other_ranks_tell_the_faults_of_their_own_batches(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    amp.explain_overflows(limit=1)
    x = torch.tensor([[1e9, 1.0]])
    train(lambda p: torch.optim.SGD(p, lr=0.1), "O1", 1, lambda: nn.Linear(2, 2), x)
    told = capsys.readouterr().err
    assert told.startswith("ampcompat explain (rank 1): The loss of step 1 is -inf.")
    assert told.count("ampcompat explain") == 1  # that it was the last explanation is for rank 0 to say
    amp.explain_overflows(limit=1, json=True)
    train(lambda p: torch.optim.SGD(p, lr=0.1), "O1", 1, lambda: nn.Linear(2, 2), x)
    assert [(one["explain"], one["rank"]) for one in lines(capsys.readouterr().err)] == [("fault", 1)]


def test_the_script_ends_after_as_many_faults_as_asked(capsys):
    model = nn.Linear(4, 4)
    model, optimizer = initialized(model, "O1")
    amp.explain_overflows(limit=2, stop=True)

    def step(bad):
        make_step(optimizer, model(torch.full((2, 4), bad)).float().mean())
        optimizer.zero_grad()

    for bad in (1.0, float("nan"), 1.0):
        step(bad)
    with pytest.raises(SystemExit) as ended:
        step(1e6)
    assert ended.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "ampcompat explain: the script ends here, after 2 explanations, as asked."
    )
    optimizer.zero_grad()  # a script may catch it
    step(1.0)
    assert not amp.step_was_skipped(optimizer)
