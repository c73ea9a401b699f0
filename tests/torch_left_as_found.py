"""Every test leaves torch as it found it: the fixture below resets ampcompat and then compares."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from ampcompat._state import state

# CPU tests are small: one thread keeps them bitwise repeatable and stops workers from fighting over the cores.
torch.set_num_threads(1)
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


@pytest.fixture(autouse=True)
def torch_left_as_found() -> Iterator[None]:
    before, environment = torch_as_it_is(), dict(os.environ)
    yield
    state.reset()
    # Code that the compiler of torch 2.4 links with -ffast-math flushes denormals in the whole process once loaded.
    torch.set_flush_denormal(False)
    after = torch_as_it_is()
    gc.collect(0)
    assert after == before, "the test, or reset(), left torch changed"
    changed = {k for k in set(environment) | set(os.environ) if environment.get(k) != os.environ.get(k)}
    # torch itself sets these when its compiler is first used.
    expected = {"PYTEST_CURRENT_TEST", "CUDA_MODULE_LOADING"}
    changed = {name for name in changed - expected if "TORCHINDUCTOR" not in name}
    assert not changed, f"the test left environment variables changed: {changed}"
