"""The page docs/architecture.md says what is in the code: its tables, modules, functions."""

import importlib
import inspect
import re
import runpy
from pathlib import Path

from internals import fields_of_state
from layers import ORDER

HERE = Path(__file__).parent
PAGE = runpy.run_path(str(HERE.parents[1] / "docs" / "architecture.py"))


def test_generated_parts_of_the_page_are_up_to_date():
    assert PAGE["PAGE"].read_text(encoding="utf-8") == PAGE["page"](), "python docs/architecture.py writes them"


def test_the_tables_in_docstrings_are_those_of_the_data():
    for path, source in PAGE["modules_with_tables"]().items():
        assert path.read_text(encoding="utf-8") == source, "python docs/architecture.py writes them"


def test_the_page_lists_the_modules_of_a_package_in_their_order():
    text = PAGE["PAGE"].read_text(encoding="utf-8")
    section = text[text.index("## The modules") : text.index("### Around the core")]
    for package, order in ORDER.items():
        assert re.findall(rf"`{package}/(\w+)\.py`", section) == list(order)


def test_the_page_names_functions_that_there_are():
    text = PAGE["PAGE"].read_text(encoding="utf-8")
    story = "\n".join(
        re.findall("^  .*", text[text.index("## One step at O2") : text.index("### Which state changes when")], re.M)
    )
    modules = {path.stem: path.relative_to(PAGE["AMP"]).with_suffix("").parts for path in PAGE["AMP"].rglob("*.py")}
    names = re.findall(rf"\b({'|'.join(modules)})\.([A-Za-z_]\w*)(?:\.(\w+))?", story)
    assert names
    for module, name, method in names:
        owner = getattr(importlib.import_module(".".join(("ampcompat.amp", *modules[module]))), name)
        assert not method or hasattr(owner, method), (module, name, method)


def test_each_part_of_the_state_describes_its_fields():
    for part, names in fields_of_state().items():
        assert re.findall(r"^    (\w+): ", inspect.getdoc(part) or "", re.MULTILINE) == names, part
