"""Numbers of an optimizer that half parameters' dtype does not hold: named, with a hint."""

import pytest
import torch
from amp_training import explainer
from lossy_steps import adam, train

from ampcompat.tools.explain import numbers


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
    assert [one.fault.cause for one in numbers.not_representable(optimizer)] == texts


def test_numbers_of_bfloat16():
    _, optimizer = train(adam(), cast_model_type=torch.bfloat16, steps=0)
    assert [one.fault.cause for one in numbers.not_representable(optimizer)] == ["betas[1]=0.999 is 1 in bfloat16"]


def test_numbers_that_are_held_or_do_not_meet_half():
    from ampcompat.optimizers import FusedAdam

    def none(make, level="O3"):
        return numbers.not_representable(train(make, level, steps=0)[1])

    assert none(adam(), "O2") == none(adam(), "O1") == none(adam(), "O0") == []
    assert none(lambda p: FusedAdam(p, lr=1e-3)) == []  # it computes in float32
    assert none(lambda p: torch.optim.LBFGS(p)) == []  # its tolerances are compared in Python
    assert none(lambda p: torch.optim.ASGD(p, weight_decay=0.0, lambd=1e-3)) == []  # t0 is a number of steps
    assert none(lambda p: torch.optim.Rprop(p)) == []

    def warmed_up(params):
        optimizer = torch.optim.SGD(params, lr=1.0)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-9)
        return optimizer

    assert none(warmed_up) == []


def test_lost_hyperparameters_are_reported_once(capsys):
    """Numbers that half does not hold are reported at the first step, and use up no explanation."""
    train(lambda p: torch.optim.SGD([{"params": list(p), "weight_decay": 1e-9}], lr=0.1), steps=3)
    (told,) = capsys.readouterr().err.split("ampcompat explain: ")[1:]
    assert "what      weight_decay=1e-09 is 0 in float16, the dtype of 3 of its parameters: it has no effect" in told
    assert "where     group 0 of SGD" in told
    assert "hint      leave weight_decay out, or pass weight_decay=1e-6 or more" in told
    assert "opt_level='O2'" in told
    assert explainer().telling.left == 3


def test_a_number_of_several_groups_is_told_once(capsys):
    train(lambda p: torch.optim.SGD([{"params": [one]} for one in p], lr=0.1, weight_decay=1e-9), steps=2)
    assert capsys.readouterr().err.count("weight_decay=1e-09 is 0 in float16") == 1
