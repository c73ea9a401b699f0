"""Weights and optimizer state that a step wrote and that are not finite: which tensor, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import torch

from ampcompat import _torch
from ampcompat.tools.core import HALF_DTYPES, Master, Optimizer, ParamGroup, master_of
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.growth import Grown, name_of
from ampcompat.tools.explain.hints import BFLOAT16
from ampcompat.tools.explain.messages import Message, hint_lines
from ampcompat.tools.explain.numbers import MASTERS, Number, not_representable, optimizer_name
from ampcompat.tools.tensors import LARGEST, is_finite, largest, readable


@dataclass
class LostTensor:
    """Describe a weight, or state, that a step left not finite.

    Attributes:
        optimizer: Class name.
        group: Index of the param group.
        parameter: Qualified name, or "" where no live model has it.
        state: Name of the state that is not finite; "" for the weight itself.
        dtype: Of that tensor.
        not_finite: How many of its elements are not finite.
        elements: How many there are.
        why: Causes that were found, the likeliest first.
        hints: What to do, the likeliest first.
        numbers: Those among the causes that the parameters' dtype does not hold.
        of_gradient: Whether the gradient of the step was not finite already.
    """

    optimizer: str
    group: int
    parameter: str
    state: str
    dtype: str
    not_finite: int
    elements: int
    why: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    numbers: list[Number] = field(default_factory=list)
    of_gradient: bool = False


def weights_message(lost: LostTensor, step: int, growth: Grown | None) -> Message:
    """Tell of ``lost``, which the step numbered ``step`` has written, and of what grew in the last steps."""
    hints = lost.hints
    if growth is not None:
        hints = [growth.hint, *(hint for hint in hints if not hint.startswith("a lower learning rate"))]
    of_what = lost.parameter or f"a parameter of group {lost.group}"
    tensor = f"{lost.state} of {of_what}" if lost.state else of_what
    lines = [
        ("what", f"{tensor} ({lost.dtype}): {lost.not_finite} of {lost.elements} elements are not finite"),
        ("where", f"group {lost.group} of {lost.optimizer}"),
        *(("and" if index else "why", why) for index, why in enumerate(lost.why)),
    ]
    if growth is not None:
        lines.append(("growth", growth.text))
    of_step = f"step {step} of {lost.optimizer}, which left {tensor} not finite"
    content = asdict(lost)
    del content["numbers"], content["of_gradient"]
    return Message(
        kind="weights",
        head=f"Step {step} of {lost.optimizer} left {'state' if lost.state else 'a weight'} that is not finite.",
        lines=[*lines, *hint_lines(hints)],
        content={**content, "growth": None if growth is None else asdict(growth), "hints": hints, "step": step},
        cause=of_step if growth is None else growth.cause,
    )


def first_written(optimizer: Optimizer) -> LostTensor | None:
    """The first weight, or state where all weights are finite, that is not, and why."""
    for group, param in params_of(optimizer):
        if not is_finite(param):
            return _blame(optimizer, group, param)
        master = master_of(param)
        if master is not None and not is_finite(master.half):
            return _half_of_master(optimizer, group, master)
    for group, param in params_of(optimizer):
        for name, tensor in state_of(optimizer, param):
            if not is_finite(tensor):
                return _state_written(optimizer, group, param, name, tensor)
    return None


def _lost(optimizer: Optimizer, group: int, param: torch.Tensor, tensor: torch.Tensor, state: str = "") -> LostTensor:
    """Describe ``tensor``, which is ``param`` or its ``state``."""
    return LostTensor(
        optimizer=optimizer_name(optimizer),
        group=group,
        parameter=name_of(param),
        state=state,
        dtype=dtype_name(tensor.dtype),
        not_finite=int((~torch.isfinite(tensor.detach())).sum()),
        elements=tensor.numel(),
    )


def _blame(optimizer: Optimizer, group: int, param: torch.Tensor) -> LostTensor:
    """Why a step of ``optimizer`` may have written ``param`` as it is."""
    lost = ~torch.isfinite(param.detach())
    found = _lost(optimizer, group, param, param)
    for name, tensor in state_of(optimizer, param):
        if not is_finite(tensor):
            found.why.append(f"its {name} is not finite")
    for number in not_representable(optimizer):
        if number.group == group and number.dtype == found.dtype and number.name == "eps":
            found.numbers.append(number)
            found.why.append(f"{number.text}{_zeros(optimizer, param, lost)}")
            found.hints += number.hints
    grad = param.grad
    if grad is not None and not grad.is_sparse and not is_finite(grad):
        found.of_gradient = True
        found.why.insert(0, "its gradient was not finite")
        found.hints.insert(
            0, "look at what writes gradients outside scale_loss, such as clipping by a norm of 0 or inf"
        )
    if not found.why:
        found.why.append(_update(param, optimizer.param_groups[group]))
    if not found.hints:
        masters = [MASTERS] if param.dtype in HALF_DTYPES else []
        found.hints = [*masters, "a lower learning rate, or clipped gradients"]
    return found


def _update(param: torch.Tensor, options: ParamGroup) -> str:
    """Why an update from finite gradients is not finite."""
    dtype, grad = dtype_name(param.dtype), param.grad
    if param.dtype not in HALF_DTYPES:
        return f"the update was not finite in {dtype} ({_rate(options)})"
    size = "" if grad is None or grad.is_sparse else f", its largest gradient is {largest(grad):.3g}"
    return f"the update left the range of {dtype} ({_rate(options)}{size})"


def _half_of_master(optimizer: Optimizer, group: int, master: Master) -> LostTensor:
    """Why the half weight is not finite although its master is."""
    half = master.half
    found = _lost(optimizer, group, half, half)
    ends = f"{found.dtype} ends at {torch.finfo(half.dtype).max:g}"
    found.why = [f"its float32 master reached {largest(master.value):.6g}, and {ends}"]
    found.hints = [BFLOAT16, "a lower learning rate, or weight decay"]
    return found


def _state_written(
    optimizer: Optimizer, group: int, param: torch.Tensor, name: str, tensor: torch.Tensor
) -> LostTensor:
    found = _lost(optimizer, group, param, tensor, name)
    dtype = found.dtype
    grad = param.grad
    if tensor.dtype in HALF_DTYPES and grad is not None and not grad.is_sparse:
        size = largest(grad)
        square = f", whose square is {size * size:.3g}" if size * size > LARGEST >= size else ""
        found.why.append(f"it left the range of {dtype}: the largest gradient is {size:.3g}{square}")
        found.hints = [MASTERS, "clipped gradients, or a smaller loss scale"]
    else:
        found.why.append(f"it left the range of {dtype}")
        found.hints = [*([MASTERS] if tensor.dtype in HALF_DTYPES else []), "clipped gradients"]
    return found


def _whole(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` can be looked at here: a part of a DTensor is left to its own collectives."""
    return not _torch.is_sharded(tensor) and readable(tensor)


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
