"""Names of ampcompat that apex never had are no findings; names that neither has are."""

import ast
import importlib
from pathlib import Path

import pytest

import ampcompat
from ampcompat.tools.check import scan, scan_source

OURS = [
    "import ampcompat\nampcompat.install_as_apex()",
    "from ampcompat import amp\namp.report()\namp.unwrap(model)\namp.explain_overflows()",
    "from ampcompat import amp\namp.autocast.set_ambient(x, y)",
    "from ampcompat.amp import lists\nlists.torch_overrides.CASTS",
    "from ampcompat import amp\namp.lists.functional_overrides.FP32_FUNCS.remove('softmax')",
    "from ampcompat.amp.masters import Master",
    "from ampcompat.amp import scaler\nscaler.LossScaler",
    "from ampcompat.testing import assert_opt_level_parity",
    "from ampcompat._state import state\nstate.reset()",
    "import ampcompat.tools.report as r\nr.Receipt",
    "from ampcompat.cli import main\nmain([])",
    "from ampcompat.optimizers._rules import adam_",
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
        "from ampcompat.amp.masters import nonsense",
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
