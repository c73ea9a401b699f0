"""What a step has left not finite, a weight or state of the optimizer, as facts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ampcompat.tools.core import HALF_DTYPES, Optimizer, master_of, name_of, optimizer_name
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.birth import Lines
from ampcompat.tools.explain.tensor_facts import TensorFacts
from ampcompat.tools.explain.weights import params_of, state_of
from ampcompat.tools.tensors import is_finite


class Written(NamedTuple):
    """A tensor that a step has left not finite."""

    words: str  # as in "Adam left embeddings.weight not finite"
    lines: Lines  # what is told of it
    content: dict[str, object]  # the same for a line of JSON


def first_written(optimizer: Optimizer) -> Written | None:
    """The first weight that is not finite, or the first state where all weights are; None where all is finite."""
    for group, param, what, tensor in _held_by(optimizer):
        if is_finite(tensor):
            continue
        name = optimizer_name(optimizer)
        parameter = name_of(param) or f"a weight of group {group}"
        facts = TensorFacts.of(what, tensor)
        beside = _beside(optimizer, param, tensor)
        options = _options(optimizer, group, param.dtype)
        words = f"{name} left {parameter if what == 'weight' else f'{what} of {parameter}'} not finite"
        lines = [("what", str(facts))]
        for other, zeros in beside:
            lines.append(
                ("with", f"{other}; 0 in {zeros} of the {facts.not_finite} that are lost" if zeros else str(other))
            )
        lines += [("option", text) for text in options]
        content = {"kind": "step", "optimizer": name, "group": group, "parameter": parameter, "what": what}
        content |= {"out": facts.as_dict(), "options": options}
        content["beside"] = {other.name: other.not_finite for other, _ in beside}
        content["zeros"] = {other.name: zeros for other, zeros in beside}
        return Written(words, lines, content)
    return None


def _held_by(optimizer: Optimizer) -> Iterator[tuple[int, torch.Tensor, str, torch.Tensor]]:
    """Each tensor that a step writes, with the index of its group, its parameter, and what it is of that."""
    for group, param in params_of(optimizer):
        yield group, param, "weight", param
        master = master_of(param)
        if master is not None:
            yield group, param, "half weight", master.half
    for group, param in params_of(optimizer):
        for name, value in state_of(optimizer, param):
            yield group, param, name, value


def _beside(optimizer: Optimizer, param: torch.Tensor, lost: torch.Tensor) -> list[tuple[TensorFacts, int]]:
    """The gradient, state and master of ``param``, each with its zeros where ``lost`` is not finite."""
    tensors = [("grad", param.grad), *state_of(optimizer, param)]
    if master_of(param) is not None:
        tensors.append(("float32 master", param))
    where = ~torch.isfinite(lost.detach())
    return [
        (TensorFacts.of(name, value), int((value.detach()[where] == 0).sum()))
        for name, value in tensors
        if value is not None and value is not lost and not value.is_sparse and value.shape == lost.shape
    ]


def _options(optimizer: Optimizer, group: int, dtype: torch.dtype) -> list[str]:
    """The learning rate, eps, and each other number that ``dtype`` makes 0, 1 or inf, with what it makes of it."""
    found = []
    for name, value in _numbers(optimizer, group):
        held = torch.tensor(value, dtype=dtype, device="cpu").item() if dtype in HALF_DTYPES else value
        if held != value and abs(held) in (0.0, 1.0, math.inf):
            found.append(f"{name}={value:g}, which is {held:g} in {dtype_name(dtype)}")
        elif name in ("lr", "eps"):
            found.append(f"{name}={value:g}")
    return found


def _numbers(optimizer: Optimizer, group: int) -> Iterator[tuple[str, float]]:
    for name, value in optimizer.param_groups[group].items():
        if isinstance(value, float):
            yield name, value
        elif isinstance(value, (tuple, list)):
            yield from ((f"{name}[{index}]", one) for index, one in enumerate(value) if isinstance(one, float))
