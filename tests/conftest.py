"""Which tests run by default, and what all of them share; ``torch_left_as_found.py`` has the rest."""

import atexit
import gc
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from covering import mark_the_rest_slow
from forkserver import ForkServer, WarmPython
from packaging.specifiers import SpecifierSet

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

WARM = pytest.StashKey[str]()
# What is imported and collected stays: walking it at each stage costs seconds. Switched on when it has been collected.
gc.disable()
# Each worker, and each process that a test starts, would compile the tests and the package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

DIVERGENCES = {
    entry["id"]: entry
    for entry in json.loads((Path(__file__).parent.parent / "docs" / "divergences.json").read_text(encoding="utf-8"))
}


def pytest_configure(config: pytest.Config) -> None:
    """Start the server of ``warm_python``, one for all workers, and import torch where tests run: in these."""
    if hasattr(config, "workerinput"):
        config.stash[WARM] = config.workerinput["warm_python"]
    else:
        server = ForkServer()
        config.stash[WARM] = server.__enter__().address
        config.add_cleanup(lambda: server.__exit__(None))
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("torch_left_as_found")
    else:
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: "WorkerController") -> None:
    """Tell a worker where the server is."""
    node.workerinput["warm_python"] = node.config.stash[WARM]


@pytest.hookimpl(tryfirst=True)  # before -m leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Apply the marks ``cover`` and ``divergence``: the latter's tests fail on the torch versions it is listed for."""
    import torch

    items.sort(key=lambda item: item.path.parent.name == "core")  # small files come last: the workers end together
    mark_the_rest_slow(items)
    for item in items:
        for mark in item.iter_markers("divergence"):
            entry = DIVERGENCES[mark.args[0]]
            if SpecifierSet(entry["torch"]).contains(torch.__version__.split("+")[0], prereleases=True):
                item.add_marker(pytest.mark.xfail(strict=True, reason=f"{entry['id']}: {entry['ampcompat']}"))


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking torch and all the tests, which ``initialize`` has it do at times."""
    gc.collect()
    gc.freeze()
    gc.enable()
    if "triton" in sys.modules:  # its bindings print what outlives them at the end of a process, as frozen objects do
        atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def warm_python(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> WarmPython:
    """Start Python processes that have torch imported already; see ``forkserver.py``."""
    return WarmPython(pytestconfig.stash[WARM], tmp_path_factory.mktemp("warm_python"))


@pytest.fixture
def warm_executable(warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have code that starts ``sys.executable`` start Python processes that have torch imported already."""
    monkeypatch.setattr(sys, "executable", warm_python.executable)
