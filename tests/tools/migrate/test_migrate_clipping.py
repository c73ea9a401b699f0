"""Clipping while losses are accumulated: ``unscale_`` may be called once before a step, so the threshold is scaled."""

import re

import pytest
import torch

from ampcompat.tools.migrate import migrate_source

CLIPPED = """\
import torch
from apex import amp

model, optimizer = amp.initialize(model, optimizer{options})
for number, x in enumerate(data):
    with amp.scale_loss(model(x).mean() / 2, optimizer) as scaled_loss:
        scaled_loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), {limit})
    norms.append(float(norm))
    if (number + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def parts(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def by_hand(data, limit):
    """The norms and weights of the same loop, whose gradients were never scaled."""
    model, optimizer = parts()
    norms = []
    for number, x in enumerate(data):
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        (out.float().mean() / 2).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        if (number + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return norms, model.weight.detach()


def migrated(data, limit, options=""):
    result = migrate_source(CLIPPED.format(limit=limit, options=options), "native")
    assert result.todos == []
    assert f"{limit} * scaler.get_scale())\n    norm /= scaler.get_scale()\n" in result.code
    model, optimizer = parts()
    variables = {"model": model, "optimizer": optimizer, "data": data, "norms": []}
    exec(result.code, variables)
    return variables["norms"], model.weight.detach(), variables["scaler"]


@pytest.mark.parametrize("options", ["", ", loss_scale=1024.0", ", loss_scale=3.0", ", opt_level='O4'"])
@pytest.mark.parametrize("limit", [0.05, 100.0])
def test_the_clipped_gradients_are_those_of_unscaled_losses(limit, options):
    data = torch.randn(6, 16, 8)
    norms, weight, _ = migrated(data, limit, options)
    expected_norms, expected = by_hand(data, limit)
    tolerance = 2**-6 if "O4" in options else 2**-10  # bfloat16 has eight bits, float16 eleven
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected_norms), rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(weight, expected, rtol=tolerance, atol=tolerance)
    assert (max(norms) > limit) == (limit == 0.05)


def test_an_overflow_is_skipped_and_lowers_the_scale():
    data = torch.randn(4, 16, 8)
    data[0, 0, 0] = 6e4  # the scaled gradient of the weight overflows, the loss does not
    norms, weight, scaler = migrated(data, 0.05)
    assert not all(map(torch.isfinite, map(torch.tensor, norms[:2])))
    assert torch.isfinite(weight).all()
    assert scaler.get_scale() == 2**15
    assert torch.isfinite(torch.tensor(norms[2:])).all()


def test_a_step_that_is_left_out_after_clearing_stays_marked():
    """The scaler would never learn of an overflow: its scale would stay too high for ever."""
    code = CLIPPED.format(limit=1.0, options="").replace("    with amp", "    optimizer.zero_grad()\n    with amp")
    code = code.replace("if (number + 1) % 2 == 0:", "if not torch.isfinite(norm):\n        continue\n    if True:")
    result = migrate_source(code, "native")
    assert "get_scale() *" not in result.code
    assert "* scaler.get_scale()" not in result.code


def test_a_norm_of_ones_own_is_divided_by_the_scale():
    code = CLIPPED.format(limit=1.0, options="").replace("torch.nn.utils.clip_grad_norm_", "get_grad_norm")
    result = migrate_source("from engine import get_grad_norm\n" + code, "native")
    assert result.todos == []
    assert re.search(r"get_grad_norm\(.*\) / scaler.get_scale\(\)$", result.code, re.MULTILINE)
    assert [note for note in result.notes if note.startswith("get_grad_norm() is taken for a norm")]


@pytest.mark.parametrize(
    "function",
    ["from engine import gradient_stats", "def get_grad_norm(parameters, limit):\n    parameters[0].grad.mul_(limit)"],
    ids=["another name", "gradients are changed"],
)
def test_other_looks_while_accumulating_are_marked(function):
    name = "gradient_stats" if "stats" in function else "get_grad_norm"
    code = CLIPPED.format(limit=1.0, options="").replace("torch.nn.utils.clip_grad_norm_", name)
    result = migrate_source(f"{function}\n{code}", "native")
    assert [line for line, message in result.todos if "divide a norm of them by scaler.get_scale()" in message]
