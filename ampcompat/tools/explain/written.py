"""What a step has left not finite, a weight or state of the optimizer, as facts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ampcompat.tools.core import HALF_DTYPES, Optimizer, master_of, name_of, optimizer_name
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.birth import Lines
from ampcompat.tools.explain.tensor_facts import TensorFacts
from ampcompat.tools.explain.weights import params_of, state_of
from ampcompat.tools.tensors import is_finite

#: What a dtype makes of a number that it does not hold at all.
_LOST = (0.0, 1.0, math.inf)


@dataclass(frozen=True)
class Written:
    """A tensor that a step has left not finite.

    Attributes:
        optimizer: The class that stepped.
        group: The index of the param group.
        parameter: The weight's qualified name; "" where no live model has it.
        what: Which tensor of the weight it is: "weight", "half weight", or the name of a state.
        tensor: The tensor.
        beside: The gradient of the weight, its master and its state, each with how many of its values are 0 where the
            weight is not finite; None where that cannot be said.
        options: The numbers of the group, and what the weight's dtype makes of each.
    """

    optimizer: str
    group: int
    parameter: str
    what: str
    tensor: TensorFacts
    beside: list[tuple[TensorFacts, int | None]]
    options: list[tuple[str, float, float]]

    @property
    def words(self) -> str:
        """As in "Adam left embeddings.weight not finite"."""
        of_what = self.parameter or f"a weight of group {self.group}"
        name = of_what if self.what == "weight" else f"{self.what} of {of_what}"
        return f"{self.optimizer} left {name} not finite"

    def lines(self) -> Lines:
        """What is told of it, as labels and texts."""
        lines = [("what", str(self.tensor))]
        for facts, zeros in self.beside:
            there = f"; 0 in {zeros} of the {self.tensor.not_finite} that are lost" if zeros else ""
            lines.append(("with", f"{facts}{there}"))
        dtype = dtype_name(self.tensor.dtype)
        for name, value, held in self.options:
            lines.append(("option", f"{name}={value:g}" + (f", which is {held:g} in {dtype}" if held != value else "")))
        return lines

    def as_dict(self) -> dict[str, object]:
        """The same for a line of JSON."""
        return {
            "kind": "step",
            "optimizer": self.optimizer,
            "group": self.group,
            "parameter": self.parameter,
            "what": self.what,
            "out": self.tensor.as_dict(),
            "beside": [{**facts.as_dict(), "zeros_where_lost": zeros} for facts, zeros in self.beside],
            "options": [{"name": name, "value": value, "held": held} for name, value, held in self.options],
        }


def first_written(optimizer: Optimizer) -> Written | None:
    """The first weight that is not finite, or the first state where all weights are; None where all is finite."""
    for group, param, what, tensor in _held_by(optimizer):
        if not is_finite(tensor):
            return Written(
                optimizer=optimizer_name(optimizer),
                group=group,
                parameter=name_of(param),
                what=what,
                tensor=TensorFacts.of(what, tensor),
                beside=_beside(optimizer, param, tensor),
                options=_options(optimizer, group, tensor.dtype),
            )
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


def _beside(optimizer: Optimizer, param: torch.Tensor, lost: torch.Tensor) -> list[tuple[TensorFacts, int | None]]:
    """The other tensors of ``param``, with their zeros where ``lost`` is not finite."""
    where = ~torch.isfinite(lost.detach())
    tensors = list(state_of(optimizer, param))
    if param.grad is not None and not param.grad.is_sparse:
        tensors.insert(0, ("grad", param.grad))
    if master_of(param) is not None and lost is not param:
        tensors.append(("float32 master", param))
    found = []
    for name, value in tensors:
        if value is not lost:
            zeros = int((value.detach()[where] == 0).sum()) if value.shape == lost.shape else None
            found.append((TensorFacts.of(name, value), zeros))
    return found


def _options(optimizer: Optimizer, group: int, dtype: torch.dtype) -> list[tuple[str, float, float]]:
    """The learning rate, eps, and each other number that ``dtype`` makes 0, 1 or inf, with what it makes of it."""
    found = []
    for name, value in _numbers(optimizer, group):
        held = torch.tensor(value, dtype=dtype, device="cpu").item() if dtype in HALF_DTYPES else value
        is_lost = held != value and abs(held) in _LOST
        if is_lost or name in ("lr", "eps"):
            found.append((name, value, held if is_lost else value))
    return found


def _numbers(optimizer: Optimizer, group: int) -> Iterator[tuple[str, float]]:
    for name, value in optimizer.param_groups[group].items():
        if isinstance(value, float):
            yield name, value
        elif isinstance(value, (tuple, list)):
            yield from ((f"{name}[{index}]", one) for index, one in enumerate(value) if isinstance(one, float))
