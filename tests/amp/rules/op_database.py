"""Call every op of torch's own database under amp, under plain ``torch.autocast`` and in eager code.

``python op_database.py LEVEL PART PARTS`` prints JSON: the names of the ops that it called, and for each call that
raises under amp, but not under both of the others: the op, the form of the call, the dtypes of its inputs, the error
under amp, and whether autocast raises too. A call is a forward and, where it has gradients, a backward pass.

In a process of its own, since the database changes torch's settings when it is imported.
"""

import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from internals import reset
from torch.utils._pytree import tree_leaves, tree_map

from ampcompat import amp

HALF = {"O1": torch.float16, "O4": torch.bfloat16}
SAMPLES = 6  # of each op and dtype: the first ones


class Inputs(NamedTuple):
    """Dtypes of a call: the dtype that samples are made in, and which of their floating tensors become half."""

    dtype: torch.dtype
    becomes_half: Callable[[int], bool] = lambda position: False
    tensors: int = 1  # that a sample must have


INPUTS = {
    "float32": Inputs(torch.float32),
    "half": Inputs(torch.float32, lambda position: True),
    "half first": Inputs(torch.float32, lambda position: position == 0, 2),
    "float32 first": Inputs(torch.float32, lambda position: position > 0, 2),
    "double": Inputs(torch.float64),
    "integer": Inputs(torch.int64),
    "complex": Inputs(torch.complex64),
}


class Call(NamedTuple):
    """One call of ``op`` on copies of a sample."""

    op: Any
    form: str
    inputs: str
    sample: Any


def calls_of(op: Any) -> Iterator[Call]:
    forms = ["function"]
    if op.method_variant:
        forms.append("method")
    if op.inplace_variant:
        forms.append("in place")
    if op.inplace_operator_variant:
        forms.append("in-place operator")
    if op.supports_out:
        forms.append("out=")
    for name, inputs in INPUTS.items():
        if not op.supports_dtype(inputs.dtype, "cpu"):
            continue
        for sample, form in itertools.product(samples_of(op, inputs.dtype), forms):
            if len(floating(sample)) >= inputs.tensors or name == "integer":
                yield Call(op, form, name, sample)


def samples_of(op: Any, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)
    has_gradients = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    try:
        return list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=has_gradients), SAMPLES))
    except RuntimeError:  # some make none on the CPU
        return []


def floating(sample: Any) -> list[torch.Tensor]:
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return [
        leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]


def copies(call: Call, half: torch.dtype) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The sample's input, arguments and keywords, copied and cast: leaves of a graph of their own."""
    positions = itertools.count()

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensor = value.detach().clone()
        if value.is_floating_point() and INPUTS[call.inputs].becomes_half(next(positions)):
            tensor = tensor.to(half)
        return tensor.requires_grad_(value.requires_grad)

    return tree_map(copy, (call.sample.input, call.sample.args, call.sample.kwargs))


def as_scripts_find_it(method: Any) -> Any:
    """A method by its name, which amp may wrap: the database has held it since before."""
    name = getattr(method, "__name__", "")
    return getattr(torch.Tensor, name) if name in METHODS and METHODS[name] is method else method


METHODS = {name: getattr(torch.Tensor, name) for name in dir(torch.Tensor)}


def run(call: Call, half: torch.dtype, casts: Callable[[], AbstractContextManager[Any]]) -> None:
    first, args, kwargs = copies(call, half)
    leaves = [leaf for leaf in tree_leaves((first, args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if call.form == "out=":
        with torch.no_grad():
            with torch.autocast("cpu", enabled=False):
                plain = call.op.op(*copies(call, half)[:1], *args, **kwargs)
            out = tree_map(lambda leaf: torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, plain)
            with casts():
                call.op.op(first, *args, out=out, **kwargs)
        return
    with casts():
        if call.form == "function":
            result = call.op.op(first, *args, **kwargs)
        elif call.form == "method":
            result = as_scripts_find_it(call.op.method_variant)(first, *args, **kwargs)
        elif call.form == "in place":
            result = as_scripts_find_it(call.op.inplace_variant)(first.clone(), *args, **kwargs)
        else:
            result = call.op.inplace_operator_variant(first.clone(), *args, **kwargs)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if outputs and any(leaf.requires_grad for leaf in leaves):
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def error_of(call: Call, half: torch.dtype, casts: Callable[[], AbstractContextManager[Any]]) -> str | None:
    torch.manual_seed(0)
    try:
        run(call, half, casts)
    except Exception as error:  # what it is, is the result
        return f"{type(error).__name__}: {error}"
    return None


def sweep(level: str, ops: list[Any]) -> list[tuple[str, str, str, str, bool]]:
    half = HALF[level]
    found = []
    for op in ops:
        calls = list(calls_of(op))
        eager = [error_of(call, half, nullcontext) for call in calls]
        autocast = [error_of(call, half, lambda: torch.autocast("cpu", dtype=half)) for call in calls]
        _held = amp.initialize(torch.nn.Linear(2, 2), opt_level=level, verbosity=0)  # casts last as long as it does
        ours = [error_of(call, half, nullcontext) for call in calls]
        reset()
        for call, error, *others in zip(calls, ours, eager, autocast, strict=True):
            if error is not None and None in others:
                found.append((name_of(op), call.form, call.inputs, error, others[1] is not None))
    return found


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def main(level: str, part: str, parts: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from torch.testing._internal.common_methods_invocations import op_db

    ops = op_db[int(part) :: int(parts)]
    print(json.dumps({"ops": [name_of(op) for op in ops], "found": sweep(level, ops)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
