"""Code spread over modules: right (``test_migrate_verify.py`` trains it), or marked where it is."""

import ast

import pytest
from spread_shapes import MARKED, PLAIN, RIGHT

from ampcompat.tools.migrate.tree import migrate_tree


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


@pytest.mark.parametrize("name", MARKED)
def test_what_cannot_be_shown_is_marked_in_its_file(name, tmp_path):
    place, files = MARKED[name]
    changes = written(tmp_path, files)
    assert left(changes)
    if name != "initialize, the block and the step in three modules":  # there the two others say it
        assert place in left(changes)
    for change in changes:
        ast.parse(change.new or change.source() or "")


@pytest.mark.parametrize("name", MARKED)
def test_a_second_run_changes_nothing(name, tmp_path):
    for change in written(tmp_path, MARKED[name][1]):
        if change.changed:
            change.write()
    assert [change.name for change in migrate_tree(tmp_path, "native") if change.changed] == []


@pytest.mark.parametrize("name", PLAIN)
def test_look_alikes_are_left_alone(name, tmp_path):
    assert "other.py" not in left(written(tmp_path, PLAIN[name]))
