"""Numbers of an optimizer that the dtype of the parameters it steps does not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ampcompat.tools.core import HALF_DTYPES, LEVELS, Optimizer, ParamGroup
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.fault import Fault

#: Read by schedulers, or compared in Python: no tensor meets them.
_NEVER_IN_HALF = ("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
#: What decoupled weight decay multiplies a weight by.
_DECAY = "1 - lr * weight_decay"
_WITH_MASTERS = next(name for name, row in LEVELS.items() if row.master_weights)
MASTERS = f"opt_level={_WITH_MASTERS!r}: its optimizer steps float32 masters"


class Number(NamedTuple):
    """A number of an optimizer that a dtype does not have."""

    group: int  # the index of its param group
    name: str  # as in "betas[1]"
    dtype: torch.dtype
    fault: Fault


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
        if group.get("fused"):
            continue
        dtypes = [p.dtype for p in group["params"] if p.dtype in HALF_DTYPES]
        for dtype in dict.fromkeys(dtypes):
            for label, value in _numbers(group, name):
                becomes = torch.tensor(value, dtype=dtype, device="cpu").item()
                if becomes != value and (becomes in (0, 1) or becomes == float("inf")):
                    where = f"group {index} of {name}"
                    fault = _fault(label, value, becomes, dtype, dtypes.count(dtype), where, name)
                    fault.facts = {"optimizer": name, "group": index, "name": label, "dtype": dtype_name(dtype)}
                    found.append(Number(index, label, dtype, fault))
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
        yield _DECAY, 1 - rate * decay


def _fault(
    label: str, value: float, becomes: float, dtype: torch.dtype, count: int, where: str, optimizer: str
) -> Fault:
    """What is told of the number ``label``, which becomes another one in the ``dtype`` of ``count`` parameters."""
    name = label.partition("[")[0]
    if name == "eps":
        effect = "0 / 0 where gradients are 0"
        hint = f"pass eps=1e-4 to {optimizer}"
    elif becomes == 0:
        effect = "it has no effect"
        hint = f"leave {name} out, or pass {name}=1e-6 or more to {optimizer}"
    elif label == _DECAY:
        effect = "what it decays stays as it is"
        hint = f"add the weight decay to the loss, or use {optimizer} with float32 parameters"
    elif becomes == 1:
        effect = "what it decays stays as it is"
        below_one = 1 - torch.finfo(dtype).eps / 2
        hint = f"pass a smaller {label} to {optimizer}: at most {below_one:g}"
    else:
        effect = "what it multiplies is inf"
        hint = f"pass a smaller {name} to {optimizer}"
    text = f"{label}={value:g} is {becomes:g} in {dtype_name(dtype)}"
    what = f"{text}, the dtype of {count} of its parameters: {effect}"
    head = f"{optimizer} has a number that the dtype of its parameters does not hold."
    return Fault(what, where, cause=text, key=text, head=head, number=value, hints=[hint, MASTERS])


def optimizer_name(optimizer: object) -> str:
    """The class that steps: that of the optimizer inside, for a wrapper such as LARC."""
    return type(getattr(optimizer, "optim", optimizer)).__name__
