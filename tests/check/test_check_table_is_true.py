"""What the table says works must be there: every such symbol of the modules that ampcompat has is looked up."""

import importlib
import importlib.util

import pytest
import torch

from ampcompat import amp
from ampcompat.check.symbols import MODULES, SYMBOLS

CLAIMED = [s for s in SYMBOLS if SYMBOLS[s].verdict != "unsupported" and s.startswith("apex.")]
WORKING = {s: s.replace("apex", "ampcompat", 1) for s in CLAIMED}
REFUSED = [s for s in SYMBOLS if SYMBOLS[s].verdict == "unsupported"]
# Packages that only import, so that a probe finds them.
EMPTY = {"apex.RNN", "apex.fused_dense", "apex.reparameterization", "apex.transformer", "apex.pyprof", "apex.contrib"}


@pytest.mark.parametrize("symbol", sorted(set(REFUSED) - EMPTY))
def test_what_the_table_refuses_is_not_there(symbol):
    parent, _, name = symbol.replace("apex", "ampcompat", 1).rpartition(".")
    assert not hasattr(importlib.import_module(parent), name)
    assert importlib.util.find_spec(f"{parent}.{name}") is None


# Names that one package takes from another, and the module that completes a package.
NEEDS = {
    "ampcompat.optimizers.FP16_Optimizer": "ampcompat.fp16_utils",
    "ampcompat.parallel": "ampcompat.parallel.distributed",
}


def present(name: str) -> bool:
    package = ".".join(name.split(".")[:2])
    return importlib.util.find_spec(NEEDS.get(name, NEEDS.get(package, package))) is not None


@pytest.mark.parametrize("symbol", [s for s, name in sorted(WORKING.items()) if s.count(".") > 1 and present(name)])
def test_the_symbol_exists(symbol):
    if symbol in MODULES:
        assert importlib.import_module(WORKING[symbol])
        return
    module, _, name = WORKING[symbol].rpartition(".")
    parent = importlib.import_module(module)
    if symbol.startswith("apex.amp._amp_state."):
        # Its attributes are made by initialize, and are those of the object as well as of the module.
        amp.initialize(torch.nn.Linear(1, 1), verbosity=0)
        assert hasattr(parent, name) or hasattr(amp._amp_state, name)
    else:
        assert hasattr(parent, name) or importlib.util.find_spec(WORKING[symbol])
