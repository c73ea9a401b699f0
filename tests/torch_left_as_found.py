"""Every test leaves torch as the one before it did: the fixture below resets ampcompat and then compares."""

import gc
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from ampcompat._state import state

# CPU tests are small: one thread keeps them bitwise repeatable and stops workers from fighting over the cores.
torch.set_num_threads(1)
# ``manual_seed`` keeps, for each kind of device that is not initialized, the text of the stack: milliseconds each time.
for module in (torch.cuda, torch.xpu, torch.mtia):
    module.traceback = SimpleNamespace(format_stack=list)
# The first optimizer of a process makes torch import its compiler, which sets TORCHINDUCTOR_CACHE_DIR.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def torch_as_it_is() -> dict[str, object]:
    """Everything in torch that ampcompat may change, by name."""
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
    for owner, names in PATCHABLE:
        for name in names:
            seen[f"{getattr(owner, '__name__', owner)}.{name}"] = owner.__dict__.get(name, "absent")
    for op in RULED:
        seen[f"dispatcher {op}"] = torch._C._dispatch_dump(op)
    return seen


@pytest.fixture
def torch_state():
    """The function that says how torch is, for tests of calls that must change nothing."""
    return torch_as_it_is


#: One op of each kind of rule: half, float, promote, banned, in place, and the CPU's convolutions.
RULED = [
    *("aten::prelu", "aten::gelu", "aten::_softmax", "aten::atan2", "aten::binary_cross_entropy", "aten::exp_"),
    *("aten::_convolution", "aten::convolution_backward"),
]
PATCHABLE = [
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


#: How the last test left torch, and this file found it; looking takes a third of a millisecond.
LEFT = [torch_as_it_is()]


def environment() -> dict[bytes, bytes]:
    """The environment, without what pytest and torch's compiler set; ``os.environ`` decodes each name and value."""
    return {
        name: value
        for name, value in os.environ._data.items()
        if name not in (b"PYTEST_CURRENT_TEST", b"CUDA_MODULE_LOADING") and b"TORCHINDUCTOR" not in name
    }


@pytest.fixture(scope="module", autouse=True)
def what_is_there_is_not_walked_again() -> None:
    """Keep the garbage collector from walking what earlier files imported, torch's compiler above all."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def torch_left_as_found() -> Iterator[None]:
    found = environment()
    yield
    state.reset()
    # Code that the compiler of torch 2.4 links with -ffast-math flushes denormals in the whole process once loaded.
    torch.set_flush_denormal(False)
    before, LEFT[0] = LEFT[0], torch_as_it_is()
    gc.collect(0)
    assert LEFT[0] == before, "the test, or reset(), left torch changed"
    left = environment()
    changed = {name for name in found.keys() | left.keys() if found.get(name) != left.get(name)}
    assert not changed, f"the test left environment variables changed: {changed}"
