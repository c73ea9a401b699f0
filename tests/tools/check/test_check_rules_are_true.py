"""The examples of the rules against torch: one with a mistake misbehaves when it is run, a look-alike does not.

Each script runs with the names that it leaves open bound to a small model, its optimizer and data; a witness of its
rule says what goes wrong.
"""

import sys
import warnings

import pytest
import torch
from internals import reset
from rule_examples import FALSE, TRUE
from torch import nn

import ampcompat
from ampcompat import amp

WIDTH = 8


@pytest.fixture(autouse=True)
def apex(monkeypatch):
    for name in [name for name in sys.modules if name == "apex" or name.startswith("apex.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "apex", ampcompat)
    monkeypatch.setitem(sys.modules, "apex.amp", amp)
    yield
    reset()


class Net(nn.Linear):
    """A model whose result is a loss."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x).float().pow(2).mean()


def run(code):
    """The names of a script after it ran, what it raised, and how far the step moved each parameter."""
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {"__name__": "script", "model": model, "opt": opt, "data": [torch.randn(4, WIDTH)], "n": 2.0, "fp": True}
    start = [p.detach().clone() for p in model.parameters()]
    problem = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(compile(code, "script", "exec"), found)
            if "class Attention" in code:
                found["model"](torch.zeros(4, WIDTH), torch.zeros(4, 4, dtype=torch.bool))
        except Exception as raised:
            problem = raised
    pairs = zip(amp.master_params(found["opt"]), start, strict=False)
    return problem, [(p.detach() - before).norm() for p, before in pairs if p.shape == before.shape]


def moved(code):
    problem, norms = run(code)
    assert problem is None
    return torch.stack(norms)


def examples(*rules):
    return [(rule, name) for rule in rules for name in TRUE[rule]]


REFUSED = {"step_in_block": "inside its scale_loss block", "wrapped_before_initialize": "already wrapped"}


@pytest.mark.parametrize(("rule", "name"), examples(*REFUSED))
def test_it_is_refused(rule, name):
    problem, _ = run(TRUE[rule][name][0])
    assert REFUSED[rule] in str(problem)


@pytest.mark.parametrize(("rule", "name"), examples("overflowing_fill"))
def test_a_fill_raises_when_the_model_is_called(rule, name):
    problem, _ = run(TRUE[rule][name][0])
    assert isinstance(problem, RuntimeError)
    assert "overflow" in str(problem)


@pytest.mark.parametrize(("rule", "name"), examples("clip_of_model_params", "edit_of_model_gradients"))
def test_what_is_done_to_the_models_gradients_changes_no_step_at_o2(rule, name):
    """At O1 it does."""
    code = TRUE[rule][name][0].replace('default="O1"', 'default="O2"')
    hard = code.replace(", 1.0)", ", 1e-4)").replace("n)", "n * 8)").replace("/ n", "/ n / 8")
    assert torch.equal(moved(code), moved(hard))
    assert not torch.equal(moved(code.replace('"O2"', '"O1"')), moved(hard.replace('"O2"', '"O1"')))


@pytest.mark.parametrize(("rule", "name"), examples("clip_of_scaled_gradients"))
def test_gradients_that_are_clipped_scaled_are_too_small(rule, name):
    code = TRUE[rule][name][0]
    assert moved(code).max() < moved(code.replace(", 1.0)", ", 1e9)")).min() / 100


def test_gradients_of_a_loss_that_was_not_scaled_are_too_small():
    code = TRUE["unscaled_backward"]["in the block"][0]
    assert moved(code).max() < moved(code.replace("loss.backward()", "scaled.backward()")).min() / 100


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("backward_after_block", "at O2"),
        ("unscaled_backward", "without a block at O2"),
        ("unscaled_backward", "without a block, in a function"),
    ],
)
def test_nothing_is_trained_at_o2(rule, name):
    assert moved(TRUE[rule][name][0]).max() == 0


def test_gradients_that_no_block_unscales_are_too_large():
    assert moved(TRUE["backward_after_block"]["at O1"][0]).min() > 1000


@pytest.mark.parametrize(("rule", "name"), [(rule, name) for rule in FALSE for name in FALSE[rule]])
def test_look_alikes_run_as_they_should(rule, name):
    code = FALSE[rule][name]
    if "native_amp" in code:
        code = code.replace("import native_amp as amp", "from ampcompat.tools.migrate import native_amp as amp")
    problem, norms = run(code)
    assert problem is None
    if "opt.step()" in code and "p.grad = None" not in code:
        assert max(norms) > 0
        assert all(norm.isfinite() for norm in norms)
