"""From a weight, or optimizer state, that a step has written and that is not finite, to the fault."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ampcompat import _torch
from ampcompat.tools.core import HALF_DTYPES, Master, Optimizer, master_of
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.fault import Fault
from ampcompat.tools.explain.growth import Grown, name_of
from ampcompat.tools.explain.hints import BFLOAT16
from ampcompat.tools.explain.misuse import Misuse
from ampcompat.tools.explain.numbers import MASTERS, Number, not_representable, optimizer_name
from ampcompat.tools.tensors import LARGEST, count_not_finite, is_finite, largest, readable

_SMALLER_STEPS = "a lower learning rate, or clipped gradients"


@dataclass
class Reason:
    """Why a step has left something that is not finite.

    Attributes:
        why: In words.
        hints: What to do, the likeliest first.
        at_any_rate: Whether a lower learning rate would not help.
        number: The number of the optimizer that its parameters' dtype does not hold, if it is that.
    """

    why: str
    hints: list[str] = field(default_factory=list)
    at_any_rate: bool = True
    number: Number | None = None


@dataclass
class Written:
    """A tensor that a step has left not finite.

    Attributes:
        optimizer: The optimizer that made the step.
        group: Index of the param group.
        param: The weight.
        tensor: The weight, its half copy, or the state that is not finite.
        state: Name of that state; "" for the weight.
        reasons: The likeliest first.
    """

    optimizer: Optimizer
    group: int
    param: torch.Tensor
    tensor: torch.Tensor
    state: str
    reasons: list[Reason]

    @property
    def head(self) -> str:
        """What the step has left."""
        return f"{optimizer_name(self.optimizer)} left {'state' if self.state else 'a weight'} that is not finite."

    @property
    def at_any_rate(self) -> bool:
        """Whether a lower learning rate would not help."""
        return any(reason.at_any_rate for reason in self.reasons)

    @property
    def numbers(self) -> list[Number]:
        """The numbers of the optimizer that are the reason."""
        return [reason.number for reason in self.reasons if reason.number is not None]

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
        lost = count_not_finite(self.tensor)
        cause = f"step {step} of {optimizer}, which left {name} not finite"
        hints = [hint for reason in self.reasons for hint in reason.hints] or [_SMALLER_STEPS]
        if misuse is not None:
            growth = None
            cause = misuse.cause
            hints = [misuse.hint]
        elif growth is not None:
            cause = growth.cause
            hints = [growth.hint, *(hint for hint in hints if not hint.startswith("a lower learning rate"))]
        facts = {
            "optimizer": optimizer,
            "group": self.group,
            "parameter": parameter,
            "dtype": dtype_name(self.tensor.dtype),
            "not_finite": lost,
            "elements": self.tensor.numel(),
        }
        return Fault(
            what=f"{name} ({facts['dtype']}): {lost} of {facts['elements']} elements are not finite",
            where=f"group {self.group} of {optimizer}",
            cause=cause,
            key=cause,
            number=largest(self.tensor),
            details=[("and" if index else "why", reason.why) for index, reason in enumerate(self.reasons)],
            growth=growth,
            hints=hints,
            facts=facts,
        )


def first_written(optimizer: Optimizer) -> Written | None:
    """The first weight, or state where all weights are finite, that is not, and why."""
    for group, param in params_of(optimizer):
        if not is_finite(param):
            return Written(optimizer, group, param, param, "", _of_weight(optimizer, group, param))
        master = master_of(param)
        if master is not None and not is_finite(master.half):
            return Written(optimizer, group, master.half, master.half, "", [_of_half(master)])
    for group, param in params_of(optimizer):
        for name, tensor in state_of(optimizer, param):
            if not is_finite(tensor):
                return Written(optimizer, group, param, tensor, name, [_of_state(tensor, param)])
    return None


def _of_weight(optimizer: Optimizer, group: int, param: torch.Tensor) -> list[Reason]:
    """Why a step may have written the weight as it is: what is sure to lose it, otherwise what is likeliest."""
    zeros = _zeros(optimizer, param)
    sure = []
    if param.grad is not None and not param.grad.is_sparse and not is_finite(param.grad):
        hint = "look at what writes gradients outside scale_loss, such as clipping by a norm of 0 or inf"
        sure.append(Reason("its gradient was not finite", [hint]))
    for name, tensor in state_of(optimizer, param):
        if not is_finite(tensor):
            sure.append(Reason(f"its {name} is not finite", at_any_rate=False))
    for number in not_representable(optimizer):
        if number.group == group and number.dtype == dtype_name(param.dtype) and number.name == "eps":
            sure.append(Reason(f"{number.text}{zeros}", number.hints, number=number))
    return sure or [_likeliest(optimizer, group, param, zeros)]


def _likeliest(optimizer: Optimizer, group: int, param: torch.Tensor, zeros: str) -> Reason:
    options = optimizer.param_groups[group]
    rate = options.get("lr")
    rate_text = "its learning rate is not known" if rate is None else f"lr={float(rate):g}"
    dtype = dtype_name(param.dtype)
    size = _largest_gradient(param)
    if isinstance(rate, float) and not math.isfinite(rate):
        hint = "look at what sets it, such as a scheduler that divides by zero"
        return Reason(f"its learning rate was {rate:g}", [hint])
    if zeros and options.get("eps") == 0:
        return Reason(f"eps=0{zeros}", [f"pass eps=1e-8 to {optimizer_name(optimizer)}"])
    if param.dtype in HALF_DTYPES:
        with_size = "" if size is None else f", its largest gradient is {size:.3g}"
        why = f"the update left the range of {dtype} ({rate_text}{with_size})"
        return Reason(why, [MASTERS, _SMALLER_STEPS], at_any_rate=False)
    if isinstance(rate, float) and rate * max(size or 0.0, 1.0) < LARGEST:  # no usual rule makes it infinite
        why = f"not known: its gradient is finite (largest {size or 0.0:.3g}), and its {rate_text} is usual"
        return Reason(why, ["look at what else writes weights or gradients between scale_loss and the step"])
    why = f"the update was not finite in {dtype} ({rate_text})"
    return Reason(why, [_SMALLER_STEPS], at_any_rate=False)


def _of_half(master: Master) -> Reason:
    """Why the half weight is not finite although its master is."""
    ends = f"{dtype_name(master.half.dtype)} ends at {torch.finfo(master.half.dtype).max:g}"
    why = f"its float32 master reached {largest(master.value):.6g}, and {ends}"
    return Reason(why, [BFLOAT16, "a lower learning rate, or weight decay"], at_any_rate=False)


def _of_state(state: torch.Tensor, param: torch.Tensor) -> Reason:
    """Why the state left the range of its dtype."""
    why = f"it left the range of {dtype_name(state.dtype)}"
    if state.dtype not in HALF_DTYPES:
        return Reason(why, ["clipped gradients"], at_any_rate=False)
    size = _largest_gradient(param)
    if size is not None:
        square = f", whose square is {size * size:.3g}" if size * size > LARGEST >= size else ""
        why = f"{why}: the largest gradient is {size:.3g}{square}"
    return Reason(why, [MASTERS, "clipped gradients, or a smaller loss scale"], at_any_rate=False)


def _largest_gradient(param: torch.Tensor) -> float | None:
    grad = param.grad
    return None if grad is None or grad.is_sparse else largest(grad)


def _zeros(optimizer: Optimizer, param: torch.Tensor) -> str:
    """Which state is zero where ``param`` is lost."""
    lost = ~torch.isfinite(param.detach())
    count = int(lost.sum())
    for name, tensor in state_of(optimizer, param):
        zeros = int((tensor[lost] == 0).sum()) if tensor.shape == param.shape else 0
        if zeros and "sq" in name:
            return f", and {name} is 0 in {zeros} of these {count}: a division by zero"
    return ""


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
