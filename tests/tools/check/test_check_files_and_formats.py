"""Where the check runs: several paths, notebooks, files that install apex, formats for CI, and what is left out."""

import ast
import json

import pytest

from ampcompat.cli import main
from ampcompat.tools.check import scan, scan_source
from ampcompat.tools.check.cells import read_cell
from ampcompat.tools.check.documents import NotANotebook, Notebook

TRAP = (
    "import torch\nfrom apex import amp, RNN\nmodel = torch.nn.DataParallel(model)\n"
    "model, o = amp.initialize(model, o)\n"
)


def notebook(*cells):
    made = [{"cell_type": "markdown", "metadata": {}, "source": ["from apex import amp\n"]}]
    made += [
        {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": c.splitlines(True)}
        for c in cells
    ]
    return json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def run(capsys, *words):
    """The exit status of ``ampcompat check *words``, and what it printed."""
    status = main(["check", *map(str, words)])
    return status, capsys.readouterr()


def test_several_paths_are_one_repository(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text(TRAP)
    (tmp_path / "b.py").write_text("import torch\nfrom a.x import model\ny = torch.bmm(a, b).masked_fill(m, -1e9)\n")
    status, shown = run(capsys, tmp_path / "a", tmp_path / "b.py", tmp_path / "b.py", "--format", "json")
    report = json.loads(shown.out)
    assert (status, report["files"]) == (1, 2)
    assert {f["path"] for f in report["findings"]} == {(tmp_path / n).as_posix() for n in ("a/x.py", "b.py")}


def test_the_default_is_the_working_directory(tmp_path, capsys, monkeypatch):
    (tmp_path / "x.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    assert run(capsys)[0] == 1


def test_notebook_findings_have_the_files_lines(tmp_path):
    """The cells are read as one source, and findings have the lines of the file."""
    text = notebook("%matplotlib inline\nfrom apex import amp\n", "!pip list\nif x:\n    amp.nonsense()\n")
    (tmp_path / "n.ipynb").write_text(text)
    found = {f.name: f.line for f in scan(tmp_path).findings}
    lines = text.splitlines()
    assert "from apex import amp" in lines[found["apex.amp"] - 1]
    assert found["apex.amp"] > 8  # not the text of the markdown cell
    assert "amp.nonsense()" in lines[found["apex.amp.nonsense"] - 1]


#: A cell, and for each of its lines what is left for the shell or a magic. IPython reads each one so.
CELLS = {
    "x = 1\n": [""],
    "!ls -l \\\n  data\nx = 1": ["!ls -l \\", "  data", ""],
    "%run train.py \\\n  --amp \\\n  --opt O2\nx = 1": ["%run train.py \\", "  --amp \\", "  --opt O2", ""],
    "if x:\n    !ls\nelse:\n    %cd data\n": ["", "    !ls", "", "    %cd data"],
    "files = !ls \\\n data\nstamp = %time f()\nx = 7 %2 != 1\n": ["files = !ls \\", " data", "stamp = %time f()", ""],
    "model?\nmodel.fit??\n?model\nx = 1\n": ["model?", "model.fit??", "?model", ""],
    "x = {\n  'a?': 1,  # why?\n}\n": ["", "", ""],
    "print('%d'\n  % x)\nt = '''\n%no magic\n!\\\\'''\n": ["", "", "", "", ""],
    'text = "a\\"?"; y = "\\\n%z"\n': ["", ""],
    "cd repo\n": ["cd repo"],
    "pip install torch\n": ["pip install torch"],
    "\nls\n": ["", ""],
    "loss = await train()\nasync with a: pass\n": ["", ""],
    "%%time\nx = 1\n!ls\n": ["%%time", "", "!ls"],
    "\n%%bash\nfor f in *; do\n": ["", "%%bash", "for f in *; do"],
    "  x = 1\n  y = 2\n": ["", ""],
    ",print a\n/print b\n": [",print a", "/print b"],
    "": [],
}


@pytest.mark.parametrize("text", CELLS)
def test_a_cell_is_read_as_jupyter_runs_it(text):
    cell = read_cell(text)
    assert cell.problem is None
    assert cell.shell == CELLS[text]
    assert len(cell.code) == len(CELLS[text])
    ast.parse("\n".join(cell.code))


def test_a_trap_between_commands_of_a_notebook(tmp_path):
    cells = ["!python train.py \\\n    --amp\n", "cd repo\n", "model?\n%run a.py \\\n  -b\n", TRAP, "await main()\n"]
    text = notebook(*cells)
    (tmp_path / "n.ipynb").write_text(text)
    found = {f.name: f for f in scan(tmp_path).findings if f.kind != "symbol"}
    assert list(found) == ["wrapped_before_initialize"]
    assert "amp.initialize" in text.splitlines()[found["wrapped_before_initialize"].line - 1]


def test_a_cell_that_does_not_parse_is_left_out(tmp_path):
    text = notebook("x = 1\nprint 'loss'\n", TRAP)
    (tmp_path / "n.ipynb").write_text(text)
    found = {f.name: f for f in scan(tmp_path).findings if f.kind != "symbol"}
    assert {name: f.level for name, f in found.items()} == {
        "wrapped_before_initialize": "error",
        "unparsable_cell": "note",
    }
    assert "print 'loss'" in text.splitlines()[found["unparsable_cell"].line - 1]


def test_folders_of_requirements(tmp_path):
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "train.txt").write_text("torch\napex\n")
    (tmp_path / "requirements" / "README.md").write_text("apex\n")
    assert [(f.path, f.line) for f in scan(tmp_path).findings] == [("requirements/train.txt", 2)]


@pytest.mark.parametrize(
    ("cell", "lines"),
    [
        ("!pip install apex\n", [0]),
        ("import torch\n%pip install torch apex\nx = 1\n", [1]),
        ("if x:\n    !git clone https://github.com/NVIDIA/apex\n    !cd apex && pip install .\n", [1]),
        ("!pip install \\\n  torch \\\n  apex\n", [2]),
        ("pip install apex\n", [0]),
        ("%%bash\ngit clone https://github.com/NVIDIA/apex\npip install -v ./apex\n", [1, 2]),
        ("!pip install torch  # not apex\n", []),
        ("# !pip install apex\n", []),
        ("apex\n!ls apex\n", []),
        ("!pip install apex  # ampcompat: ignore\n", []),
    ],
)
def test_cells_of_a_notebook_that_install_apex(cell, lines, tmp_path):
    text = notebook("import sys\n", cell)
    (tmp_path / "n.ipynb").write_text(text)
    first = text.splitlines().index(next(s for s in text.splitlines() if json.dumps(cell.splitlines(True)[0]) in s)) + 1
    found = [f for f in scan(tmp_path).findings if f.name == "installs_apex"]
    assert [f.line - first for f in found] == lines
    assert all(f.level == "note" for f in found)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 3}', '{"cells": [{"cell_type": "code"}]}', "null"])
def test_a_file_that_is_not_a_notebook(text, tmp_path):
    with pytest.raises(NotANotebook):
        Notebook.read(text)
    (tmp_path / "n.ipynb").write_text(text)
    assert [f.name for f in scan(tmp_path).findings] == ["unreadable"]


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("requirements.txt", "torch\napex\n", [2]),
        ("requirements-dev.txt", "apex==0.1\n# apex\nnapex\n", [1]),
        ("requirements.txt", "git+https://github.com/NVIDIA/apex.git@master\n", [1]),
        ("Dockerfile", "FROM x\nRUN git clone https://github.com/NVIDIA/apex && cd apex\nCOPY apex /x\n", [2]),
        ("Dockerfile.gpu", "RUN pip install -v --no-cache-dir apex\n", [1]),
        ("setup.cfg", "[options]\ninstall_requires =\n    torch\n    apex>=0.1\n", [4]),
        ("pyproject.toml", '[project]\ndependencies = [\n  "apex",\n]\n', [3]),
        ("environment.yml", "dependencies:\n  - nvidia-apex\n", [2]),
        ("pyproject.toml", '[project]\nname = "apex-predators"\n', []),
        ("dev-requirements.txt", "apex\n", [1]),
        ("my_requirements_gpu.txt", "torch\n  apex @ git+https://x\n", [2]),
        ("dev-requirements.in", "apex\n", [1]),
        ("gpu-constraints.txt", "apex==0.1\n", [1]),
        ("Dockerfile", "RUN pip install torch # and apex\nRUN pip install torch && pip3 install apex\n", [2]),
        ("Dockerfile", "RUN pip install \\\n    torch \\\n    # and\n    apex\nCMD x\n", [4]),
        ("Dockerfile", "# pip install apex\nRUN pip install torch && python apex.py; cat apex\n", []),
        ("build.sh", "git clone https://github.com/NVIDIA/apex\ncd apex\npip install .\n", [1]),
        ("scripts/install.sh", "pip install -q \\\n  apex\nexport apex=1\n", [2]),
        ("train.sh", "pip install torch\npython train.py --apex\n", []),
        ("setup.py", "setup(\n    install_requires=[\n        'torch', 'apex>=0.1'],\n    packages=['apex'])\n", [3]),
        ("setup.py", "requirements = ['torch',\n  'git+https://github.com/NVIDIA/apex']\nsetup(name='apex')\n", [2]),
        ("setup.py", "setup(extras_require={'amp': ['apex'], 'all': ['torch']})\n", [1]),
        ("setup.py", "setup(install_requires=['apex-predators'], name='apex')\n", []),
        ("setup.cfg", "[isort]\nknown_third_party =\n    apex\n[options.extras_require]\namp = apex\n", [5]),
        ("pyproject.toml", '[project]\ndependencies = ["torch", "apex>=0.1"]\n[tool.isort]\nknown = ["apex"]\n', [2]),
        ("pyproject.toml", '[project.optional-dependencies]\namp = ["nvidia-apex"]\n', [2]),
        ("pyproject.toml", '[build-system]\nrequires = [\n  "apex",\n]\n', [3]),
        ("pyproject.toml", '[tool.poetry.dependencies]\napex = {git = "https://github.com/NVIDIA/apex"}\n', [2]),
        ("pyproject.toml", '[project]\nname = "apex"\n[project.urls]\nx = "https://github.com/NVIDIA/apex"\n', []),
        ("Pipfile", '[packages]\ntorch = "*"\napex = "*"\n[dev-packages]\n"apex" = {git = "x"}\n', [3, 5]),
        ("environment.yml", "dependencies:\n  - conda-forge::nvidia-apex=0.1\n  - pip:\n    - apex\n", [2, 4]),
    ],
)  # fmt: skip
def test_lines_that_install_apex(name, text, lines, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert [(f.name, f.line) for f in scan(tmp_path).findings] == [("installs_apex", n) for n in lines]


def test_a_file_that_is_not_python(tmp_path, capsys):
    (tmp_path / "README.md").write_text("# A title\n\nfrom apex import amp, in words\n")
    status, shown = run(capsys, tmp_path / "README.md")
    assert status == 1
    assert "not_python" in shown.out
    (tmp_path / "script").write_text("import apex.RNN\n")
    assert run(capsys, tmp_path / "script")[0] == 1


@pytest.mark.parametrize(
    ("comment", "left"),
    [
        ("", {"wrapped_before_initialize", "apex.amp.initialize"}),
        ("# ampcompat: ignore", set()),
        ("#ampcompat:ignore - the model is unwrapped in it", set()),
        ("# ampcompat: ignored", {"wrapped_before_initialize", "apex.amp.initialize"}),
    ],
)
def test_a_comment_ignores_its_line(comment, left):
    code = f"from apex import amp\namp.initialize(DistributedDataParallel(model), o)  {comment}\n"
    assert {f.name for f in scan_source(code) if f.line == 2} == left


def test_a_file_that_does_not_parse_fails_the_check(tmp_path, capsys):
    (tmp_path / "x.py").write_text("print 'loss'\n")
    for path in (tmp_path, tmp_path / "x.py"):
        status, shown = run(capsys, path)
        assert status == 1
        assert "x.py:1:1: unparsable" in shown.out
