"""What the check says of ampcompat's own names is read from source: the interpreter agrees."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest
import torch

import ampcompat
from ampcompat import amp
from ampcompat.tools.check import scan, scan_source
from ampcompat.tools.check.symbols import MODULES, SYMBOLS, names_in, verdict

KNOWN = {*SYMBOLS, *(f"{module}.{name}" for module in MODULES for name in names_in(module))}
CLAIMED = [s for s in KNOWN if verdict(s).verdict != "unsupported" and s.startswith("apex.")]
WORKING = {s: s.replace("apex", "ampcompat", 1) for s in CLAIMED}
REFUSED = [s for s in SYMBOLS if SYMBOLS[s].verdict == "unsupported"]
# Packages that only import, so that a probe finds them.
EMPTY = {"apex.RNN", "apex.fused_dense", "apex.reparameterization", "apex.transformer", "apex.pyprof", "apex.contrib"}


@pytest.mark.parametrize("symbol", sorted(set(REFUSED) - EMPTY))
def test_what_the_table_refuses_is_not_there(symbol):
    parent, _, name = symbol.replace("apex", "ampcompat", 1).rpartition(".")
    assert not hasattr(importlib.import_module(parent), name)
    assert importlib.util.find_spec(f"{parent}.{name}") is None


@pytest.mark.parametrize("symbol", sorted(s for s in WORKING if s.count(".") > 1))
def test_the_symbol_exists(symbol):
    if symbol in MODULES:
        assert importlib.import_module(WORKING[symbol])
        return
    module, _, name = WORKING[symbol].rpartition(".")
    parent = importlib.import_module(module)
    if symbol.startswith("apex.amp._amp_state."):
        # initialize makes its attributes; the object has them, and so has the module.
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


# -- names that apex never had -----------------------------------------------------------------------------------------
OURS = [
    "import ampcompat\nampcompat.install_as_apex()",
    "from ampcompat import amp\namp.report()\namp.unwrap(model)\namp.explain_overflows()",
    "from ampcompat.amp.casts.ambience import set_ambient\nset_ambient(x, y)",
    "from ampcompat.amp import lists\nlists.torch_overrides.CASTS",
    "from ampcompat import amp\namp.lists.functional_overrides.FP32_FUNCS.remove('softmax')",
    "from ampcompat.amp.half.masters import Master",
    "from ampcompat.amp import scaler\nscaler.LossScaler",
    "from ampcompat.testing import assert_opt_level_parity",
    "from ampcompat._state import state\nstate.reset()",
    "import ampcompat.tools.report as r\nr.PrecisionReport",
    "from ampcompat.cli import main\nmain([])",
    "from ampcompat.multi_tensor_apply._rules import adam_",
]


@pytest.mark.parametrize("code", OURS)
def test_what_ampcompat_has_is_not_unsupported(code):
    assert {f.level for f in scan_source(code)} <= {"works", "differs"}


@pytest.mark.parametrize(
    "code",
    [
        "from ampcompat import nonsense",
        "import ampcompat\nampcompat.nonsense()",
        "from ampcompat import amp\namp.autocasts()",
        "from ampcompat.amp.half.masters import nonsense",
        "from ampcompat.RNN import LSTM",
        "from ampcompat.contrib.fmha import FMHA",
        "import ampcompat.transformer",
        "from apex.amp import casts",
        "from apex import amp\namp.lists.functional_overrides.CASTS",
    ],
)
def test_what_it_has_not_still_is(code):
    assert "unsupported" in {f.level for f in scan_source(code)}


def test_the_package_is_clean_by_its_own_check():
    report = scan(Path(ampcompat.__file__).parent)
    assert [f for f in report.findings if f.level in ("unsupported", "error")] == []


def test_the_modules_that_passed_import():
    """The verdict is read from source; the interpreter agrees."""
    for code in OURS:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom):
                importlib.import_module(node.module)
