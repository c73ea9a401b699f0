"""Large trees and files: what is not needed is not parsed, trees do not pile up, and work grows with the lines."""

import ast
import gc
import json
import sys
import weakref
from pathlib import Path

import pytest

from ampcompat.tools.check import documents, scan, scan_source, source, together, trees
from ampcompat.tools.check.traps import setup

TRAP = "import torch\ns = s.masked_fill(mask, -1e9)\n"


@pytest.fixture
def parsed(monkeypatch):
    """The texts that are parsed."""
    texts = []
    real = ast.parse
    monkeypatch.setattr(ast, "parse", lambda code, *args, **kwargs: texts.append(code) or real(code, *args, **kwargs))
    return texts


def test_files_without_apex_are_parsed_only_beside_amp(tmp_path, parsed):
    for i in range(5):
        (tmp_path / f"m{i}.py").write_text(TRAP)
    report = scan(tmp_path)
    assert (report.files, report.findings, parsed) == (5, [], [])
    (tmp_path / "train.py").write_text("from apex import amp\nm, o = amp.initialize(m, o)\n")
    assert [f.path for f in scan(tmp_path).findings if f.kind == "trap"] == [f"m{i}.py" for i in range(5)]


def test_each_file_is_parsed_once(tmp_path, parsed):
    """Those that name apex, too, which are searched for symbols first, and for traps when all files are known."""
    for i in range(3):
        (tmp_path / f"m{i}.py").write_text(TRAP + f"# {i}\n")
        (tmp_path / f"train{i}.py").write_text(f"# {i}\nfrom apex import amp\nm, o = amp.initialize(m, o)\n{TRAP}")
    cells = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": "from apex import amp\n" + TRAP}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}, indent=1))
    scan(tmp_path)  # reads the lists of ampcompat, too
    parsed.clear()
    assert len([f for f in scan(tmp_path).findings if f.kind == "trap"]) == 7
    assert len(parsed) == 7
    assert gc.isenabled()


def test_findings_do_not_depend_on_what_is_kept(tmp_path, monkeypatch):
    (tmp_path / "m.py").write_text("from apex import amp\n" + TRAP)
    (tmp_path / "train.py").write_text("from apex import amp\nm, o = amp.initialize(m, o)\n" + BLOCK)
    kept = scan(tmp_path).findings
    monkeypatch.setattr(trees.Trees, "keep", lambda self, file, source: None)
    assert scan(tmp_path).findings == kept


def test_trees_do_not_pile_up(tmp_path, monkeypatch):
    """What is kept is bounded, and the others are dropped at once: no collector runs meanwhile."""
    train = "from apex import amp\nm, o = amp.initialize(m, o)\n" + BLOCK
    monkeypatch.setattr(trees, "MOST_CHARACTERS", 3 * len(train))
    alive, most, real = weakref.WeakSet(), [0], source.Source.__init__

    def counted(self, *args):
        real(self, *args)
        alive.add(self)
        most[0] = max(most[0], len(alive))

    monkeypatch.setattr(source.Source, "__init__", counted)
    for i in range(20):
        (tmp_path / f"m{i}.py").write_text(TRAP)
        (tmp_path / f"train{i}.py").write_text(train)
    scan(tmp_path)
    assert most[0] < 7


HALF = "from apex import amp\nimport torch\nm, o = amp.initialize(m, o)\nx = x.half()\n"
NO_TRAP = [
    "y = attention_mask * 2  # see https://github.com/a/b/issues/140457\n",
    "# mask * issue 107187\ny = mask * 2\n",
    "y = x.clamp(min=0)\nz = torch.allclose(x, y, atol=1e-8)\n",
    "def f(x, eps=1e-8):\n    return x.clamp(min=0)\n",
    "y = norm(x + 1e-8)\n",
    "y = [x + 1e-8] * 2\n",
    "# x / (y + 1e-8)\n",
    "y = NBCELoss()(x) + my_binary_cross_entropy(x)\n",
    "text = 'x / (x + 1e-8)'\n",
    "y = x / (x.float() + 1e-8)\n",
    "y = x / (np.abs(x) + 1e-8)\n",
    "y = x.to(torch.float32) * mask * 1e9\n",
]
TRAP_EXPRESSIONS = [
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
    "y = x + batch['attention_mask'] * -1e9\n",
]


@pytest.mark.parametrize("code", NO_TRAP)
def test_what_is_no_trap(code):
    assert [f.name for f in scan_source(HALF + code) if f.kind == "trap"] == []


@pytest.mark.parametrize("code", TRAP_EXPRESSIONS)
def test_every_way_of_writing_one(code):
    assert [f.name for f in scan_source(HALF + code) if f.kind == "trap"] != []


