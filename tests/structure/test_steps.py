"""One training step goes through no more functions and files than ``figures.json`` has, by a fifth at most."""

import importlib
import json
import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

from ampcompat._state import State

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "figures.json").read_text(encoding="utf-8"))
CALL_PATHS = list(RECORDED["before"])
PAGE = runpy.run_path(str(HERE.parents[1] / "docs" / "architecture.py"))


@pytest.fixture(scope="module")
def measured():
    return PAGE["figures"]()


@pytest.mark.parametrize("path", CALL_PATHS)
def test_a_call_path_is_hardly_longer_than_recorded(measured, path):
    # A shorter one passes: python docs/architecture.py --measure records it.
    longer = {unit: (count, measured[path][unit]) for unit, count in RECORDED["after"][path].items()}
    assert {unit: pair for unit, pair in longer.items() if pair[1] > 1.2 * pair[0]} == {}


@pytest.mark.parametrize("path", CALL_PATHS)
def test_a_call_path_is_shorter_than_it_was(path):
    assert RECORDED["after"][path].keys() == RECORDED["before"][path].keys()
    assert all(count < RECORDED["before"][path][unit] for unit, count in RECORDED["after"][path].items())


def test_calls_functions_files_and_moves_are_counted():
    call_path = runpy.run_path(str(HERE / "call_path.py"))
    frames = []
    for file in ("a.py", "b.py", "a.py", "c.py"):
        space = {}
        exec(compile("def f(inner):\n    return inner()", call_path["OWN"] + file, "exec"), space)
        frames.append(space["f"])
    a, b, again, c = frames
    path = call_path["CallPath"]()
    with path:
        a(lambda: b(lambda: again(lambda: again(int))))
        c(int)
    assert path.figures() == {"calls": 5, "functions": 3, "files": 3, "moves": 4}


def test_generated_parts_of_the_page_are_up_to_date():
    assert PAGE["PAGE"].read_text(encoding="utf-8") == PAGE["page"](), "python docs/architecture.py writes them"


def test_the_tables_in_docstrings_are_those_of_the_data():
    for path, source in PAGE["modules_with_tables"]().items():
        assert path.read_text(encoding="utf-8") == source, "python docs/architecture.py writes them"


def test_the_page_names_functions_and_fields_that_there_are():
    text = PAGE["PAGE"].read_text(encoding="utf-8")
    story = "\n".join(
        re.findall("^  .*", text[text.index("## One step at O2") : text.index("### Which state changes when")], re.M)
    )
    modules = "|".join(path.stem for path in PAGE["AMP"].glob("*.py"))
    names = re.findall(rf"\b({modules})\.([A-Za-z_]\w*)(?:\.(\w+))?", story)
    assert len(names) > 40
    for module, name, method in names:
        owner = getattr(importlib.import_module(f"ampcompat.amp.{module}"), name)
        assert not method or hasattr(owner, method), (module, name, method)
    table = text[text.index("## Process-wide state") : text.index("## What an exception leaves behind")]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [field.name for field in fields(State)]
