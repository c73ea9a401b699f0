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


@pytest.mark.parametrize("statement", STATEMENTS)
def test_the_loop_sees_the_same_gradients(statement):
    before = SCRIPT.format(statement=statement)
    result = migrate_source(before, "native")
    assert result.code.count("scaler.unscale_(optimizer)") == 1
    native, ours = {}, {}
    exec(result.code, native)
    exec(before.replace("from apex", "from ampcompat"), ours)
    # float16 arithmetic on both sides, rounded at other places
    assert native["seen"] == pytest.approx(ours["seen"], rel=1e-2)
    for one, other in zip(native["weights"], ours["weights"]):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


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
