"""A large tree costs what its apex files cost: the others are parsed only where a trap could be in them."""

import ast
import weakref

import pytest

from ampcompat.check import scan, scan_source, source
from ampcompat.check.traps import may_hold_trap, numeric

TRAP = "import torch\ns = s.masked_fill(mask, -1e9)\n"


def test_files_without_apex_are_not_parsed_unless_amp_is_used_somewhere(tmp_path, monkeypatch):
    for i in range(5):
        (tmp_path / f"m{i}.py").write_text(TRAP)
    parsed = []
    real = ast.parse
    monkeypatch.setattr(ast, "parse", lambda code, *args, **kwargs: parsed.append(code) or real(code, *args, **kwargs))
    report = scan(tmp_path)
    assert (report.files, report.findings, parsed) == (5, [], [])
    (tmp_path / "train.py").write_text("from apex import amp\nm, o = amp.initialize(m, o)\n")
    assert [f.path for f in scan(tmp_path).findings if f.kind == "trap"] == [f"m{i}.py" for i in range(5)]


def test_trees_do_not_pile_up(tmp_path, monkeypatch):
    """All of them alive at once take the garbage collector longer than the parser takes."""
    alive, most, real = weakref.WeakSet(), [0], source.Source.__init__

    def counted(self, path, code):
        real(self, path, code)
        alive.add(self)
        most[0] = max(most[0], len(alive))

    monkeypatch.setattr(source.Source, "__init__", counted)
    for i in range(20):
        (tmp_path / f"m{i}.py").write_text(TRAP)
    (tmp_path / "train.py").write_text("from apex import amp\nm, o = amp.initialize(m, o)\n")
    scan(tmp_path)
    assert most[0] < 10


HALF = "import torch\nx = x.half()\n"
NO_TRAP = [
    "y = attention_mask * 2  # see https://github.com/a/b/issues/140457\n",
    "# mask * issue 107187\ny = mask * 2\n",
    "y = x.clamp(min=0)\nz = torch.allclose(x, y, atol=1e-8)\n",
    "def f(x, eps=1e-8):\n    return x.clamp(min=0)\n",
    "y = norm(x + 1e-8)\n",
    "y = [x + 1e-8] * 2\n",
    "# x / (y + 1e-8)\n",
    "y = NBCELoss()(x) + my_binary_cross_entropy(x)\n",
]
TRAPS = [
    "y = x / (\n    x.abs()  # not a bracket: (\n    + 1e-8\n)\n",
    "y = torch.log(((x) + (1e-8)))\n",
    "y = x / (1e-8 + x[')'].abs())\n",
    "y = x / \\\n    (x + 1e-9)\n",
    "y = x / (x['#'] + .00000001)\n",
    "y = torch.clamp(x, max=max(1, 2), min=(1e-8))\n",
    "y = x.clamp_min(\n    # as small as (\n    1E-08\n)\n",
    "y = x / (x + 1e-8) if '#' else x / (x + 1e-8)\n",
    "x[mask] = -1e9\n",
    "y = x + (1 - mask) * (  # as large as can be\n    -1_000_000\n)\n",
    "name = '#'; y = mask * 1e9\n",
    "name = '''\n# '''; y = mask * 1e9\n",
]


@pytest.mark.parametrize("code", NO_TRAP)
def test_what_the_text_shows_to_be_no_trap_is_not_parsed(code):
    assert not may_hold_trap(HALF + code)


@pytest.mark.parametrize("code", TRAPS)
def test_a_look_at_the_text_loses_no_trap(code, monkeypatch):
    code = f"from apex import amp\nm, o = amp.initialize(m, o)\n{HALF}{code}"
    seen = scan_source(code)
    assert may_hold_trap(code)
    for name in ("has_small_guard", "has_large_fill"):
        monkeypatch.setattr(numeric, name, lambda code: True)
    assert [f.name for f in seen if f.kind == "trap"] != []
    assert scan_source(code) == seen
