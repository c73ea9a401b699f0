"""Numbers of an optimizer that the dtype of the parameters it steps does not have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ampcompat.tools.core import HALF_DTYPES, LEVELS, Optimizer, ParamGroup, optimizer_name
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.fault import Fault

#: What optimizers add to tensors, or multiply them by; others are read by schedulers, or compared in Python.
_IN_HALF = ("lr", "eps", "weight_decay", "momentum", "dampening", "alpha", "rho", "lambd", "beta", "beta1", "beta2")
_IN_HALF_BY_INDEX = ("betas",)
#: What decoupled weight decay multiplies a weight by.
_DECAY = "1 - lr * weight_decay"
_WITH_MASTERS = next(name for name, row in LEVELS.items() if row.master_weights)
MASTERS = f"opt_level={_WITH_MASTERS!r}: its optimizer steps float32 masters"


@dataclass(frozen=True)
class Number:
    """A number of an optimizer that the dtype of parameters which it steps does not have."""

    optimizer: str  # its class
    group: int  # the index of the param group
    name: str  # as in "betas[1]"
    value: float
    dtype: torch.dtype
    becomes: float  # in that dtype: 0, 1 or inf
    parameters: int  # how many of the group have that dtype

    @property
    def text(self) -> str:
        """As in "eps=1e-08 is 0 in float16"."""
        return f"{self.name}={self.value:g} is {self.becomes:g} in {dtype_name(self.dtype)}"

    @property
    def fault(self) -> Fault:
        """What is told of it."""
        effect, hint = self._effect_and_hint()
        return Fault(
            what=f"{self.text}, the dtype of {self.parameters} of its parameters: {effect}",
            where=f"group {self.group} of {self.optimizer}",
            cause=self.text,
            key=self.text,
            head=f"{self.optimizer} has a number that the dtype of its parameters does not hold.",
            number=self.value,
            hints=[hint, MASTERS],
            facts={
                "optimizer": self.optimizer,
                "group": self.group,
                "name": self.name,
                "dtype": dtype_name(self.dtype),
            },
        )

    def _effect_and_hint(self) -> tuple[str, str]:
        name = self.name.partition("[")[0]
        if name == "eps":
            return "0 / 0 where gradients are 0", f"pass eps=1e-4 to {self.optimizer}"
        if self.becomes == 0:
            return "it has no effect", f"leave {name} out, or pass {name}=1e-6 or more to {self.optimizer}"
        if self.name == _DECAY:
            hint = f"add the weight decay to the loss, or use {self.optimizer} with float32 parameters"
            return "what it decays stays as it is", hint
        if self.becomes == 1:
            below_one = 1 - torch.finfo(self.dtype).eps / 2
            hint = f"pass a smaller {self.name} to {self.optimizer}: at most {below_one:g}"
            return "what it decays stays as it is", hint
        return "what it multiplies is inf", f"pass a smaller {name} to {self.optimizer}"


def not_representable(optimizer: Optimizer) -> list[Number]:
    """Every number in the groups of ``optimizer`` that its half parameters' dtype rounds to 0, 1 or inf.

    Fused optimizers, torch's and apex's, compute in float32 whatever they step. A learning rate that a scheduler moves
    may begin at next to nothing. No host sync.
    """
    if type(optimizer).__module__.startswith("ampcompat.optimizers"):
        return []
    found = []
    optimizer_class = optimizer_name(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        if group.get("fused"):
            continue
        dtypes = [p.dtype for p in group["params"] if p.dtype in HALF_DTYPES]
        for dtype in dict.fromkeys(dtypes):
            for name, value in _numbers(group, optimizer_class):
                becomes = torch.tensor(value, dtype=dtype, device="cpu").item()
                if becomes != value and becomes in (0, 1, math.inf):
                    count = dtypes.count(dtype)
                    found.append(Number(optimizer_class, index, name, value, dtype, becomes, count))
    return found


def _numbers(group: ParamGroup, optimizer: str) -> Iterator[tuple[str, float]]:
    for name, value in group.items():
        is_scheduled = name == "lr" and "initial_lr" in group
        if name in _IN_HALF and not is_scheduled and isinstance(value, float):
            yield name, value
        elif name in _IN_HALF_BY_INDEX and isinstance(value, (tuple, list)):
            yield from ((f"{name}[{i}]", one) for i, one in enumerate(value) if isinstance(one, float))
    rate, decay = group.get("lr"), group.get("weight_decay")
    decoupled = "AdamW" in optimizer or group.get("decoupled_weight_decay")
    if decoupled and isinstance(rate, float) and isinstance(decay, float):
        yield _DECAY, 1 - rate * decay
