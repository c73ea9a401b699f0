"""What steps do to weights, and numbers that half parameters' dtype does not hold: named, with a hint."""

import json
import re

import pytest
import torch
from amp_training import explainer, initialized, make_step
from torch import nn

from ampcompat import amp
from ampcompat.amp.observers import observers
from ampcompat.tools.explain import explain_as, explain_as_asked, fault, numbers
from ampcompat.tools.explain.observer import OverflowExplainer
from ampcompat.tools.explain.replay import Finding


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(10, 4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.embeddings(x))


def train(
    make, level="O3", steps=2, model=Words, batch=torch.tensor([1, 2]), loss=lambda y: y.float().sum(), **options
):
    torch.manual_seed(0)
    model = model()
    model, optimizer = amp.initialize(model, make(model.parameters()), opt_level=level, verbosity=0, **options)
    if not observers():
        amp.explain_overflows()
    for _ in range(steps):
        optimizer.zero_grad()
        make_step(optimizer, loss(model(batch)))
    return model, optimizer


def adam(**options):
    return lambda params: torch.optim.Adam(params, **{"lr": 1e-3, **options})


def test_adams_eps_at_o3(capsys):
    """The commonest failure of O3: rows without a gradient become 0 / 0."""
    train(adam())
    out, err = capsys.readouterr()
    assert "ampcompat explain" not in out
    assert err.splitlines() == [
        "ampcompat explain: Step 1 of Adam left a weight that is not finite.",
        "  what      embeddings.weight (float16): 32 of 40 elements are not finite",
        "  where     group 0 of Adam",
        "  why       eps=1e-08 is 0 in float16, and exp_avg_sq is 0 in 32 of these 32: a division by zero",
        "  hint      pass eps=1e-4 to Adam",
        "  or        opt_level='O2': its optimizer steps float32 masters",
    ]


def test_adams_eps_in_a_model_with_other_weights(capsys):
    """Weights beside the first grow to infinity too: by the same division, and not by the learning rate."""

    def model():
        return nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 4))

    train(adam(lr=0.01), model=model, steps=1, loss=lambda y: y.float().mean() * 1e-3)
    told = capsys.readouterr().err
    assert "  hint      pass eps=1e-4 to Adam" in told
    assert "growth" not in told


@pytest.mark.parametrize(("level", "options"), [("O3", {"eps": 1e-4}), ("O2", {}), ("O1", {}), ("O0", {})])
def test_the_hints_help(capsys, level, options):
    model, _ = train(adam(**options), level, loss=lambda y: y.float().sum() * 0.1)
    assert all(p.isfinite().all() for p in model.parameters())
    assert "ampcompat explain" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (adam(eps=1e-4, weight_decay=1e-9), ["weight_decay=1e-09 is 0 in float16"]),
        (adam(eps=1e-4, betas=(0.9, 0.9999)), ["betas[1]=0.9999 is 1 in float16"]),
        (adam(eps=1e-4, lr=1e-8), ["lr=1e-08 is 0 in float16"]),
        (lambda p: torch.optim.SGD(p, lr=1e5), ["lr=100000 is inf in float16"]),
        (lambda p: torch.optim.AdamW(p, lr=1e-4, eps=1e-4), ["1 - lr * weight_decay=0.999999 is 1 in float16"]),
        (lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-4, momentum=0.99999), ["momentum=0.99999 is 1 in float16"]),
    ],
)
def test_every_number_that_float16_does_not_hold(make, texts):
    _, optimizer = train(make, steps=0)
    assert [one.text for one in numbers.unheld(optimizer)] == texts


def test_numbers_of_bfloat16():
    _, optimizer = train(adam(), cast_model_type=torch.bfloat16, steps=0)
    assert [one.text for one in numbers.unheld(optimizer)] == ["betas[1]=0.999 is 1 in bfloat16"]


def test_numbers_that_are_held_or_do_not_meet_half():
    from ampcompat.optimizers import FusedAdam

    def none(make, level="O3"):
        return numbers.unheld(train(make, level, steps=0)[1])

    assert none(adam(), "O2") == none(adam(), "O1") == none(adam(), "O0") == []
    assert none(lambda p: FusedAdam(p, lr=1e-3)) == []  # it computes in float32
    assert none(lambda p: torch.optim.LBFGS(p)) == []  # its tolerances are compared in Python

    def warmed_up(params):
        optimizer = torch.optim.SGD(params, lr=1.0)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-9)
        return optimizer

    assert none(warmed_up) == []


def test_lost_hyperparameters_are_reported_once(capsys):
    """Numbers that half does not hold are reported at the first step, and use up no explanation."""
    train(lambda p: torch.optim.SGD([{"params": list(p), "weight_decay": 1e-9}], lr=0.1), steps=3)
    (told,) = capsys.readouterr().err.split("ampcompat explain: ")[1:]
    assert told.splitlines() == [
        "SGD has numbers that the dtype of its parameters does not hold.",
        "  group 0   weight_decay=1e-09 is 0 in float16, the dtype of 3 of its parameters: it has no effect",
        "  hint      leave weight_decay out, or pass weight_decay=1e-6 or more to SGD",
        "  or        opt_level='O2': its optimizer steps float32 masters",
    ]
    assert explainer().left == 3


