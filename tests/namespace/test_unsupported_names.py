"""Packages of apex that ampcompat has not: they import, and what is taken out of them names its replacement."""

import importlib
import importlib.util
import sys

import pytest
from internals import reset

from ampcompat import install_as_apex

PACKAGES = ["contrib", "RNN", "mlp", "transformer", "fused_dense", "reparameterization", "pyprof"]


STATEMENTS = [
    ("from ampcompat.contrib.multihead_attn import SelfMultiheadAttn", "scaled_dot_product_attention"),
    ("from ampcompat.contrib import multihead_attn", "scaled_dot_product_attention"),
    ("import ampcompat.contrib.sparsity", "torch.ao.pruning"),
    ("from ampcompat.RNN import LSTM", "torch.nn.LSTM"),
    ("import ampcompat.transformer.parallel_state", "torch.distributed"),
    ("from ampcompat.contrib.optimizers.distributed_fused_adam import X", "ZeroRedundancyOptimizer"),
    ("from ampcompat.contrib.optimizers import DistributedFusedAdam", "ZeroRedundancyOptimizer"),
    ("from ampcompat.contrib import unknown", "plain torch modules"),
]


@pytest.fixture(autouse=True)
def packages_not_yet_imported():
    before = {name: module for name, module in sys.modules.items() if _is_of_a_package(name)}
    for name in before:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if _is_of_a_package(name)]:
        del sys.modules[name]
    sys.modules.update(before)  # other tests pickle the classes that they have imported from these
    for name, module in before.items():
        parent, _, attribute = name.rpartition(".")
        setattr(sys.modules[parent], attribute, module)


def _is_of_a_package(name):
    return name.startswith("ampcompat.") and name.split(".")[1] in PACKAGES


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_import(name):
    importlib.import_module(f"ampcompat.{name}")


@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize(("statement", "replacement"), STATEMENTS)
def test_use_names_the_replacement(statement, replacement, alias):
    if alias:
        install_as_apex()
        statement = statement.replace("ampcompat", "apex")
    with pytest.raises(ImportError, match=replacement) as caught:
        exec(statement, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("package", ["ampcompat", "apex"])
def test_a_probe_finds_nothing_and_is_told_nothing(package):
    install_as_apex()
    for name in ("contrib.unknown", "contrib.sparsity", "RNN.LSTM", "transformer.parallel_state"):
        parent, _, attribute = f"{package}.{name}".rpartition(".")
        assert importlib.util.find_spec(f"{package}.{name}") is None
        assert not hasattr(importlib.import_module(parent), attribute)


def test_attribute_use_gets_the_advice_too():
    contrib = importlib.import_module("ampcompat.contrib")
    with pytest.raises(AttributeError, match=r"apex\.contrib\.sparsity.*torch\.ao\.pruning"):
        contrib.sparsity.ASP  # noqa: B018


def test_reset_takes_the_finder_away():
    before = list(sys.meta_path)
    importlib.import_module("ampcompat.contrib")
    importlib.import_module("ampcompat.RNN")
    assert len(sys.meta_path) == len(before) + 1
    reset()
    assert sys.meta_path == before


def test_python_may_look_up_dunders():
    assert not hasattr(importlib.import_module("ampcompat.RNN"), "__wrapped__")
