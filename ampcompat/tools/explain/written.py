"""From a weight, or optimizer state, that a step has written and that is not finite, to the fault."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ampcompat.tools.core import HALF_DTYPES, Master, Optimizer, master_of, name_of, optimizer_name
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.fault import Fault
from ampcompat.tools.explain.growth import History
from ampcompat.tools.explain.in_float32 import BFLOAT16
from ampcompat.tools.explain.misuse import spoiling_misuse
from ampcompat.tools.explain.numbers import MASTERS, not_representable
from ampcompat.tools.explain.weights import params_of, state_of
from ampcompat.tools.tensors import LARGEST, count_not_finite, is_finite, largest

#: A gradient whose square float32 holds.
MODERATE = 1e18
_SMALLER_STEPS = "a lower learning rate, or clipped gradients"


class Reason(NamedTuple):
    """Why a step has left something that is not finite."""

    why: str
    hints: list[str]  # what to do, the likeliest first
    is_of_size: bool = False  # smaller steps may help
    number: str = ""  # the key of the fault that is told of a number, if it is that


class _Lost(NamedTuple):
    """A tensor that is not finite."""

    group: int
    param: torch.Tensor  # the weight that it is, or belongs to
    tensor: torch.Tensor
    state: str  # its name, if it is state of the optimizer
    reasons: list[Reason]


def first_written(optimizer: Optimizer, step: int, history: History) -> Fault | None:
    """Describe what the step has left not finite; None where nothing is."""
    lost = _first_lost(optimizer)
    if lost is None:
        return None
    optimizer_class = optimizer_name(optimizer)
    parameter = name_of(lost.param)
    of_what = parameter or f"a parameter of group {lost.group}"
    name = f"{lost.state} of {of_what}" if lost.state else of_what
    dtype = dtype_name(lost.tensor.dtype)
    not_finite, elements = count_not_finite(lost.tensor), lost.tensor.numel()
    is_of_size = all(reason.is_of_size for reason in lost.reasons)
    has_lost_gradient = lost.param.grad is not None and not is_finite(lost.param.grad)
    misuse = spoiling_misuse() if is_of_size or has_lost_gradient else None
    growth = history.growth(optimizer) if is_of_size and misuse is None else None
    hints = [hint for reason in lost.reasons for hint in reason.hints]
    if misuse is not None:
        cause = misuse.cause
        hints = [misuse.hint]
    elif growth is not None:
        cause = growth.cause
        hints = [growth.hint, *(hint for hint in hints if hint != _SMALLER_STEPS)]  # it says more
    else:
        cause = f"step {step} of {optimizer_class}, which left {name} not finite"
        hints = hints or [_SMALLER_STEPS]
    return Fault(
        what=f"{name} ({dtype}): {not_finite} of {elements} elements are not finite",
        where=f"group {lost.group} of {optimizer_class}",
        cause=cause,
        key=cause if growth is None else growth.key,
        head=f"Step {step} of {optimizer_class} left {'state' if lost.state else 'a weight'} that is not finite.",
        step=step,
        number=largest(lost.tensor),
        details=[("and" if index else "why", reason.why) for index, reason in enumerate(lost.reasons)],
        growth=growth,
        hints=hints,
        covers=[reason.number for reason in lost.reasons if reason.number],
        facts={
            "optimizer": optimizer_class,
            "group": lost.group,
            "parameter": parameter,
            "dtype": dtype,
            "not_finite": not_finite,
            "elements": elements,
        },
    )


def _first_lost(optimizer: Optimizer) -> _Lost | None:
    """The first weight, or state where all weights are finite, that is not, and why."""
    for group, param in params_of(optimizer):
        if not is_finite(param):
            return _Lost(group, param, param, "", _of_weight(optimizer, group, param))
        master = master_of(param)
        if master is not None and not is_finite(master.half):
            rate = optimizer.param_groups[group].get("lr")
            return _Lost(group, master.half, master.half, "", [_of_half(master, rate)])
    for group, param in params_of(optimizer):
        for state, tensor in state_of(optimizer, param):
            if not is_finite(tensor):
                return _Lost(group, param, tensor, state, [_of_state(tensor, param)])
    return None


def _of_weight(optimizer: Optimizer, group: int, param: torch.Tensor) -> list[Reason]:
    """Why a step may have written the weight as it is: what is sure to lose it, otherwise what is likeliest."""
    zeros = _zeros(optimizer, param)
    sure = []
    if param.grad is not None and not is_finite(param.grad):
        hint = "look at what writes gradients outside scale_loss, such as clipping by a norm of 0 or inf"
        sure.append(Reason("its gradient was not finite", [hint]))
    for name, tensor in state_of(optimizer, param):
        if not is_finite(tensor):
            sure.append(_of_other_state(name, tensor, param))
    for number in not_representable(optimizer):
        if number.name == "eps" and (number.group, number.dtype) == (group, param.dtype):
            sure.append(Reason(f"{number.text}{zeros}", number.fault.hints, number=number.text))
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
        return Reason(why, [MASTERS, _SMALLER_STEPS], is_of_size=True)
    if size == 0.0:
        return Reason("its gradient is 0", ["look at what the optimizer divides by, such as the norm of a gradient"])
    if isinstance(rate, float) and rate * max(size or 0.0, 1.0) < LARGEST:  # no usual rule makes it infinite
        why = f"not known: its gradient is finite (largest {size or 0.0:.3g}), and its {rate_text} is usual"
        return Reason(why, ["look at what else writes weights or gradients between scale_loss and the step"])
    why = f"the update was not finite in {dtype} ({rate_text})"
    return Reason(why, [_SMALLER_STEPS], is_of_size=True)


def _of_half(master: Master, rate: object) -> Reason:
    """Why the half weight is not finite although its master is."""
    ends = f"{dtype_name(master.half.dtype)} ends at {torch.finfo(master.half.dtype).max:g}"
    why = f"its float32 master reached {largest(master.value):.6g}, and {ends}"
    than = f" than {rate:g}" if isinstance(rate, float) else ""
    bfloat16 = [BFLOAT16] if master.half.dtype == torch.float16 else []
    return Reason(why, [f"a lower learning rate{than}, or weight decay", *bfloat16], is_of_size=True)


def _of_other_state(name: str, state: torch.Tensor, param: torch.Tensor) -> Reason:
    """Why a weight is lost whose state is not finite."""
    size = _largest_gradient(param)
    if size is None or not size <= MODERATE:  # nor is it for a NaN
        return Reason(f"its {name} is not finite", [], is_of_size=True)
    why = f"its {name} is not finite, though its gradient is (largest {size:.3g})"
    if state.dtype in HALF_DTYPES:
        underflows = (
            f"look at what the optimizer divides by, such as a norm, whose squares are 0 in {dtype_name(state.dtype)}"
        )
        return Reason(why, [MASTERS, underflows], is_of_size=True)
    return Reason(why, ["look at what the optimizer divides by, such as a norm of 0"])


def _of_state(state: torch.Tensor, param: torch.Tensor) -> Reason:
    """Why the state left the range of its dtype."""
    why = f"it left the range of {dtype_name(state.dtype)}"
    if state.dtype not in HALF_DTYPES:
        return Reason(why, ["clipped gradients"], is_of_size=True)
    size = _largest_gradient(param)
    if size is not None:
        square = f", whose square is {size * size:.3g}" if size * size > LARGEST >= size else ""
        why = f"{why}: the largest gradient is {size:.3g}{square}"
    return Reason(why, [MASTERS, "clipped gradients, or a smaller loss scale"], is_of_size=True)


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