# -- work that grows with the lines ------------------------------------------------------------------------------------
START = (
    "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\nfrom apex import amp\n"
    "model, optimizer = amp.initialize(model, optimizer, opt_level='O2')\n"
)
BLOCK = "with amp.scale_loss(loss, optimizer) as scaled:\n    scaled.backward()\n"
END = "model, optimizer = amp.initialize(model, optimizer, opt_level='O3')\n" + BLOCK
#: Statements that a file may have any number of; ``{i}`` is the number of each.
STATEMENTS = {
    "assignments": "x{i} = f(x)\n",
    "one name": "x = f(x, {i})\n",
    "a model": "model = prepare(model)\n",
    "casts": "model = model.half()\n",
    "casts back": "model = model.half()\nmodel.float()\n",
    "wrappers": "model = DDP(model)\n",
    "optimizers": "optimizer = torch.optim.Adam(optimizer)\n",
    "initializations": "model, optimizer = amp.initialize(model, optimizer, opt_level='O3')\nmodel = model.half()\n",
    "losses": "loss{i} = g(loss)\nloss = h(loss{i})\nloss{i}.backward()\n",
    "blocks": BLOCK + "loss.backward()\n",
    "blocks in branches": "if a{i}:\n    with amp.scale_loss(loss, optimizer) as s:\n        s.backward()\n"
    "else:\n    loss.backward()\n",
    "blocks that return": "if a{i}:\n    with amp.scale_loss(loss, optimizer) as s:\n        s.backward()\n"
    "    continue\nloss.backward()\n",
    "clips": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n",
    "exits": "if a{i}:\n    sys.exit()\nmodel = model.half()\nloss.backward()\n",
    "fills": "scores = scores.masked_fill(mask, -1e9)\n",
    "branches": "if a:\n    x = y.half()\n    y = x / (x + 1e-8)\n",
    "epsilons": "x = x / (x.half() + 1e-8)\n",
    "masks": "x = x + mask * -1e9\n",
    "cross entropies": "loss = F.binary_cross_entropy(torch.sigmoid(x), y)\n",
    "edits": "for p in model.parameters():\n    p.grad.div_(2)\n",
    "functions": "def f{i}(loss):\n    with amp.scale_loss(loss, optimizer) as s:\n        s.backward()\n"
    "    clip_grad_norm_(amp.master_params(optimizer), 1)\n    loss.backward()\n",
    "classes": "class A{i}(nn.Module):\n    def __init__(self):\n        self.fc = nn.Linear(1, 1)\n"
    "    def forward(self, x):\n        y = self.fc(x)\n        return y / (y + 1e-8)\n",
    "imports": "try:\n    import apex.RNN\nexcept ImportError:\n    pass\n",
    "stars": "from apex.amp import *\n",
    "copies": "o = copy.deepcopy(optimizer)\n",
    "attributes": "self.amp = amp\nself.amp.state_dict()\nhasattr(optimizer, '_amp_stash')\n",
}


def repeated(statement, count):
    return START + "".join(statement.replace("{i}", str(i)) for i in range(count)) + END


def in_one(before, line, after=""):
    return lambda count: START + before + line * count + after + END


SHAPES = {
    **{name: lambda count, text=text: repeated(text, count) for name, text in STATEMENTS.items()},
    "one branch": in_one("if fp16:\n" + BLOCK.replace("with", "    with").replace("    s", "        s") + "else:\n",
                         "    loss.backward()\n    clip_grad_norm_(model.parameters(), 1)\n"),
    "one try": in_one("try:\n", "    import apex.RNN\n", "except ImportError:\n    pass\n"),
    "one test": in_one("if fp16 and (", "a or ", "b):\n" + "    model.half()\n" * 50),
    "one sum": in_one("x = y", " + mask * 1e9", "\n"),
    "one product": in_one("x = mask", " * 1e9", "\n"),
    "one chain": in_one("x = y", ".a.b.c.d.e", "\n"),
    "parameters": lambda count: (
        START + f"def f({', '.join(f'a{i}' for i in range(count))}):\n" + "    amp.state_dict()\n" * count + END
    ),
}  # fmt: skip


def lines_run(code):
    """How many lines of the check run for a source; a work that no busy machine changes."""
    count = 0
    folder = str(Path(source.__file__).parent)

    def count_line(frame, event, argument):
        nonlocal count
        count += event == "line"
        return count_line

    def watch(frame, event, argument):
        return count_line(frame, event, argument) if frame.f_code.co_filename.startswith(folder) else None

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        found = scan_source(code)
    finally:
        sys.settrace(before)
    assert not [f for f in found if f.name == "unparsable"]
    return count


@pytest.mark.parametrize("shape", SHAPES)
def test_work_grows_with_the_lines(shape, monkeypatch):
    """How deep they may be nested is bounded by Python's parser."""
    few, many = 30, 120
    for module in (together, setup):
        monkeypatch.setattr(module, "MOST", 10)  # of what is looked at for each statement
    lines_run(repeated("", 0))  # what is read once
    assert lines_run(SHAPES[shape](many)) < 1.3 * many / few * lines_run(SHAPES[shape](few))


def test_a_notebook_whose_lines_are_not_found_takes_no_longer(tmp_path):
    """As one string with line feeds, which no line of the file holds."""

    def steps(count):
        cells = [{"cell_type": "code", "metadata": {}, "outputs": ["x"] * count, "source": "x = 1\n" * count}]
        text = json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}, indent=1)
        parsed = []
        real = json.loads
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json, "loads", lambda text: parsed.append(text) or real(text))
            documents.Notebook.read(text)
        return len(parsed)

    assert steps(400) < 5 * steps(100)


@pytest.mark.parametrize(
    "text", ["pip install ", " " * 20, "- ", "apex[", "#", "'", "\n", "from import\n", "except a, "]
)
def test_texts_that_regular_expressions_might_stumble_over(text, tmp_path):
    """Megabytes in one line, or of nothing: minutes where an expression goes back and forth."""
    (tmp_path / "requirements.txt").write_text(text * (2**20 // len(text)))
    (tmp_path / "a.py").write_text("from apex import amp\n" + text * (2**18 // len(text)) + "(")
    assert scan(tmp_path).files == 2
