"""The page docs/architecture.md, and heads of modules, say what is in the code: its tables, modules, functions."""

import ast
import importlib
import inspect
import re
import runpy
from pathlib import Path

from internals import fields_of_state
from layers import ORDER

from ampcompat.amp.scaling import loss_scale

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


def callers_of(method):
    """Each function of the core that calls ``method`` of an object: its name after its class, or else its module."""
    for path in sorted((HERE.parents[1] / "ampcompat" / "amp").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        holders = [(path.stem, tree), *((node.name, node) for node in tree.body if isinstance(node, ast.ClassDef))]
        for holder, body in holders:
            for function in body.body:
                if not isinstance(function, ast.FunctionDef):
                    continue
                called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                if any(isinstance(each, ast.Attribute) and each.attr == method for each in called):
                    yield f"{holder}.{function.name}"


def test_the_head_of_the_loss_scale_lists_what_moves_it():
    listed = re.findall(r"^``(\w+\.\w+)``  ", loss_scale.__doc__, re.MULTILINE)
    assert set(callers_of("adjust")) == set(listed)
    assert set(callers_of("_move")) == {"MovingScale.adjust"}
