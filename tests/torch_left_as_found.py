"""Fixtures that need torch. One resets ampcompat after each test and checks that torch is as it was before it."""

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from internals import reset
from process_group import process_group_of_one
from torch.optim.optimizer import _global_optimizer_pre_hooks

# CPU tests are small. With one thread they are bitwise repeatable, and the workers do not compete for the cores.
torch.set_num_threads(1)
# ``manual_seed`` stores the text of the stack for each kind of device that is not initialized: this takes milliseconds.
for module in (torch.cuda, torch.xpu, torch.mtia):
    module.traceback = SimpleNamespace(format_stack=list)
# With the first optimizer of a process torch imports its compiler, which sets TORCHINDUCTOR_CACHE_DIR.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def torch_as_it_is() -> dict[str, object]:
    """Return everything in torch that ampcompat may change, by name."""
    seen: dict[str, object] = {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }
    for device_type in ("cpu", "cuda"):
        seen[f"autocast {device_type}"] = torch.is_autocast_enabled(device_type)
        seen[f"autocast dtype {device_type}"] = torch.get_autocast_dtype(device_type)
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    seen["autocast nesting"] = nesting
    seen["hooks of steps"] = list(_global_optimizer_pre_hooks)
    for owner, names in PATCHABLE:
        for name in names:
            seen[f"{getattr(owner, '__name__', owner)}.{name}"] = owner.__dict__.get(name, "absent")
    for op in RULED:
        seen[f"dispatcher {op}"] = torch._C._dispatch_dump(op)
    return seen


@pytest.fixture
def torch_state():
    """Return ``torch_as_it_is``, for tests of calls that must change nothing in torch."""
    return torch_as_it_is


#: Ops whose rules are compared: one of each kind (half, float, promote, banned, in place) and the CPU's convolutions.
RULED = [
    *("aten::prelu", "aten::gelu", "aten::_softmax", "aten::atan2", "aten::binary_cross_entropy", "aten::exp_"),
    *("aten::_convolution", "aten::convolution_backward"),
]
#: Attributes of torch that ampcompat may replace: their owners and their names.
PATCHABLE = [
    (torch.nn.Parameter, ["data"]),
    (torch.distributed.distributed_c10d, ["_check_single_tensor"]),
    (torch.autograd, ["_engine_run_backward", "backward", "grad"]),
    (torch.autograd.function.BackwardCFunction, ["apply", "apply_boxed", "__init__"]),
    (torch.autograd.Function, ["apply"]),
    (torch.amp.autocast_mode.autocast, ["__enter__", "__exit__"]),
    (torch.Tensor, ["cpu", "matmul", "pow", "sum", "float", "half", "backward"]),
    (torch.nn.Module, ["__call__", "forward", "state_dict", "load_state_dict", "zero_grad", "to"]),
    (torch.optim.Optimizer, ["step", "zero_grad", "add_param_group", "load_state_dict"]),
    (torch.nn.functional, ["linear", "softmax", "binary_cross_entropy", "conv2d", "gelu"]),
    (torch, ["matmul", "mm", "softmax", "sigmoid", "einsum"]),
]


#: The state of torch after the last test. Each test reads it once, which takes a third of a millisecond.
LAST_STATE = [torch_as_it_is()]


def environment() -> dict[bytes, bytes]:
    """Return the environment without what pytest and torch's compiler set, undecoded, which is faster."""
    return {
        name: value
        for name, value in os.environ._data.items()
        if name not in (b"PYTEST_CURRENT_TEST", b"CUDA_MODULE_LOADING") and b"TORCHINDUCTOR" not in name
    }


@pytest.fixture
def tensors_on_the_accelerator() -> Iterator[None]:
    """Make tensors where ``amp.init``, which knows no model, casts: on the accelerator if there is one."""
    is_elsewhere = torch.cuda.is_available() and torch.get_default_device().type != "cuda"
    with torch.device("cuda") if is_elsewhere else nullcontext():
        yield


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """Make this process the only rank of torch's default process group."""
    with process_group_of_one():
        yield


@pytest.fixture(scope="module", autouse=True)
def exempt_imports_from_garbage_collection() -> None:
    """Exempt what earlier test files imported, above all torch's compiler, from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def torch_left_as_found() -> Iterator[None]:
    """Reset ampcompat after a test, and fail the test if torch or the environment is not as it was before."""
    environment_before = environment()
    yield
    reset()
    # torch 2.4 links compiled code with -ffast-math: once loaded, it flushes denormals in the whole process.
    torch.set_flush_denormal(False)
    before = LAST_STATE[0]
    after = torch_as_it_is()
    LAST_STATE[0] = after
    gc.collect(0)
    assert after == before, "the test, or reset(), left torch changed"
    environment_after = environment()
    names = environment_before.keys() | environment_after.keys()
    changed = {name for name in names if environment_before.get(name) != environment_after.get(name)}
    assert not changed, f"the test left environment variables changed: {changed}"
