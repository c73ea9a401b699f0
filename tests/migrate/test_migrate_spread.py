"""Code spread over modules: right and run, or marked where it is."""

import ast

import pytest
from spread_shapes import MARKED, PLAIN, RIGHT

from ampcompat.migrate.tree import migrate_tree
from ampcompat.migrate.verify import Options, copies, run, verdict

#: Each is two trainings in processes of their own: one by default, all nightly.
FIRST, *OTHERS = RIGHT


def written(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return list(migrate_tree(folder, "native"))


def left(changes):
    return {change.name: change.todos for change in changes if change.todos}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_marked(name, tmp_path):
    changes = written(tmp_path, RIGHT[name])
    assert left(changes) == {}
    assert any(change.changed for change in changes)


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_what_is_not_marked_trains_like_the_original(name, tmp_path):
    changes = written(tmp_path / "root", RIGHT[name])
    before, after = copies(tmp_path / "root", changes, tmp_path / "copies")
    options = Options(["train.py"], steps=4, timeout=240)
    one = run(before, options, tmp_path / "before.jsonl", native=False)
    other = run(after, options, tmp_path / "after.jsonl", native=True)
    result = verdict(one, other)
    assert result.passed, "\n".join([*result.lines, other.output])
    assert len(one.steps) == 4


@pytest.mark.parametrize("name", MARKED)
def test_what_cannot_be_shown_is_marked_in_its_file(name, tmp_path):
    place, files = MARKED[name]
    changes = written(tmp_path, files)
    assert left(changes)
    if name != "initialize, the block and the step in three modules":  # there the two others say it
        assert place in left(changes)
    for change in changes:
        ast.parse(change.text())


@pytest.mark.parametrize("name", MARKED)
def test_a_second_run_changes_nothing(name, tmp_path):
    for change in written(tmp_path, MARKED[name][1]):
        if change.changed:
            change.write()
    assert [change.name for change in migrate_tree(tmp_path, "native") if change.changed] == []


@pytest.mark.parametrize("name", PLAIN)
def test_look_alikes_are_left_alone(name, tmp_path):
    assert "other.py" not in left(written(tmp_path, PLAIN[name]))