def test_an_update_that_leaves_float16(capsys):
    train(lambda p: torch.optim.SGD(p, lr=6e4), steps=1, model=lambda: nn.Linear(2, 2), batch=torch.full((1, 2), 4.0))
    err = capsys.readouterr().err
    assert "Step 1 of SGD left a weight that is not finite." in err
    assert "what      weight (float16): 4 of 4 elements are not finite" in err
    assert "why       the update left the range of float16 (lr=60000, its largest gradient is 4)" in err


def test_state_that_leaves_float16(capsys):
    loss = lambda y: y.float().sum() * 1e4  # noqa: E731 - its square, times 1 - beta2, is beyond 65504
    train(adam(eps=1e-4), steps=1, model=lambda: nn.Linear(2, 2), batch=torch.ones(1, 2), loss=loss)
    err = capsys.readouterr().err
    assert "Step 1 of Adam left state that is not finite." in err
    assert "what      exp_avg_sq of weight (float16): 4 of 4 elements are not finite" in err
    assert "the largest gradient is 1e+04, whose square is 1e+08" in err


def test_the_step_is_numbered_and_the_group_named(capsys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in model], lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    amp.explain_overflows()
    for step in range(4):
        optimizer.param_groups[1]["lr"] = 6e4 if step == 2 else 0.0
        make_step(optimizer, model(torch.full((1, 2), 9.0)).float().sum())
        optimizer.zero_grad()
    err = capsys.readouterr().err
    assert "Step 3 of SGD left a weight that is not finite." in err
    assert "where     group 1 of SGD" in err
    assert re.search(r"what      1\.(weight|bias) \(float16\)", err)
    assert err.count("ampcompat explain: ") == 1


def test_a_master_beyond_float16_at_o2(capsys):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    loss = lambda y: (y.float() + 1).pow(2).mean() / 4  # noqa: E731 - gradients are 1 / 4
    train(lambda p: torch.optim.SGD(p, lr=4e5), "O2", 3, lambda: model, torch.ones(1, 2), loss)
    err = capsys.readouterr().err
    assert "Step 1 of SGD left a weight that is not finite." in err
    assert "what      weight (float16): 4 of 4 elements are not finite" in err
    assert "why       its float32 master reached 100000, and float16 ends at 65504" in err
    assert err.count("ampcompat explain: ") == 1  # the skipped steps that follow are its doing


