"""Notebooks and files that install apex are migrated too; many files go over processes; a summary says what is next."""

import json

import pytest

from ampcompat.check import workers as workers_module
from ampcompat.cli import main
from ampcompat.migrate.tree import migrate_tree

CELLS = [
    "%matplotlib inline\nimport torch\nfrom apex import amp\n",
    "model, opt = amp.initialize(model, opt)",
    "x = 1\n!ls",
]
LOOP = (
    "for x in data:\n    opt.zero_grad()\n    loss = model(x).mean()\n"
    "    with amp.scale_loss(loss, opt) as scaled:\n        scaled.backward()\n    opt.step()\n"
)


def notebook(*cells):
    made = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": c.splitlines(True)} for c in cells]
    made.insert(0, {"cell_type": "markdown", "metadata": {}, "source": ["Text é\n"]})
    return (
        json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1, ensure_ascii=False)
        + "\n"
    )


def cells(text):
    return ["".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "code"]


def test_notebooks_are_migrated_cell_by_cell(tmp_path):
    (tmp_path / "n.ipynb").write_text(notebook(*CELLS))
    (change,) = migrate_tree(tmp_path)
    assert cells(change.new) == [CELLS[0].replace("apex", "ampcompat").rstrip("\n"), *CELLS[1:]]
    changed = [line for line in change.diff().splitlines() if line.startswith(("+ ", "- "))]
    assert len(changed) == 2  # only what changed


def test_a_notebook_is_translated_to_torch(tmp_path):
    (tmp_path / "n.ipynb").write_text(notebook(*CELLS, LOOP))
    (change,) = migrate_tree(tmp_path, "native")
    assert (change.problem, change.todos) == ("", [])
    assert "apex" not in change.new
    assert "scaler.step(opt)" in cells(change.new)[3]


def test_a_region_over_two_cells_is_left_alone(tmp_path):
    before = notebook(
        *CELLS,
        "opt.zero_grad()\nout = model(x)",
        "loss = crit(out)\n"
        + LOOP[LOOP.index("    with") :]
        .replace("    with", "with")
        .replace("        s", "    s")
        .replace("    opt", "opt"),
    )
    (tmp_path / "n.ipynb").write_text(before)
    (change,) = migrate_tree(tmp_path, "native")
    assert "two cells" in change.problem
    assert not change.changed


@pytest.mark.parametrize(
    ("name", "before", "ours", "native"),
    [
        ("requirements.txt", "torch\napex==0.1\n", "torch\nampcompat\n", "torch\n"),
        ("requirements.txt", "git+https://github.com/NVIDIA/apex\n", "ampcompat\n", ""),
        ("requirements.txt", "torch\n", "torch\n", "torch\n"),
    ],
)
def test_requirements(name, before, ours, native, tmp_path):
    (tmp_path / name).write_text(before)
    for to, expected in (("ampcompat", ours), ("native", native)):
        (change,) = migrate_tree(tmp_path, to)
        assert (change.new, change.todos) == (expected, [])


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("Dockerfile", "FROM x\nRUN git clone https://github.com/NVIDIA/apex\n"),
        ("setup.cfg", "[options]\ninstall_requires =\n    apex\n    torch\n"),
        ("pyproject.toml", '[project]\ndependencies = [\n  "apex",\n]\n'),
    ],
)
def test_other_ways_to_install_it(name, before, tmp_path):
    (tmp_path / name).write_text(before)
    (change,) = migrate_tree(tmp_path)
    (tmp_path / name).write_text(change.new)
    (again,) = migrate_tree(tmp_path)
    assert again.new == change.new
    # Marked once, or replaced where a line asks for nothing else.
    assert len(change.todos) == 1 or "ampcompat" in change.new


def test_several_paths_and_a_summary(tmp_path, capsys):
    (tmp_path / "a.py").write_text("from apex import amp\n")
    (tmp_path / "b.py").write_text("from apex import RNN\n")
    (tmp_path / "c.py").write_text("x = 1\n")
    paths = [str(tmp_path / name) for name in ("a.py", "b.py", "c.py")]
    assert main(["migrate", *paths]) == 1
    shown = capsys.readouterr()
    assert "2 of 3 files would change, 1 places need you" in shown.err
    assert f"next: ampcompat migrate --to ampcompat --write {' '.join(paths)}" in shown.err
    assert main(["migrate", "--write", *paths]) == 1
    shown = capsys.readouterr()
    assert "2 of 3 files changed" in shown.err
    assert "next: grep" in shown.err


def test_a_file_that_is_not_python_is_said_to_be_none(tmp_path, capsys):
    (tmp_path / "README.md").write_text("# Title\n\nfrom apex import amp, in words\n")
    assert main(["migrate", str(tmp_path / "README.md")]) == 1
    assert "README.md: is not a Python file" in capsys.readouterr().err


def test_over_processes_the_order_and_the_result_are_the_same(tmp_path, monkeypatch):
    for i in range(12):
        (tmp_path / f"m{i:02}.py").write_text(f"from apex import amp\nx = {i}\n")
    alone = list(migrate_tree(tmp_path))
    monkeypatch.setattr(workers_module, "FEW", 2)
    monkeypatch.setattr(workers_module.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert list(migrate_tree(tmp_path)) == alone


def test_a_terminal_sees_how_far_it_is(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1\n")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    main(["migrate", str(tmp_path)])
    assert "1 of 1 files" in capsys.readouterr().err
