"""What the table says works must be there: every such symbol of the modules that ampcompat has is looked up."""

import importlib
import importlib.util

import pytest

from ampcompat.check.symbols import MODULES, SYMBOLS

# In the table for modules that apex had and that are reached through their parent's attribute of the same name.
OURS = {symbol: symbol.replace("apex", "ampcompat", 1) for symbol in SYMBOLS if symbol.startswith("apex.")}


def present(symbol: str) -> bool:
    return importlib.util.find_spec(".".join(OURS[symbol].split(".")[:2])) is not None


@pytest.mark.parametrize(
    "symbol", [s for s in sorted(OURS) if SYMBOLS[s].verdict != "unsupported" and s.count(".") > 1 and present(s)]
)
def test_the_symbol_exists(symbol):
    module, _, name = OURS[symbol].rpartition(".")
    if symbol in MODULES:
        assert importlib.import_module(OURS[symbol])
    else:
        parent = importlib.import_module(module)
        assert hasattr(parent, name) or importlib.util.find_spec(OURS[symbol])