@pytest.mark.parametrize(("level", "rate"), [("O1", 1e38), ("O2", 1e6)])
def test_the_step_is_the_one_that_wrote_it_whenever_it_is_read(capsys, level, rate):
    """Row 3 is written by step 2, and read first in step 5, after an overflow of another kind."""

    class Boosted(Words):
        boost = 1e9

        def forward(self, x):
            return self.fc(self.embeddings(x) * self.boost)

    torch.manual_seed(0)
    model = Boosted()
    parts = [{"params": model.embeddings.parameters()}, {"params": model.fc.parameters()}]
    model, optimizer = amp.initialize(model, torch.optim.SGD(parts, lr=1e-3), opt_level=level, verbosity=0)
    amp.explain_overflows()
    for step, word in enumerate((1, 3, 1, 1, 3), start=1):
        optimizer.param_groups[0]["lr"] = rate if step == 2 else 1e-3
        with amp.scale_loss(model(torch.tensor([word])).float().sum() * 1e-2, optimizer) as scaled:
            scaled.backward()
        if step == 2:
            for p in amp.master_params(optimizer):
                p.grad = p.grad.sign() * 10
        optimizer.step()
        optimizer.zero_grad()
        model.boost = 1.0
    overflow, written = capsys.readouterr().err.split("ampcompat explain: ")[1:]
    assert overflow.startswith("A step was skipped.")
    assert written.startswith("Step 2 of SGD left a weight that is not finite.\n  what      embeddings.weight (float")
    assert "4 of 40 elements are not finite" in written


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_gradient_that_the_script_wrote_after_the_block(capsys, level, fused):
    """The block's own gradients were finite; with a fused optimizer only the device knows that the step was made."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused or None)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp.explain_overflows()
    for step in (1, 2):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled:
            scaled.backward()
        if step == 2:
            next(iter(amp.master_params(optimizer))).grad[0, 1] = float("nan")
        optimizer.step()
    written = capsys.readouterr().err.split("ampcompat explain: ")[-1]
    dtype = "float16" if level == "O3" else "float32"
    assert written.splitlines() == [
        "Step 2 of SGD left a weight that is not finite.",
        f"  what      weight ({dtype}): 1 of 4 elements are not finite",
        "  where     group 0 of SGD",
        "  why       its gradient was not finite",
        "  hint      look at what writes gradients outside scale_loss, such as clipping by a norm of 0 or inf",
    ]


@pytest.mark.parametrize("read", [True, False])
def test_a_weight_that_no_step_wrote(capsys, read):
    """Whether the loss overflows for it or not, the next step is not to blame."""
    model, loss = lambda: nn.Linear(2, 2), lambda y: y.float().square().mean() * 0.01
    model, optimizer = train(lambda p: torch.optim.SGD(p, lr=0.1), "O1", 2, model, torch.ones(1, 2), loss)
    with torch.no_grad():
        model.bias[0] = float("inf")
    make_step(optimizer, loss(model(torch.ones(1, 2))[:, 0 if read else 1]))
    err = capsys.readouterr().err
    if read:
        assert "parameter bias was not finite before the forward" in err
        assert (
            "hint      no step is known to have written it: look at what else writes weights, such as load_state_dict"
            in err
        )
    else:
        assert err == ""


def test_infinities_before_the_first_step_are_ignored(capsys):
    """A mask of ``-inf`` is a parameter of the model."""

    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.mask = nn.Parameter(torch.tensor([0.0, 0.0, float("-inf")]))

        def forward(self, x):
            return (super().forward(x) + self.mask).softmax(-1)[:, :2]

    train(lambda p: torch.optim.SGD(p, lr=0.1), "O1", 3, Masked, torch.ones(1, 3), lambda y: y.square().sum() * 1e-3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_weights_that_were_never_stepped(capsys, level):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    train(lambda p: torch.optim.SGD(p, lr=0.1), level, 3, lambda: model, torch.ones(1, 2))
    err = capsys.readouterr().err
    assert err.count("ampcompat explain: ") == 1
    assert "parameter weight was not finite before the forward" in err
    assert "no step was made yet: look at how the model is initialized, or at the checkpoint" in err


# -- words, JSON, the end ----------------------------------------------------------------------------------------------
def started():
    """How many faults are explained, whether the script then ends, and whether in JSON; None for no explaining."""
    found = [one for one in observers() if isinstance(one, OverflowExplainer)]
    return (found[0].limit, found[0].stop, found[0].json) if found else None


WORDS = {"1": (3, False, False), "first": (1, True, False), "json": (3, False, True)}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("from_environment", [False, True])
def test_words(monkeypatch, word, from_environment):
    if from_environment:
        monkeypatch.setenv("AMPCOMPAT_EXPLAIN", word)
        explain_as_asked()
    else:
        explain_as(word)
    assert started() == WORDS[word]


@pytest.mark.parametrize("word", ["ranges", "json,first", "5", "yes", ""])
def test_other_words_are_answered_by_those_that_there_are(monkeypatch, word):
    with pytest.raises(ValueError, match=r"explain=.* - it takes one of the words 1, first and json - "):
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
    assert told_numbers["explain"] == "numbers"
    assert told_numbers["numbers"] == [
        {"group": 0, "name": "weight_decay", "value": 1e-9, "becomes": 0.0, "dtype": "float16"}
    ]
    assert weights["explain"] == "weights"
    assert (weights["optimizer"], weights["parameter"], weights["step"]) == ("Adam", "embeddings.weight", 1)
    assert (weights["not_finite"], weights["elements"]) == (32, 40)
    assert weights["hints"][0] == "pass eps=1e-4 to Adam"


def test_a_fault_as_json_has_strings_for_what_json_has_not(capsys):
    amp.explain_overflows(json=True)
    x = torch.tensor([[float("inf"), 1.0]])
    train(lambda p: torch.optim.SGD(p, lr=0.1), "O1", 1, lambda: nn.Linear(2, 2), x)
    (found,) = lines(capsys.readouterr().err)
    assert (found["explain"], found["op"], found["largest"], found["step"]) == ("fault", "input", "inf", 1)
    assert (found["file"], found["line"]) == (None, None)


def test_other_ranks_tell_the_faults_of_their_own_batches(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    amp.explain_overflows(limit=1)
    x = torch.tensor([[1e9, 1.0]])
    train(lambda p: torch.optim.SGD(p, lr=0.1), "O1", 1, lambda: nn.Linear(2, 2), x)
    told = capsys.readouterr().err
    assert told.startswith("ampcompat explain (rank 1): A step was skipped.")
    assert told.count("ampcompat explain") == 1  # that it was the last explanation is for rank 0 to say
    amp.explain_overflows(limit=1, json=True)
    train(lambda p: torch.optim.SGD(p, lr=0.1), "O1", 1, lambda: nn.Linear(2, 2), x)
    assert [(one["explain"], one["rank"]) for one in lines(capsys.readouterr().err)] == [("fault", 1)]


def test_an_unexplained_skip_may_come_from_another_rank(monkeypatch):
    monkeypatch.setattr(fault, "_has_other_ranks", lambda: True)
    head = fault.outside_message("A step was skipped", [Finding(None, "Net")], 1).head
    assert "the code outside of them did it, or another rank, whose gradients are added." in head


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
