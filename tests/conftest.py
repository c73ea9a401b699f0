"""The marks of the tests, and the fixtures that need no torch; ``torch_left_as_found.py`` has those that do."""

import atexit
import gc
import json
import os
import sys
from pathlib import Path

import pytest
from covering import mark_the_rest_slow
from failures import Failures
from packaging.specifiers import SpecifierSet
from rotating import mark_other_shares_slow

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


#: What torch says once a process on a real device, in whichever test comes first; nothing is wrong where it does.
WARNINGS_OF_CUDA = (
    "Attempting to run cuBLAS, but there was no current CUDA context",  # the first kernel of a thread
    "Sparse invariant checks are implicitly disabled",  # by CUDA's coalesce(), which checks none on the CPU either
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of runs on CUDA devices, real ones or those of ``accelerator/``."""
    parser.addoption(
        "--emulate-cuda", action="store_true", help="emulate two CUDA devices, on a torch that was built without CUDA"
    )
    parser.addoption("--on-cuda", action="store_true", help="make tensors on cuda:0 where a test names no device")
    parser.addoption("--failures-to", metavar="FILE", help="write each failure to FILE when it happens")


def pytest_configure(config: pytest.Config) -> None:
    """Import torch in the processes that run tests, with the devices that are wanted."""
    is_worker = hasattr(config, "workerinput")
    if config.getoption("--failures-to") and not is_worker:
        config.pluginmanager.register(Failures(Path(config.getoption("--failures-to"))))
    has_no_workers = config.getoption("dist", "no") == "no"
    runs_tests = is_worker or has_no_workers
    if config.getoption("--emulate-cuda"):
        emulate_cuda(runs_tests)
    if not runs_tests:
        gc.enable()
        return
    if config.getoption("--on-cuda"):
        import torch

        torch.set_default_device("cuda")
        for warning in WARNINGS_OF_CUDA:
            config.addinivalue_line("filterwarnings", f"ignore:{warning}")
    config.pluginmanager.import_plugin("torch_left_as_found")


def emulate_cuda(runs_tests: bool) -> None:
    """Install the emulated devices if this process runs tests; otherwise only build them, before the workers do."""
    import emulated_cuda

    reason = emulated_cuda.why_not()
    if reason is not None:
        raise pytest.UsageError(f"--emulate-cuda: {reason}")
    if not runs_tests:
        emulated_cuda.built()
        return
    emulated_cuda.install()
    from torch.nn.parallel import distributed

    verify = distributed._verify_param_shape_across_processes  # the first that DDP does with processes

    def verify_or_skip(process_group, params, *args, **kwargs):
        if any(param.is_cuda for param in params):
            pytest.skip("an emulated device has no process groups: gloo copies by CUDA's own streams")
        return verify(process_group, params, *args, **kwargs)

    distributed._verify_param_shape_across_processes = verify_or_skip


@pytest.hookimpl(tryfirst=True)  # before ``-m`` deselects the slow tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Apply the marks ``cover``, ``rotate`` and ``divergence``.

    A test of a divergence is expected to fail on the torch versions that docs/divergences.json names.
    """
    import torch

    # The files in ``core`` are small: where they come last, the workers end at about the same time.
    items.sort(key=lambda item: item.path.parent.name == "core")
    mark_the_rest_slow(items)
    mark_other_shares_slow(items, config.args)
    for item in items:
        for mark in item.iter_markers("divergence"):
            entry = DIVERGENCES[mark.args[0]]
            if SpecifierSet(entry["torch"]).contains(torch.__version__.split("+")[0], prereleases=True):
                item.add_marker(pytest.mark.xfail(strict=True, reason=f"{entry['id']}: {entry['ampcompat']}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Make the tensors of a test that is marked ``on_cpu`` there, whatever ``--on-cuda`` says."""
    if item.config.getoption("--on-cuda") and item.get_closest_marker("on_cpu"):
        import torch

        torch.set_default_device(None)
        try:
            return (yield)
        finally:
            torch.set_default_device("cuda")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Skip a test where it reaches a kernel that an emulated device lacks, since the CPU has none for it."""
    try:
        return (yield)
    except NotImplementedError as error:
        has_no_kernel = "'SparseCUDA' backend" in str(error)
        if not (item.config.getoption("--emulate-cuda") and has_no_kernel):
            raise
        pytest.skip("an emulated device has no kernels of sparse tensors")


def pytest_collection_finish() -> None:
    """Exempt torch and the tests from garbage collection, which ``initialize`` starts at times."""
    gc.collect()
    gc.freeze()
    gc.enable()
    if "triton" in sys.modules:  # at the end of a process its bindings print objects that outlive them
        atexit.register(gc.unfreeze)
