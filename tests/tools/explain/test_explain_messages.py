"""How explain is asked, its end, and its texts: this file alone compares them word for word."""

import re

import pytest
import torch
from amp_training import initialized, make_step
from explain_kit import explain, last_words, lines_of
from torch import nn

from ampcompat import amp
from ampcompat.amp.observers import observers
from ampcompat.tools.explain import explain_as, explain_as_asked, explain_overflows
from ampcompat.tools.explain.counts import Counts
from ampcompat.tools.explain.observer import OverflowExplainer


def started():
    """How many births are told, whether the script then ends, and whether in JSON; None for no explaining."""
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


def test_other_ranks_tell_the_births_of_their_own_batches(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    for as_json in (False, True):
        torch.manual_seed(0)
        explain_overflows(limit=1, json=as_json)
        model, optimizer = initialized(nn.Linear(2, 2), "O1")
        make_step(optimizer, model(torch.tensor([[1e9, 1.0]])).float().sum())
        told = capsys.readouterr().err
        if as_json:
            assert [(one["explain"], one["rank"]) for one in lines_of(told)] == [("fault", 1)]
        else:  # that it was the last explanation is for rank 0 to say
            assert re.findall(r"ampcompat explain.*", told) == [
                "ampcompat explain (rank 1): the loss of step 1 is -inf."
            ]


def test_the_script_ends_after_as_many_births_as_asked(capsys):
    model, optimizer = initialized(nn.Linear(4, 4), "O1")
    explain_overflows(limit=2, stop=True)

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


def test_the_limit_is_told(capsys):
    model, optimizer = initialized(nn.Linear(4, 4), "O1")
    explain(limit=1)
    make_step(optimizer, model(torch.full((2, 4), 1e6)).float().mean())
    assert [line["explain"] for line in lines_of(capsys.readouterr().err)] == ["fault", "note"]


# -- texts -------------------------------------------------------------------------------------------------------------
def lose_steps(loss_of, level="O2", model=None, steps=1, make=None, **options):
    """The texts of a short run."""
    torch.manual_seed(0)
    model = model or nn.Linear(2, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    optimizer = make(model.parameters()) if make else torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    explain_overflows()
    for _ in range(steps):
        optimizer.zero_grad()
        make_step(optimizer, loss_of(model))
    for message in last_words():
        message.emit(as_json=False)


class Logs(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        shares = torch.softmax(y * torch.tensor([0.0, 20.0], dtype=y.dtype), -1)
        return torch.log(shares)


HERE = r"\S*test_explain_messages\.py:\d+"
TEXTS = {
    "a forward": (
        lambda: lose_steps(lambda model: model(torch.ones(2, 2)).float().mean(), model=Logs(2, 2)),
        f"""ampcompat explain: the loss of step 1 is -inf.
  line      {HERE}: return torch.log(shares)
  op        log, in the forward
  module    Logs itself
  in        self float16 [2, 2]: 0 .. 1, 2 of 4 are 0
  out       result float16 [2, 2]: 0 .. 0, 2 of 4 are 0, 2 of 4 are not finite
  float32   is not finite of these inputs either
  zeros     softmax gave 2 zeros where float32 gives up to 8.76e-27, at {HERE}: shares = torch.softmax(y * .*
  means     the logarithm of 0 is -inf, with an infinite derivative, and of less than 0 NaN
  see       docs/debugging.md, "log"
ampcompat explain: 1 of 1 step was skipped; not finite: the loss of 1 step; the loss scale went from 65536 to 32768;\
 seen: log at {HERE}, in 1 step.
""",
    ),
    "a gradient": (
        lambda: lose_steps(lambda model: model(torch.full((2, 2), 50.0)).float().sum(), loss_scale=2.0**10),
        f"""ampcompat explain: a gradient of step 1 is not finite.
  line      {HERE}: lambda: lose_steps(lambda model: .*
  op        linear (aten::mm), in the backward
  module    Linear itself
  in        self float16 [2, 2]: 1024 .. 1024
  in        mat2 float16 [2, 2]: 50 .. 50
  out       result float16 [2, 2]: 4 of 4 are not finite
  float32   gives up to 102400 of these inputs; float16 ends at 65504
  scale     the loss scale is 1024, static; divided by it, 100
  means     float32 holds this gradient, half does not, with the loss scale in it
  see       docs/debugging.md, "gradient"
ampcompat explain: 0 of 1 step were skipped; not finite: the gradients of 1 step; seen: the backward of linear at\
 {HERE}, in 1 step; weights are not finite since step 1.
""",
    ),
    "an input": (
        lambda: lose_steps(lambda model: model(torch.tensor([[1.0, 2.0], [torch.nan, 0.0]])).float().mean()),
        """ampcompat explain: the loss of step 1 is nan.
  what      input 0 of Linear was not finite before
  in        input float32 [2, 2]: 0 .. 2, 1 of 4 is 0, 1 of 4 is not finite, in row 1
  means     no op of this forward made it
  see       docs/debugging.md, "input"
ampcompat explain: 1 of 1 step was skipped; not finite: the loss of 1 step; the loss scale went from 65536 to 32768;\
 seen: input 0 of Linear, in 1 step.
""",
    ),
    "a step": (
        lambda: lose_steps(
            lambda model: model(torch.tensor([1])).float().sum(),
            level="O3",
            model=nn.Embedding(3, 2),
            make=lambda params: torch.optim.Adam(params, lr=0.5),
        ),
        """ampcompat explain: step 1: Adam left weight not finite.
  what      weight float16 [3, 2]: 0.5 .. 0.5, 4 of 6 are not finite, in rows 0, 2
  with      grad float16 [3, 2]: 0 .. 1, 4 of 6 are 0; 0 in 4 of the 4 that are lost
  with      exp_avg float16 [3, 2]: 0 .. 0.099976, 4 of 6 are 0; 0 in 4 of the 4 that are lost
  with      exp_avg_sq float16 [3, 2]: 0 .. 0.0010004, 4 of 6 are 0; 0 in 4 of the 4 that are lost
  option    lr=0.5
  option    eps=1e-08, which is 0 in float16
  means     what was looked at before this step was finite
  see       docs/debugging.md, "step"
ampcompat explain: 0 of 1 step were skipped; not finite: the weights of 1 step; seen: Adam left weight not finite,\
 in 1 step; weights are not finite since step 1.
""",
    ),
    "a loss": (
        lambda: lose_steps(lambda model: (model(torch.ones(2, 2)).float() * 0).log().mean(), steps=2),
        f"""ampcompat explain: the loss of step 1 is -inf; its forward, run again, returned values up to 3; up to 50\
 steps are watched as they run.
  means     no op that was seen made it
  see       docs/debugging.md, "unknown"
ampcompat explain: the loss of step 2 is -inf.
  line      {HERE}: lambda: lose_steps(lambda model: .*
  op        log, in the forward
  module    outside of any module
  in        self float32 [2, 2]: 0 .. 0, 4 of 4 are 0
  out       result float32 [2, 2]: 4 of 4 are not finite
  means     the logarithm of 0 is -inf, with an infinite derivative, and of less than 0 NaN
  see       docs/debugging.md, "log"
ampcompat explain: 2 of 2 steps were skipped; not finite: the loss of 2 steps; the loss scale went from 65536 to\
 16384; seen: log at {HERE}, in 1 step.
""",
    ),
}


def pattern_of(text):
    """``text`` as a pattern in which what is a pattern already stays one."""
    return text.replace("(", r"\(").replace(")", r"\)").replace("[", r"\[").replace("]", r"\]")


@pytest.mark.parametrize("name", TEXTS)
def test_the_text(capsys, name):
    lose, text = TEXTS[name]
    lose()
    assert re.fullmatch(pattern_of(text), capsys.readouterr().err)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        (Counts(steps=3), "0 of 3 steps were skipped."),
        (Counts(blocks=2), "no step was made, in 2 scale_loss blocks."),
        (
            Counts(steps=5, blocks=40, blocks_since=35),
            "0 of 5 steps were skipped; no step was made after the last 35 scale_loss blocks.",
        ),
        (
            Counts(
                steps=9,
                skipped=2,
                scales={" of loss 0": [4.0, 1.0]},
                at_end={"gradients of 0": "x is 0"},
                warned=["this"],
            ),
            "2 of 9 steps were skipped; the loss scale of loss 0 went from 4 to 1; x is 0; amp has warned of this.",
        ),
    ],
)
def test_the_counts(counts, text):
    assert str(counts) == text
