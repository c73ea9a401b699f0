"""The example scripts, run in this process with ``apex.amp`` answered by ampcompat."""

import json
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import ampcompat.amp

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the examples, importable as it is for a script in it; its modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name in ("digits_data", "run_levels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return EXAMPLES


@pytest.fixture
def run_example(examples: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, object]]:
    """``run_example(name, *args)`` runs a script as ``__main__`` and returns what it reports of itself."""
    apex = types.ModuleType("apex")
    apex.amp = ampcompat.amp
    monkeypatch.setitem(sys.modules, "apex", apex)
    monkeypatch.setitem(sys.modules, "apex.amp", ampcompat.amp)

    def run(name: str, *args: object) -> dict[str, object]:
        result = tmp_path / "result.json"
        script = str(examples / name)
        monkeypatch.setattr(sys, "argv", [script, "--result", str(result), "--device", "cpu", *map(str, args)])
        runpy.run_path(script, run_name="__main__")
        return json.loads(result.read_text())

    return run
