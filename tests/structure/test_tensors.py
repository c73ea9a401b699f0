"""What holds of every tensor that the package makes, or copies to another device.

Each that is made names its dtype and device: a script may set other defaults. One function copies without waiting.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ampcompat"
#: Functions of torch that make a tensor of the default dtype on the default device.
MAKERS = {"arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "scalar_tensor", "tensor"}
MAKERS |= {"as_tensor", "randint", "randperm", "zeros"}
#: A module's parameters have the default dtype, as torch's own have; the other file is copied into scripts.
NOT_OURS = {"mlp/mlp.py", "tools/migrate/native_amp.py"}


def makers_without_dtype_or_device(source):
    """The lines of ``source`` that make a tensor and leave its dtype or its device to the defaults."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        is_of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        named = {keyword.arg for keyword in node.keywords}
        if is_of_torch and node.func.attr in MAKERS and not {"dtype", "device"} <= named:
            yield node.lineno


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("torch.full((), 1.0, device=d)", [1]),
        ("torch.zeros(2, dtype=torch.half)", [1]),
        ("torch.zeros(2, dtype=torch.half, device=d)\ntorch.full_like(x, 1.0)", []),
    ],
)
def test_what_leaves_it_to_the_defaults_is_found(source, lines):
    assert list(makers_without_dtype_or_device(source)) == lines


def test_every_tensor_names_its_dtype_and_device():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name not in NOT_OURS:
            found += [f"{name}:{line}" for line in makers_without_dtype_or_device(path.read_text(encoding="utf-8"))]
    assert found == []


#: It has that function, and ``HostCopy``, whose event says when a copy has arrived.
MAY_NOT_WAIT = {"_torch/host.py"}


def test_other_modules_leave_it_to_one_function_which_copies_are_waited_for():
    """A copy to the CPU must be: what reads it there would read what the memory held before."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name in MAY_NOT_WAIT:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "non_blocking":
                found.append(f"{name}:{node.lineno}")
    assert found == []
