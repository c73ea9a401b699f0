"""Modules of ``ampcompat/amp`` import lower layers only, lazily and for types too; no modules import in a circle."""

from functools import cache
from graphlib import CycleError, TopologicalSorter

import layers
import pytest
from layers import FACADE_MAY_IMPORT, LAYERS, ORDER, layered_name

from ampcompat import amp

LEVEL = {name: index for index, layer in enumerate(LAYERS) for name in layer}


@cache
def imports():
    return layers.imports()


def described(one):
    return f"{one.source} imports {one.target} {one.kind}"


def test_every_module_is_in_one_layer():
    names = [name for layer in LAYERS for name in layer]
    modules = {layered_name(module) for module in layers.modules()} - {None}
    assert sorted(names) == sorted(modules)


def test_modules_import_lower_layers_only():
    upward = []
    for one in imports():
        source, target = layered_name(one.source), layered_name(one.target)
        if None in (source, target) or source == target:
            continue
        if LEVEL[target] >= LEVEL[source]:
            upward.append(described(one))
    assert upward == []


def test_the_state_knows_no_other_module():
    """Each module adds the part of the state that it owns: the state names none of them, lazily or for types either."""
    assert [described(one) for one in imports() if one.source == "ampcompat._state"] == []


@pytest.mark.parametrize("package", ORDER)
def test_modules_of_a_package_import_those_before_them_only(package):
    order = [f"ampcompat.amp.{package}.{name}" for name in ORDER[package]]
    there = [name for name in layers.modules() if name.startswith(f"ampcompat.amp.{package}.")]
    assert sorted(order) == sorted(there)
    backward = []
    for one in imports():
        if one.source in order and one.target in order and order.index(one.target) > order.index(one.source):
            backward.append(described(one))
    assert backward == []


def test_amp_imports_nothing_above_but_in_its_facade():
    upward, facade = [], set()
    for one in imports():
        source = layered_name(one.source)
        if source is None or layered_name(one.target) is not None or one.target == "ampcompat":
            continue
        tool = one.target.removeprefix("ampcompat.tools.").split(".")[0]
        if one.kind == "for types":
            continue
        if source == "__init__" and one.kind == "lazily" and tool in FACADE_MAY_IMPORT:
            facade.add(tool)
        else:
            upward.append(described(one))
    assert upward == []
    assert facade | set(amp._TOOLS.values()) == FACADE_MAY_IMPORT


def test_tools_that_observe_a_run_read_the_core_through_one_module():
    found = []
    for one in imports():
        observes = one.source.startswith(("ampcompat.tools.", "ampcompat.testing.parity"))
        observes = observes and one.source.split(".")[2] not in ("check", "core", "migrate", "selftest")
        if observes and one.kind != "for types" and one.target.startswith(("ampcompat.amp", "ampcompat._state")):
            found.append(described(one))
    assert found == []


def test_the_package_imports_none_of_its_modules():
    assert [described(one) for one in imports() if one.source == "ampcompat" and one.kind == "at import"] == []


def test_no_modules_import_in_a_circle():
    graph = {name: set() for name in layers.modules()}
    for one in imports():
        # The facade looks up for its users only, from inside functions: see above.
        is_of_facade = one.source == "ampcompat.amp" and one.kind == "lazily"
        # So does the package itself: its types name what it looks up.
        is_of_the_package = one.source == "ampcompat" and one.kind == "for types"
        if is_of_facade or is_of_the_package:
            continue
        graph[one.source].add(one.target)
    TopologicalSorter(graph).prepare()


def test_a_picture_of_a_circle_is_refused_by_name():
    with pytest.raises(CycleError, match="'half', 'casts', 'half'|'casts', 'half', 'casts'"):
        layers.without_implied({"half": {"casts"}, "casts": {"half"}})


def test_imports_of_every_kind_are_found(tmp_path, monkeypatch):
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
    monkeypatch.setattr(layers, "modules", lambda: known)
    found = {(one.source, one.target, one.kind) for one in layers.imports() if one.target != "p"}
    assert found == {
        ("p.top", "p.low", "at import"),
        ("p.names", "p.low", "at import"),
        ("p.relative", "p.low", "at import"),
        ("p.lazy", "p.low", "lazily"),
        ("p.conditional", "p.low", "lazily"),
        ("p.types", "p.low", "for types"),
        ("p.types", "p.top", "at import"),
    }
