"""Where the check runs: several paths, notebooks, files that install apex, formats for CI, and what is left out."""

import json
import sys

import pytest

from ampcompat.check import scan, scan_source
from ampcompat.check.config import BadConfig, Config, read_config
from ampcompat.check.documents import NotANotebook, Notebook, install_lines
from ampcompat.cli import main

TRAP = "import torch\nfrom apex import amp, RNN\nmodel, o = amp.initialize(model, o, opt_level='01')\n"


def notebook(*cells):
    made = [{"cell_type": "markdown", "metadata": {}, "source": ["from apex import amp\n"]}]
    made += [
        {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": c.splitlines(True)}
        for c in cells
    ]
    return json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def run(capsys, *words):
    status = main(["check", *map(str, words)])
    return status, capsys.readouterr()


def test_several_paths_are_one_repository(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text(TRAP)
    (tmp_path / "b.py").write_text("import torch\nfrom x import model\ny = torch.bmm(a, b).masked_fill(m, -1e9)\n")
    status, shown = run(capsys, tmp_path / "a", tmp_path / "b.py", tmp_path / "b.py", "--format", "json")
    report = json.loads(shown.out)
    assert (status, report["files"]) == (1, 2)
    assert {f["path"] for f in report["findings"]} == {(tmp_path / n).as_posix() for n in ("a/x.py", "b.py")}


def test_the_default_is_the_working_directory(tmp_path, capsys, monkeypatch):
    (tmp_path / "x.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    assert run(capsys)[0] == 1


def test_cells_of_a_notebook_are_one_source_at_the_lines_of_the_file(tmp_path):
    text = notebook("%matplotlib inline\nfrom apex import amp\n", "!pip list\nif x:\n    amp.nonsense()\n")
    (tmp_path / "n.ipynb").write_text(text)
    found = {f.name: f.line for f in scan(tmp_path).findings}
    lines = text.splitlines()
    assert "from apex import amp" in lines[found["apex.amp"] - 1]
    assert found["apex.amp"] > 8  # not the text of the markdown cell
    assert "amp.nonsense()" in lines[found["apex.amp.nonsense"] - 1]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 3}', '{"cells": [{"cell_type": "code"}]}', "null"])
def test_what_is_no_notebook_is_said_to_be_none(text, tmp_path):
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
    ],
)
def test_lines_that_install_apex(name, text, lines, tmp_path):
    assert list(install_lines(text)) == lines
    (tmp_path / name).write_text(text)
    assert [(f.name, f.line) for f in scan(tmp_path).findings] == [("installs_apex", n) for n in lines]


def test_a_file_that_is_not_python_is_said_to_be_none(tmp_path, capsys):
    (tmp_path / "README.md").write_text("# A title\n\nfrom apex import amp, in words\n")
    status, shown = run(capsys, tmp_path / "README.md")
    assert status == 0
    assert "is not a Python file" in shown.out
    (tmp_path / "script").write_text("import apex.RNN\n")
    assert run(capsys, tmp_path / "script")[0] == 1


@pytest.mark.parametrize(
    ("comment", "left"),
    [
        ("", {"misspelt_level", "apex.amp.initialize"}),
        ("# ampcompat: ignore", set()),
        ("# ampcompat: ignore[misspelt_level]", {"apex.amp.initialize"}),
        ("# ampcompat: ignore[trap, symbol]", set()),
        ("# ampcompat: ignore[other]", {"misspelt_level", "apex.amp.initialize"}),
    ],
)
def test_comments_ignore(comment, left):
    code = f"from apex import amp\namp.initialize(model, o, opt_level='01')  {comment}\n"
    assert {f.name for f in scan_source(code) if f.line == 2} == left


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--select", "misspelt_level"], {"misspelt_level"}),
        (["--select", "apex"], {"apex.RNN", "apex.amp", "apex.amp.initialize"}),
        (["--ignore", "apex.RNN,trap"], {"apex.amp", "apex.amp.initialize"}),
        (["--select=trap", "--ignore=misspelt_level"], set()),
    ],
)
def test_rules_are_chosen(words, left, tmp_path, capsys):
    (tmp_path / "x.py").write_text(TRAP)
    status, shown = run(capsys, tmp_path, "--format", "json", *words)
    assert {f["name"] for f in json.loads(shown.out)["findings"]} == left
    assert status == int(bool(left & {"misspelt_level", "apex.RNN"}))


def test_the_project_file_chooses_too(tmp_path, capsys):
    (tmp_path / "package" / "old").mkdir(parents=True)
    (tmp_path / "package" / "x.py").write_text(TRAP)
    (tmp_path / "package" / "old" / "y.py").write_text(TRAP)
    (tmp_path / "pyproject.toml").write_text('[tool.ampcompat]\nignore = ["apex.RNN"]\nexclude = ["package/old"]\n')
    if sys.version_info >= (3, 11):
        assert read_config([tmp_path / "package"]) == Config(ignore=("apex.RNN",), exclude=("package/old",))
        _, shown = run(capsys, tmp_path, "--format", "json")
        report = json.loads(shown.out)
        assert "apex.RNN" not in {f["name"] for f in report["findings"]}
        assert {f["path"] for f in report["findings"]} == {"package/x.py"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="reading TOML needs Python 3.11")
@pytest.mark.parametrize("table", ["colour = 3", "select = 'all'", "ignore = [1]", "select = ["])
def test_a_bad_project_file_is_bad_usage(table, tmp_path, capsys):
    (tmp_path / "pyproject.toml").write_text(f"[tool.ampcompat]\n{table}\n")
    with pytest.raises(BadConfig):
        read_config([tmp_path])
    assert run(capsys, tmp_path)[0] == 2


def test_github_annotations(tmp_path, capsys, monkeypatch):
    (tmp_path / "x.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    _, shown = run(capsys, "--format", "github")
    lines = shown.out.splitlines()
    assert len(lines) == 2  # what works is no annotation
    assert lines[0].startswith("::error file=x.py,line=2,col=1,title=apex.RNN::")
    assert lines[1].startswith("::error file=x.py,line=3,col=47,title=misspelt_level::")


def test_sarif(tmp_path, capsys):
    (tmp_path / "x.py").write_text(TRAP)
    _, shown = run(capsys, tmp_path, "--format", "sarif")
    log = json.loads(shown.out)
    (only,) = log["runs"]
    assert log["version"] == "2.1.0"
    assert {rule["id"] for rule in only["tool"]["driver"]["rules"]} == {"apex.RNN", "misspelt_level"}
    place = only["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"].endswith("/x.py")
    assert place["region"]["startLine"] == 2
