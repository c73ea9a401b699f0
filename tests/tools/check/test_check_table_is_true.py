"""What the table says works must be there: every such symbol of the modules that ampcompat has is looked up."""

import importlib
import importlib.util

import pytest
import torch

from ampcompat import amp
from ampcompat.tools.check.symbols import MODULES, SYMBOLS, verdict

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


def supplied():
    """Names of apex's modules that ampcompat's modules of the same name define."""
    found = []
    for module in sorted(MODULES):
        if not module.startswith("apex."):
            continue
        ours = importlib.import_module(module.replace("apex", "ampcompat", 1))
        for name, value in vars(ours).items():
            home = getattr(value, "__module__", None)
            if not name.startswith("_") and isinstance(home, str) and home.startswith("ampcompat"):
                found.append(f"{module}.{name}")
    return found


def test_what_the_package_supplies_is_known():
    """The table is read from the package's source; the interpreter finds the same names."""
    found = supplied()
    assert len(found) > 100
    assert [name for name in found if verdict(name).verdict == "unsupported"] == []


@pytest.mark.parametrize(
    "name",
    [
        "apex.optimizers.fused_adam.FusedAdam",
        "apex.parallel.sync_batchnorm.SyncBatchNorm",
        "apex.fp16_utils.fp16util.network_to_half",
        "apex.fp16_utils.loss_scaler.DynamicLossScaler",
        "apex.amp.frontend.state_dict",
        "apex.normalization.fused_layer_norm.FusedLayerNorm",
    ],
)
def test_second_homes_work(name):
    assert verdict(name).verdict != "unsupported"
    module, _, attribute = name.replace("apex", "ampcompat", 1).rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)
