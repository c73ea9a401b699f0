"""Where the check runs: several paths, notebooks, files that install apex, formats for CI, and what is left out."""

import io
import json
import sys

import pytest

from ampcompat.cli import main
from ampcompat.tools.check import scan, scan_source
from ampcompat.tools.check.config import BadConfig, Config, read_config
from ampcompat.tools.check.documents import NotANotebook, Notebook
from ampcompat.tools.check.traps import FORMER_TRAPS

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
    assert shown.out.startswith(f"{tmp_path / 'README.md'}:1:1: not_python error: is not a Python file\n")
    (tmp_path / "script").write_text("import apex.RNN\n")
    assert run(capsys, tmp_path / "script")[0] == 1


@pytest.mark.parametrize(
    ("comment", "left"),
    [
        ("", {"misspelt_level", "apex.amp.initialize"}),
        ("# ampcompat: ignore", set()),
        ("# ampcompat: ignore[misspelt_level]", {"apex.amp.initialize"}),
        ("# ampcompat: ignore[trap, symbol]", set()),
        ("# ampcompat: ignore[other]", {"misspelt_level", "apex.amp.initialize", "unknown_rule"}),
    ],
)
def test_comments_ignore(comment, left):
    code = f"from apex import amp\namp.initialize(model, o, opt_level='01')  {comment}\n"
    assert {f.name for f in scan_source(code) if f.line == 2} == left


@pytest.mark.parametrize(
    ("comment", "problem"),
    [
        ("# ampcompat: ignore[misspelled_level]", "'misspelled_level' names no rule - did you mean misspelt_level?"),
        (
            "# ampcompat: ignore[trap, zzz]",
            "'zzz' names no rule - name a trap, a symbol of apex",
        ),
        ("# ampcompat: ignore[deepcopy_of_optimizer]", "'deepcopy_of_optimizer' is no longer a rule - plain torch"),
        ("# ampcompat: ignore[misspelt_level, apex.amp]", None),
        ("# ampcompat: ignore", None),
        ("; text = '# ampcompat: ignore[zzz]'", None),
    ],
)
def test_a_comment_that_ignores_an_unknown_rule_is_named(comment, problem):
    code = f"from apex import amp\nx = 1  {comment}\n"
    found = [(f.line, f.level, f.note) for f in scan_source(code) if f.name == "unknown_rule"]
    assert [(line, level) for line, level, _ in found] == ([] if problem is None else [(2, "warning")])
    assert all(note.startswith(problem) for *_, note in found)


def test_findings_one_a_line(tmp_path, capsys, monkeypatch):
    """Each as ``path:line:col: rule verdict: message``, by the path from the working directory."""
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "x.py").write_text(TRAP)
    (tmp_path / "repo" / "y.py").write_text("x = (\n")
    monkeypatch.chdir(tmp_path)
    status, shown = run(capsys, "repo")
    assert status == 1
    assert shown.out.splitlines() == [
        "repo/x.py:2:1: apex.RNN not supported: use torch.nn.LSTM, torch.nn.GRU or torch.nn.RNN",
        "repo/x.py:2:1: apex.amp works",
        "repo/x.py:3:12: apex.amp.initialize works",
        'repo/x.py:3:47: misspelt_level error: opt_level="01" starts with a zero and is refused; write the letter:'
        ' "O1"',
        "repo/y.py:1:1: unparsable error: Python 3 cannot parse the file ('(' was never closed)",
        "2 files: 1 not supported, 2 error, 2 works",
    ]


def test_nothing_found_says_so(tmp_path, capsys):
    (tmp_path / "x.py").write_text("from apex import amp\n")
    assert run(capsys, tmp_path, "--select", "trap")[1].out == "1 file: no findings\n"


def test_a_file_that_does_not_parse_fails_the_check(tmp_path, capsys):
    (tmp_path / "x.py").write_text("print 'loss'\n")
    for path in (tmp_path, tmp_path / "x.py"):
        status, shown = run(capsys, path)
        assert status == 1
        assert "x.py:1:1: unparsable error: Python 3 cannot parse the file (" in shown.out


def test_json_is_a_format(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run(capsys, tmp_path, "--json")
    assert end.value.code == 2
    assert "--json - there is no such option any more - use --format json" in capsys.readouterr().err


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


needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="reading TOML needs Python 3.11")


