"""Rooms of ``ampcompat/amp`` import lower rooms only, lazy imports included; no modules import in a circle."""

import runpy
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from ampcompat import amp

ROOT = Path(__file__).parents[2]
ROOMS = runpy.run_path(str(ROOT / "docs" / "rooms.py"))
ROW = {name: index for index, row in enumerate(ROOMS["ROWS"]) for name in row}


@cache
def imports():
    return ROOMS["imports"]()


def named(one):
    return f"{one.source} imports {one.target}" + (" lazily" if one.lazy else "")


def test_every_room_has_one_place_and_every_place_a_room():
    names = [name for row in ROOMS["ROWS"] for name in row]
    rooms = {ROOMS["room_of"](module) for module in ROOMS["modules"]()} - {None}
    assert sorted(names) == sorted(rooms)


def test_boxes_neither_overlap_nor_leave_the_picture():
    for row in ROOMS["ROWS"]:
        places = sorted(row.values())
        assert 0 <= places[0] <= places[-1] <= 6
        assert all(right - left > 0.92 for left, right in zip(places, places[1:], strict=False)), row


def test_rooms_import_lower_rooms_only():
    upward = []
    for one in imports():
        source, target = ROOMS["room_of"](one.source), ROOMS["room_of"](one.target)
        if None not in (source, target) and source != target and ROW[target] >= ROW[source]:
            upward.append(named(one))
    assert upward == []


def test_rooms_import_nothing_above_them_and_the_facade_what_it_may():
    upward, facade = [], set()
    for one in imports():
        source = ROOMS["room_of"](one.source)
        if source is None or ROOMS["room_of"](one.target) is not None or one.target == "ampcompat":
            continue
        package = one.target.split(".")[1]
        if source == "__init__" and one.lazy and package in ROOMS["FACADE_MAY_IMPORT"]:
            facade.add(package)
        else:
            upward.append(named(one))
    assert upward == []
    assert facade | set(amp._TOOLS.values()) == ROOMS["FACADE_MAY_IMPORT"]


def test_importing_the_package_imports_none_of_its_modules():
    assert [named(one) for one in imports() if one.source == "ampcompat" and not one.lazy] == []


def test_no_modules_import_in_a_circle():
    graph = {name: set() for name in ROOMS["modules"]()}
    for one in imports():
        # The facade looks up for its users only, from inside functions: see above.
        if one.source != "ampcompat.amp" or not one.lazy:
            graph[one.source].add(one.target)
    TopologicalSorter(graph).prepare()


def test_imports_of_every_kind_are_found(tmp_path):
    made = {
        "__init__": "",
        "low": "",
        "top": "import p.low\n",
        "names": "from p import low\nfrom p.low import thing\n",
        "relative": "from . import low\nfrom .low import thing\n",
        "lazy": "def f():\n    from p import low\n",
        "conditional": "import os\nif os.environ:\n    import importlib\n    importlib.import_module('p.low')\n",
        "types": "if typing.TYPE_CHECKING:\n    from p import low\nelse:\n    import p.top\n",
    }
    for name, text in made.items():
        (tmp_path / "p").mkdir(exist_ok=True)
        (tmp_path / "p" / f"{name}.py").write_text(text)
    known = {f"p.{name}": tmp_path / "p" / f"{name}.py" for name in made if name != "__init__"}
    known["p"] = tmp_path / "p" / "__init__.py"
    read = ROOMS["imports"].__globals__
    before = read["modules"]
    read["modules"] = lambda: known
    try:
        found = {(one.source, one.target, one.lazy) for one in ROOMS["imports"]() if one.target != "p"}
    finally:
        read["modules"] = before
    low = {
        (f"p.{name}", "p.low", name in ("lazy", "conditional"))
        for name in made
        if name not in ("__init__", "low", "types")
    }
    assert found == low | {("p.types", "p.top", False)}


def test_a_circle_would_be_found():
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()


def test_the_picture_is_what_the_imports_say(monkeypatch):
    monkeypatch.setitem(ROOMS["picture"].__globals__, "imports", imports)  # read once
    assert ROOMS["PICTURE"].read_text(encoding="utf-8") == ROOMS["picture"](), "python docs/rooms.py draws it"
