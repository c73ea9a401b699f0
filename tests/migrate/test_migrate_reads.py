"""Gradients read by hand between backward and step were unscaled under apex; under GradScaler they must be made so."""

import pytest
import torch

from ampcompat.migrate import migrate_source

SCRIPT = """\
import torch
from apex import amp

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = []

def norm(params):
    return sum(float(p.grad.norm()) for p in params)

model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=1024.0, verbosity=0)
for i in range(4):
    loss = model(torch.ones(2, 3)).float().pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    {statement}
    optimizer.step()
    optimizer.zero_grad()
weights = [p.detach().clone() for p in model.parameters()]
"""
STATEMENTS = [
    "for p in model.parameters():\n        p.grad.clamp_(-0.1, 0.1)",
    "for p in model.parameters():\n        p.grad = p.grad * 0.5",
    "seen.append(float(model.weight.grad.norm()))",
    "seen.append(norm(model.parameters()))",
    "if i % 2:\n        seen.append(norm(model.parameters()))",
    "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)\n    seen.append(norm(model.parameters()))",
]


def assert_same_training(statement):
    before = SCRIPT.format(statement=statement)
    result = migrate_source(before, "native")
    native, ours = {}, {}
    exec(result.code, native)
    exec(before.replace("from apex", "from ampcompat"), ours)
    # float16 arithmetic on both sides, rounded at other places
    assert native["seen"] == pytest.approx(ours["seen"], rel=1e-2)
    for one, other in zip(native["weights"], ours["weights"]):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("statement", STATEMENTS)
def test_the_loop_sees_the_same_gradients(statement):
    assert_same_training(statement)
    assert migrate_source(SCRIPT.format(statement=statement), "native").code.count("unscale_(") == 1


SHOW = "seen.append(norm(model.parameters()))"
CLIP = "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)"
# Statements that may run both, and must unscale once.
TWICE = [
    f"if i % 2:\n        {SHOW}\n    {CLIP}",
    f"if i % 2:\n        {CLIP}\n    {SHOW}",
    f"if i % 2:\n        {CLIP}\n    if i > 1:\n        {SHOW}",
    f"if i % 2:\n        {SHOW}\n        {CLIP}",
    f"if i % 2:\n        if i > 1:\n            {SHOW}\n        {CLIP}\n    {SHOW}",
    f"if i % 2:\n        {CLIP}\n    else:\n        {CLIP}\n    {SHOW}",
    f"if i > 9:\n        pass\n    elif norm(model.parameters()) > 0:\n        {CLIP}",
    f"with torch.no_grad():\n        {CLIP}\n    {SHOW}",
    f"try:\n        {SHOW}\n    finally:\n        {CLIP}",
    f"for _ in range(2):\n        {CLIP}\n    {SHOW}",
    f"{CLIP}\n    for _ in range(2):\n        {SHOW}",
]


@pytest.mark.parametrize("statement", TWICE)
def test_gradients_are_unscaled_once_whatever_branch_runs(statement):
    assert_same_training(statement)


ACCUMULATING = """\
for i in range(4):
    loss = model(torch.ones(2, 3)).float().pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    {statement}
    if i % 2:
        {clip}
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("clip", ["pass", CLIP])
@pytest.mark.parametrize("statement", [SHOW, CLIP, f"if i > 1:\n        {SHOW}"])
def test_before_a_step_that_may_not_come_the_place_is_marked(statement, clip):
    """GradScaler takes one ``unscale_`` between updates: one in every iteration would raise."""
    start = SCRIPT[: SCRIPT.index("for i in range(4)")]
    code = start + ACCUMULATING.format(statement=statement, clip=clip)
    result = migrate_source(code, "native")
    assert any("optimizer.step() does not follow each time" in note for _, note in result.todos)
    assert result.code.count("unscale_(") == (clip == CLIP)
    exec(result.code, {})
    assert migrate_source(result.code, "native").code == result.code


def test_between_two_backward_passes_the_place_is_marked():
    block = (
        "    with amp.scale_loss(loss, optimizer) as scaled_loss:\n        scaled_loss.backward(retain_graph=True)\n"
    )
    one = block.replace("retain_graph=True", "")
    code = SCRIPT.format(statement=CLIP).replace(one, f"{block}    {SHOW}\n{one}")
    result = migrate_source(code, "native")
    assert any("optimizer.step() does not follow each time" in note for _, note in result.todos)
    exec(result.code, {})


@pytest.mark.parametrize(
    "statement",
    [
        "if model.weight.grad is not None: pass",
        "model.bias.grad = None",
        "model.bias.grad.zero_()",
        "x, = torch.autograd.grad(model.weight.sum(), [model.weight])",
    ],
)
def test_what_reads_no_gradient_unscales_nothing(statement):
    assert "unscale_" not in migrate_source(SCRIPT.format(statement=statement), "native").code


def test_with_several_optimizers_the_place_is_marked():
    code = """\
from apex import amp
[a, b], [oa, ob] = amp.initialize([a, b], [oa, ob], num_losses=2)
with amp.scale_loss(a(x), oa, loss_id=0) as s:
    s.backward()
with amp.scale_loss(b(x), ob, loss_id=1) as s:
    s.backward()
print(a.weight.grad.norm())
oa.step()
ob.step()
"""
    result = migrate_source(code, "native")
    assert any("still scaled" in note for _, note in result.todos)
    assert migrate_source(result.code, "native").code == result.code
