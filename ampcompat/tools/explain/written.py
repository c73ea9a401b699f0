"""From a weight, or optimizer state, that a step has written and that is not finite, to the fault."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ampcompat import _torch
from ampcompat.tools.core import HALF_DTYPES, Master, Optimizer, ParamGroup, master_of
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.fault import Fault
from ampcompat.tools.explain.growth import Grown, name_of
from ampcompat.tools.explain.hints import BFLOAT16
from ampcompat.tools.explain.misuse import Misuse
from ampcompat.tools.explain.numbers import MASTERS, Number, not_representable, optimizer_name
from ampcompat.tools.tensors import LARGEST, count_not_finite, is_finite, largest, readable


@dataclass
class Written:
    """A tensor that a step has left not finite.

    Attributes:
        optimizer: The optimizer that made the step.
        group: Index of the param group.
        param: The weight.
        tensor: The weight, its half copy, or the state that is not finite.
        state: Name of that state; "" for the weight.
        why: Causes that were found, the likeliest first.
        hints: What to do, the likeliest first.
        numbers: Those among the causes that the parameters' dtype does not hold.
        at_any_rate: Whether a lower learning rate would not help: a division by zero, or such a gradient.
    """

    optimizer: Optimizer
    group: int
    param: torch.Tensor
    tensor: torch.Tensor
    state: str = ""
    why: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    numbers: list[Number] = field(default_factory=list)
    at_any_rate: bool = False

    @property
    def head(self) -> str:
        """What the step has left."""
        return f"{optimizer_name(self.optimizer)} left {'state' if self.state else 'a weight'} that is not finite."

    def fault(self, step: int, growth: Grown | None, misuse: Misuse | None) -> Fault:
        """What is told of it.

        Args:
            step: The number of the step.
            growth: The weight that the last steps made many times larger, if any.
            misuse: What amp has warned of and may have spoiled the weights, if anything.
        """
        optimizer = optimizer_name(self.optimizer)
        parameter = name_of(self.param)
        of_what = parameter or f"a parameter of group {self.group}"
        name = f"{self.state} of {of_what}" if self.state else of_what
        dtype = dtype_name(self.tensor.dtype)
        lost = count_not_finite(self.tensor)
        hints = self.hints
        if misuse is not None:
            growth, hints = None, [misuse.hint]
        if growth is not None:
            hints = [growth.hint, *(hint for hint in hints if not hint.startswith("a lower learning rate"))]
        cause = f"step {step} of {optimizer}, which left {name} not finite" if growth is None else growth.cause
        if misuse is not None:
            cause = misuse.cause
        return Fault(
            what=f"{name} ({dtype}): {lost} of {self.tensor.numel()} elements are not finite",
            where=f"group {self.group} of {optimizer}",
            cause=cause,
            key=cause,
            number=largest(self.tensor),
            details=[("and" if index else "why", why) for index, why in enumerate(self.why)],
            growth=growth,
            hints=hints,
            facts={
                "optimizer": optimizer,
                "group": self.group,
                "parameter": parameter,
                "dtype": dtype,
                "not_finite": lost,
                "elements": self.tensor.numel(),
            },
        )


def first_written(optimizer: Optimizer) -> Written | None:
    """The first weight, or state where all weights are finite, that is not, and why."""
    for group, param in params_of(optimizer):
        if not is_finite(param):
            return _blame(Written(optimizer, group, param, param))
        master = master_of(param)
        if master is not None and not is_finite(master.half):
            return _half_of_master(Written(optimizer, group, master.half, master.half), master)
    for group, param in params_of(optimizer):
        for name, tensor in state_of(optimizer, param):
            if not is_finite(tensor):
                return _state(Written(optimizer, group, param, tensor, name))
    return None


def _blame(found: Written) -> Written:
    """Add why a step may have written the weight as it is."""
    optimizer, param = found.optimizer, found.param
    options = optimizer.param_groups[found.group]
    zeros = _zeros(optimizer, param, ~torch.isfinite(param.detach()))
    for name, tensor in state_of(optimizer, param):
        if not is_finite(tensor):
            found.why.append(f"its {name} is not finite")
    for number in not_representable(optimizer):
        if number.group == found.group and number.dtype == dtype_name(param.dtype) and number.name == "eps":
            found.at_any_rate = True
            found.numbers.append(number)
            found.why.append(f"{number.text}{zeros}")
            found.hints += number.hints
    grad = param.grad
    if grad is not None and not grad.is_sparse and not is_finite(grad):
        found.at_any_rate = True
        found.why.insert(0, "its gradient was not finite")
        found.hints.insert(
            0, "look at what writes gradients outside scale_loss, such as clipping by a norm of 0 or inf"
        )
    rate = options.get("lr")
    if not found.why and isinstance(rate, float) and not math.isfinite(rate):
        found.at_any_rate = True
        found.why.append(f"its learning rate was {rate:g}")
        found.hints.append("look at what sets it, such as a scheduler that divides by zero")
    if not found.why and zeros and options.get("eps") == 0:
        found.at_any_rate = True
        found.why.append(f"eps=0{zeros}")
        found.hints.append(f"pass eps=1e-8 to {optimizer_name(optimizer)}")
    if not found.why and _is_small_update(param, options):
        found.at_any_rate = True
        size = largest(param.grad) if param.grad is not None else 0.0
        found.why.append(f"not known: its gradient is finite (largest {size:.3g}), and its {_rate(options)} is usual")
        found.hints.append("look at what else writes weights or gradients between scale_loss and the step")
    if not found.why:
        found.why.append(_update(param, options))
    if not found.hints:
        masters = [MASTERS] if param.dtype in HALF_DTYPES else []
        found.hints = [*masters, "a lower learning rate, or clipped gradients"]
    return found


def _is_small_update(param: torch.Tensor, options: ParamGroup) -> bool:
    """Whether no step of a usual rule makes a float32 weight infinite from such a gradient."""
    rate = options.get("lr")
    if param.dtype in HALF_DTYPES or not isinstance(rate, float):
        return False
    size = largest(param.grad) if param.grad is not None and not param.grad.is_sparse else 0.0
    return rate * max(size, 1.0) < LARGEST


def _update(param: torch.Tensor, options: ParamGroup) -> str:
    """Why an update from finite gradients is not finite."""
    dtype, grad = dtype_name(param.dtype), param.grad
    if param.dtype not in HALF_DTYPES:
        return f"the update was not finite in {dtype} ({_rate(options)})"
    size = "" if grad is None or grad.is_sparse else f", its largest gradient is {largest(grad):.3g}"
    return f"the update left the range of {dtype} ({_rate(options)}{size})"


def _half_of_master(found: Written, master: Master) -> Written:
    """Add why the half weight is not finite although its master is."""
    ends = f"{dtype_name(master.half.dtype)} ends at {torch.finfo(master.half.dtype).max:g}"
    found.why = [f"its float32 master reached {largest(master.value):.6g}, and {ends}"]
    found.hints = [BFLOAT16, "a lower learning rate, or weight decay"]
    return found


def _state(found: Written) -> Written:
    """Add why the state left the range of its dtype."""
    dtype = found.tensor.dtype
    grad = found.param.grad
    found.why = [f"it left the range of {dtype_name(dtype)}"]
    found.hints = [*([MASTERS] if dtype in HALF_DTYPES else []), "clipped gradients"]
    if dtype in HALF_DTYPES and grad is not None and not grad.is_sparse:
        size = largest(grad)
        square = f", whose square is {size * size:.3g}" if size * size > LARGEST >= size else ""
        found.why = [f"{found.why[0]}: the largest gradient is {size:.3g}{square}"]
        found.hints[-1] = "clipped gradients, or a smaller loss scale"
    return found


def _zeros(optimizer: Optimizer, param: torch.Tensor, lost: torch.Tensor) -> str:
    """Which state is zero where ``param`` is lost."""
    count = int(lost.sum())
    for name, tensor in state_of(optimizer, param):
        zeros = int((tensor[lost] == 0).sum()) if tensor.shape == param.shape else 0
        if zeros and "sq" in name:
            return f", and {name} is 0 in {zeros} of these {count}: a division by zero"
    return ""


def _rate(options: ParamGroup) -> str:
    return f"lr={float(options['lr']):g}" if "lr" in options else "its learning rate is not known"


# -- what an optimizer steps -------------------------------------------------------------------------------------------
def params_of(optimizer: Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    """The parameters that can be looked at here, each with the index of its group."""
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if _whole(param):
                yield index, param


def state_of(optimizer: Optimizer, param: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the optimizer's state for ``param``, each with its name."""
    held = optimizer.state.get(param)
    for name, value in held.items() if isinstance(held, dict) else ():
        if isinstance(value, torch.Tensor) and _whole(value) and value.numel():
            yield str(name), value


def _whole(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` can be looked at here: a part of a DTensor is left to its own collectives."""
    return not _torch.is_sharded(tensor) and readable(tensor)
