"""``check`` on a migrated tree: the copied file is left out, traps of the code that uses it are found."""

import pytest
from running import migrate, write

from ampcompat.tools.check import scan

LOOP = """\
from apex import amp
model, optimizer = amp.initialize(model, optimizer, opt_level="{level}")
with amp.scale_loss(loss, optimizer) as scaled_loss:
    {inside}
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
for p in model.parameters():
    p.grad.div_(2)
optimizer.step()
"""
HOMES = {"a script": {}, "a package": {"pkg/__init__.py": "", "pkg/other.py": "from pkg import train\n"}}


def findings(folder, home, level="O2", inside="scaled_loss.backward()"):
    script = "pkg/train.py" if HOMES[home] else "train.py"
    write(folder, {**HOMES[home], script: LOOP.format(level=level, inside=inside)})
    migrate(folder)
    return scan(folder).findings


@pytest.mark.parametrize("home", HOMES)
def test_a_right_loop_has_no_finding(home, tmp_path):
    """At O2 too: the file has no masters."""
    assert findings(tmp_path, home) == []


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(
    ("mistake", "rule"),
    [({"inside": "optimizer.step()"}, "step_in_block"), ({"inside": "loss.backward()"}, "unscaled_backward")],
)
def test_traps_are_found(home, mistake, rule, tmp_path):
    assert [finding.name for finding in findings(tmp_path, home, **mistake)] == [rule]
