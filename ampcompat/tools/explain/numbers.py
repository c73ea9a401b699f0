"""Numbers of an optimizer that the dtype of the parameters it steps does not have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ampcompat.tools.core import HALF_DTYPES, LEVELS, Optimizer, ParamGroup
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.fault import Fault

#: Read by schedulers, or compared in Python: no tensor meets them.
_NEVER_IN_HALF = ("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
_WITH_MASTERS = next(name for name, row in LEVELS.items() if row.master_weights)
#: What decoupled weight decay multiplies a weight by.
DECAY = "1 - lr * weight_decay"
MASTERS = f"opt_level={_WITH_MASTERS!r}: its optimizer steps float32 masters"


@dataclass
class Number:
    """A number of a param group that becomes another one in the parameters' dtype.

    Attributes:
        group: Index of the param group.
        name: As in "eps" or "betas[1]".
        value: What the script passed.
        becomes: What it is in ``dtype``: 0, 1 or inf.
        dtype: Of the parameters.
        optimizer: Class name.
        count: Parameters of that dtype in the group.
    """

    group: int
    name: str
    value: float
    becomes: float
    dtype: str
    optimizer: str
    count: int

    @property
    def text(self) -> str:
        """As in "eps=1e-08 is 0 in float16"."""
        return f"{self.name}={self.value:g} is {self.becomes:g} in {self.dtype}"

    @property
    def effect(self) -> str:
        """What follows from it."""
        if self.becomes == 1:
            return "what it decays stays as it is"
        if self.becomes != 0:
            return "what it multiplies is inf"
        return "0 / 0 where gradients are 0" if self.name == "eps" else "it has no effect"

    @property
    def hints(self) -> list[str]:
        """The likeliest first."""
        return [self._first_hint(), MASTERS]

    def _first_hint(self) -> str:
        name = self.name.partition("[")[0]
        if self.name == "eps":
            return f"pass eps=1e-4 to {self.optimizer}"
        if self.name == DECAY:
            return f"add the weight decay to the loss, or use {self.optimizer} with float32 parameters"
        if self.becomes == 0:
            return f"leave {name} out, or pass {name}=1e-6 or more to {self.optimizer}"
        if self.becomes == 1:
            below_one = 1 - torch.finfo(getattr(torch, self.dtype)).eps / 2
            return f"pass a smaller {self.name} to {self.optimizer}: at most {below_one:g}"
        return f"pass a smaller {name} to {self.optimizer}"

    @property
    def fault(self) -> Fault:
        """What is told of it at the first step."""
        return Fault(
            what=f"{self.text}, the dtype of {self.count} of its parameters: {self.effect}",
            where=f"group {self.group} of {self.optimizer}",
            cause=self.text,
            key=self.text,
            number=self.value,
            hints=self.hints,
            facts={"optimizer": self.optimizer, "group": self.group, "name": self.name, "dtype": self.dtype},
        )


def not_representable(optimizer: Optimizer) -> list[Number]:
    """Every number in the groups of ``optimizer`` that its half parameters' dtype rounds to 0, 1 or inf.

    Fused optimizers, torch's and apex's, compute in float32 whatever they step. A learning rate that a scheduler moves
    may begin at next to nothing. No host sync.
    """
    if type(optimizer).__module__.startswith("ampcompat.optimizers"):
        return []
    found = []
    name = optimizer_name(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        dtypes = [p.dtype for p in group["params"] if p.dtype in HALF_DTYPES]
        for dtype in dict.fromkeys(() if group.get("fused") else dtypes):
            for label, value in _numbers(group, name):
                becomes = torch.tensor(value, dtype=dtype, device="cpu").item()
                if becomes != value and (becomes in (0, 1) or becomes == float("inf")):
                    count = dtypes.count(dtype)
                    found.append(Number(index, label, value, becomes, dtype_name(dtype), name, count))
    return found


def _numbers(group: ParamGroup, optimizer: str) -> Iterator[tuple[str, float]]:
    for name, value in group.items():
        if name in _NEVER_IN_HALF or name.startswith("tolerance") or (name == "lr" and "initial_lr" in group):
            continue
        if isinstance(value, float):
            yield name, value
        elif isinstance(value, (tuple, list)):
            yield from ((f"{name}[{i}]", one) for i, one in enumerate(value) if isinstance(one, float))
    rate, decay = group.get("lr"), group.get("weight_decay")
    decoupled = "AdamW" in optimizer or group.get("decoupled_weight_decay")
    if decoupled and isinstance(rate, float) and isinstance(decay, float):
        yield DECAY, 1 - rate * decay


def optimizer_name(optimizer: object) -> str:
    """The class that steps: that of the optimizer inside, for a wrapper such as LARC."""
    return type(getattr(optimizer, "optim", optimizer)).__name__
