"""The marks of the tests, and the fixtures that need no torch; ``torch_left_as_found.py`` has those that do."""

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

#: The address of the fork server.
SERVER = pytest.StashKey[str]()
# Imports and collection create objects that are kept: looking for garbage among them would cost seconds.
# ``pytest_collection_finish`` switches the collector on again.
gc.disable()
# Without bytecode files, each worker and each process that a test starts would compile the tests and the package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

DIVERGENCES = {
    entry["id"]: entry
    for entry in json.loads((Path(__file__).parent.parent / "docs" / "divergences.json").read_text(encoding="utf-8"))
}


def pytest_configure(config: pytest.Config) -> None:
    """Start one fork server for all workers, and import torch in the processes that run tests."""
    is_worker = hasattr(config, "workerinput")
    if is_worker:
        config.stash[SERVER] = config.workerinput["warm_python"]
    else:
        server = ForkServer()
        config.stash[SERVER] = server.__enter__().address
        config.add_cleanup(lambda: server.__exit__(None))
    has_no_workers = config.getoption("dist", "no") == "no"
    if is_worker or has_no_workers:
        config.pluginmanager.import_plugin("torch_left_as_found")
    else:
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: "WorkerController") -> None:
    """Pass the address of the server to a worker."""
    node.workerinput["warm_python"] = node.config.stash[SERVER]


@pytest.hookimpl(tryfirst=True)  # before ``-m`` deselects the slow tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Apply the marks ``cover`` and ``divergence``.

    A test of a divergence is expected to fail on the torch versions that docs/divergences.json names.
    """
    import torch

    # The files in ``core`` are small: where they come last, the workers end at about the same time.
    items.sort(key=lambda item: item.path.parent.name == "core")
    mark_the_rest_slow(items)
    for item in items:
        for mark in item.iter_markers("divergence"):
            entry = DIVERGENCES[mark.args[0]]
            if SpecifierSet(entry["torch"]).contains(torch.__version__.split("+")[0], prereleases=True):
                item.add_marker(pytest.mark.xfail(strict=True, reason=f"{entry['id']}: {entry['ampcompat']}"))


def pytest_collection_finish() -> None:
    """Exempt torch and the tests from garbage collection, which ``initialize`` starts at times."""
    gc.collect()
    gc.freeze()
    gc.enable()
    if "triton" in sys.modules:  # at the end of a process its bindings print objects that outlive them
        atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def warm_python(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> WarmPython:
    """Return what starts Python processes that have torch imported already; see ``forkserver.py``."""
    return WarmPython(pytestconfig.stash[SERVER], tmp_path_factory.mktemp("warm_python"))


@pytest.fixture
def warm_executable(warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``sys.executable`` a program that starts Python with torch imported already."""
    monkeypatch.setattr(sys, "executable", warm_python.executable)