@needs_toml
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.ampcompat]\ncolour = 3\n", "has no 'colour'; use select, ignore, exclude"),
        ("[tool.ampcompat]\nselect = 'all'\n", "give a list of strings"),
        ("[tool.ampcompat]\nignore = [1]\n", "give a list of strings"),
        ("[tool.ampcompat]\nignore = ['trap', 'apex.contrib', 'nosuchrule']\n", "'nosuchrule' names no rule"),
        ("[tool.ampcompat", "cannot be read"),
        ("[tool.other]\nx =\n", "cannot be read"),
        ("[tool.ampcompat]\nselect = " + 5000 * "[", "cannot be read"),
        ("[[tool.ampcompat]]\n", "is not a table"),
        ("[tool]\nampcompat = 3\n", "is not a table"),
        ("tool = 3\n[tool.ampcompat]\n", "cannot be read"),
    ],
)
def test_a_bad_project_file_is_bad_usage(text, message, tmp_path, capsys):
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(BadConfig):
        read_config([tmp_path])
    status, shown = run(capsys, tmp_path)
    assert (status, shown.out) == (2, "")
    assert shown.err.startswith("ampcompat check: ")
    assert "pyproject.toml" in shown.err
    assert message in shown.err


@needs_toml
@pytest.mark.parametrize("text", ["", "tool = 3\n", "[tool]\nother = 3\n", "[project]\nname = 'ampcompat'\n"])
def test_a_project_file_of_others_is_none_of_ours(text, tmp_path):
    (tmp_path / "pyproject.toml").write_text(text)
    assert read_config([tmp_path]) == Config()


@pytest.mark.parametrize("option", ["--select", "--ignore"])
@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("nosuchrule", "'nosuchrule' names no rule"),
        ("trap,misspelled_level", "did you mean misspelt_level?"),
        ("apexx.amp", "'apexx.amp' names no rule"),
        ("", "no rule is given"),
        (" , ", "no rule is given"),
    ],
)
def test_an_unknown_rule_is_bad_usage(option, rules, message, tmp_path, capsys):
    (tmp_path / "x.py").write_text(TRAP)
    try:
        status = main(["check", str(tmp_path), option, rules])
    except SystemExit as ended:
        status = ended.code
    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    assert message in shown.err


@pytest.mark.parametrize(
    "rule",
    ["symbol", "trap", "file", "error", "unparsable", "installs_apex", "overflowing_fill", "apex.contrib", "amp_C"]
    + ["apex.amp.nonsense", "optimizer._amp_stash"],
)
def test_every_name_of_a_finding_is_a_rule(rule, tmp_path):
    scan(tmp_path, Config().with_options([rule], []))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_on_a_terminal_and_taken_away(tmp_path, capsys, monkeypatch):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
    screen = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", screen)
        patch.setattr("ampcompat.cli.check.FIRST", 0)
        patch.setattr("ampcompat.cli.check.BETWEEN", 0)
        main(["check", str(tmp_path)])
    lines = screen.getvalue().split("\r\x1b[K")
    shown = [f"{what}: {done} of 2 files" for what in ("reading", "looking for traps") for done in (1, 2)]
    assert lines == ["", *shown, ""]
    assert "reading" not in capsys.readouterr().out


def test_progress_is_shown_nowhere_else(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ampcompat.cli.check.FIRST", 0)
    (tmp_path / "a.py").write_text(TRAP)
    assert run(capsys, tmp_path)[1].err == ""


def test_github_annotations(tmp_path, capsys, monkeypatch):
    (tmp_path / "x.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    _, shown = run(capsys, "--format", "github")
    lines = shown.out.splitlines()
    assert len(lines) == 2  # what works is left out
    assert lines[0].startswith("::error file=x.py,line=2,col=1,title=apex.RNN::")
    assert lines[1].startswith("::error file=x.py,line=3,col=47,title=misspelt_level::")


def test_a_format_that_is_gone_names_others(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run(capsys, tmp_path, "--format", "sarif")
    assert end.value.code == 2
    assert "use github for annotations, or json" in capsys.readouterr().err


@pytest.mark.parametrize("rule", FORMER_TRAPS)
def test_a_trap_that_is_gone_names_what_reports_it(rule, tmp_path, capsys):
    status, shown = run(capsys, tmp_path, "--ignore", rule)
    assert status == 2
    assert f"{rule!r} is no longer a rule - {FORMER_TRAPS[rule]}" in shown.err
