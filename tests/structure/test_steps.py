"""One training step goes through no more functions and files than ``figures.json`` has, by a fifth at most."""

import importlib
import json
import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from ampcompat._state import State

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "figures.json").read_text(encoding="utf-8"))
WAYS = [name for name in RECORDED["before"] if name != "amp"]
PAGE = runpy.run_path(str(HERE.parents[1] / "docs" / "architecture.py"))


@pytest.fixture(scope="module")
def measured(warm_python):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm_python.executable)
        return PAGE["figures"]()


@pytest.mark.parametrize("way", WAYS)
def test_the_way_is_no_longer_than_recorded(measured, way):
    # Fewer is well: python docs/architecture.py --measure records it.
    longer = {unit: (count, measured[way][unit]) for unit, count in RECORDED["after"][way].items()}
    assert {unit: pair for unit, pair in longer.items() if pair[1] > 1.2 * pair[0]} == {}


@pytest.mark.parametrize("way", WAYS)
def test_the_way_is_shorter_than_it_was(way):
    assert RECORDED["after"][way].keys() == RECORDED["before"][way].keys()
    assert all(count < RECORDED["before"][way][unit] for unit, count in RECORDED["after"][way].items())


def test_the_walk_counts_calls_functions_files_and_moves():
    walk = runpy.run_path(str(HERE / "walk.py"))
    frames = []
    for file in ("a.py", "b.py", "a.py", "c.py"):
        space = {}
        exec(compile("def f(inner):\n    return inner()", walk["OWN"] + file, "exec"), space)
        frames.append(space["f"])
    a, b, again, c = frames
    way = walk["Way"]()
    with way:
        a(lambda: b(lambda: again(lambda: again(int))))
        c(int)
    assert way.figures() == {"calls": 5, "functions": 3, "files": 3, "moves": 4}


def test_the_generated_parts_of_the_page_are_what_the_sources_say():
    assert PAGE["PAGE"].read_text(encoding="utf-8") == PAGE["page"](), "python docs/architecture.py writes them"


def test_the_page_names_functions_and_fields_that_there_are():
    text = PAGE["PAGE"].read_text(encoding="utf-8")
    way = "\n".join(
        re.findall("^  .*", text[text.index("## One step") : text.index("## One optimizer's gradients")], re.M)
    )
    rooms = "|".join(path.stem for path in PAGE["AMP"].glob("*.py"))
    names = re.findall(rf"\b({rooms})\.([A-Za-z_]\w*)(?:\.(\w+))?", way)
    assert len(names) > 40
    for room, name, method in names:
        owner = getattr(importlib.import_module(f"ampcompat.amp.{room}"), name)
        assert not method or hasattr(owner, method), (room, name, method)
    table = text[text.index("## Process-wide state") : text.index("## What an exception leaves behind")]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [field.name for field in fields(State)]
