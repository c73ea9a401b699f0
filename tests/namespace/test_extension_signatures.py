"""The compiled extensions: what is served has the original's parameters, and what is not says so.

``tests/data/extensions.json`` lists what apex's extensions bound.
"""

import importlib
import importlib.util
import inspect
import json
import runpy
from pathlib import Path

import pytest

from ampcompat.alias import install_as_apex
from ampcompat.tools.check.symbols import verdict

TABLE = json.loads((Path(__file__).parents[1] / "data" / "extensions.json").read_text(encoding="utf-8"))["modules"]
SERVED = [module for module in TABLE if importlib.util.find_spec(f"ampcompat.{module}")]
FUNCTIONS = [(module, function) for module in SERVED for function in TABLE[module]]
IS_SERVED = {
    (module, function): hasattr(importlib.import_module(f"ampcompat.{module}"), function)
    for module, function in FUNCTIONS
}


def test_the_extensions_that_scripts_choose_by_are_served():
    assert {"amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda"} <= set(SERVED)


@pytest.mark.parametrize(("module", "function"), [key for key, is_served in IS_SERVED.items() if is_served])
def test_parameters_are_the_originals(module, function):
    served = getattr(importlib.import_module(f"ampcompat.{module}"), function)
    parameters = inspect.signature(served).parameters.values()
    assert [parameter.name for parameter in parameters] == TABLE[module][function]
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert verdict(f"{module}.{function}").verdict == "works"


@pytest.mark.parametrize("module", SERVED)
def test_nothing_is_served_that_the_original_lacked(module):
    served = importlib.import_module(f"ampcompat.{module}")
    assert set(served.__all__) == {function for function in TABLE[module] if hasattr(served, function)}


@pytest.mark.parametrize(("module", "function"), [key for key, is_served in IS_SERVED.items() if not is_served])
def test_what_is_not_served_raises(module, function):
    with pytest.raises(AttributeError, match=f"{module}.{function} - ampcompat does not supply it - use "):
        getattr(importlib.import_module(f"ampcompat.{module}"), function)
    assert verdict(f"{module}.{function}").verdict == "unsupported"


@pytest.mark.parametrize("module", sorted(set(TABLE) - set(SERVED)))
def test_a_module_that_is_not_served_is_not_found(module):
    install_as_apex()
    assert importlib.util.find_spec(module) is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(module)
    assert verdict(module).verdict == "unsupported"


def test_the_page_lists_what_is_there():
    page = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "namespace.py"))
    assert page["PAGE"].read_text(encoding="utf-8") == page["page"](), "python docs/namespace.py writes it"
    served = {(module, function) for module in SERVED for function in page["supplied"](module)}
    assert served == {key for key, is_served in IS_SERVED.items() if is_served}


def test_every_function_of_amp_C_is_served():
    """Scripts ask for ``amp_C`` as a whole: by import."""
    assert [function for function in TABLE["amp_C"] if not IS_SERVED["amp_C", function]] == []
