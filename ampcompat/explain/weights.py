"""Weights and optimizer state that a step wrote and that are not finite: which step, which tensor, and what for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ampcompat._state import state
from ampcompat.amp.masters import master_of
from ampcompat.explain.cure import BFLOAT16
from ampcompat.explain.numbers import MASTERS, Unheld, optimizer_name, unheld
from ampcompat.explain.tensors import HALVES, LARGEST, is_finite, largest, readable
from ampcompat.explain.words import Message, cure_fields


@dataclass
class Written:
    """Describe what a step left behind.

    Attributes:
        optimizer: Class name.
        group: Index of the param group.
        parameter: Qualified name, or "" where no live model has it.
        entry: Name of the state that is not finite; "" for the weight itself.
        dtype: Of that tensor.
        bad: How many of its elements are not finite, and of how many.
        why: Causes that were found, the likeliest first.
        cures: The likeliest first.
    """

    optimizer: str
    group: int
    parameter: str
    entry: str
    dtype: torch.dtype
    bad: tuple[int, int]
    why: list[str] = field(default_factory=list)
    cures: list[str] = field(default_factory=list)
    numbers: list[Unheld] = field(default_factory=list)

    @property
    def what(self) -> str:
        """The tensor, and how much of it is lost."""
        entry = f"{self.entry} of " if self.entry else ""
        name = self.parameter or f"a parameter of group {self.group}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{entry}{name} ({dtype}): {self.bad[0]} of {self.bad[1]} elements are not finite"


def watched(optimizer: Any) -> bool:
    """Whether each step of ``optimizer`` has to be looked at: half weights without masters, or a scale that is static.

    Where scales are dynamic and weights float32, the next step is skipped, and tells.
    """
    stash = optimizer._amp_stash
    return any(p.dtype in HALVES for p in stash.direct) or not any(s.dynamic for s in stash.session.scalers)


def all_finite(optimizer: Any) -> bool:
    """Whether every parameter and all state of ``optimizer`` are finite. One host sync a device."""
    flags: dict[torch.device, list[torch.Tensor]] = {}
    for _, param in _params(optimizer):
        for _, tensor in ((("", param)), *_state(optimizer, param)):
            if readable(tensor) and tensor.numel():
                flags.setdefault(tensor.device, []).append(torch.isfinite(tensor).all())
    return all(bool(torch.stack(found).all()) for found in flags.values())


def first_written(optimizer: Any) -> Written | None:
    """The first parameter, or state where all parameters are finite, that is not, and why."""
    for group, param in _params(optimizer):
        if not is_finite(param):
            return blame(optimizer, group, param)
    for group, param in _params(optimizer):
        for name, tensor in _state(optimizer, param):
            if not is_finite(tensor):
                return _state_written(optimizer, group, param, name, tensor)
    return None


def blame(optimizer: Any, group: int, param: torch.Tensor) -> Written:
    """Why a step of ``optimizer`` may have written ``param`` as it is."""
    lost = ~torch.isfinite(param.detach())
    found = Written(optimizer_name(optimizer), group, name_of(param), "", param.dtype, (int(lost.sum()), param.numel()))
    dtype, options = str(param.dtype).removeprefix("torch."), optimizer.param_groups[group]
    for name, tensor in _state(optimizer, param):
        if not is_finite(tensor):
            found.why.append(f"its {name} is not finite")
    for number in unheld(optimizer):
        if number.group == group and number.dtype == param.dtype and number.name == "eps":
            found.numbers.append(number)
            found.why.append(f"{number.text}{_zeros(optimizer, param, lost)}")
            found.cures += number.cures
    grad = param.grad
    if grad is not None and not grad.is_sparse and not is_finite(grad):
        found.why.insert(0, "its gradient was not finite")
    elif not found.why and param.dtype in HALVES:
        size = "" if grad is None or grad.is_sparse else f", its largest gradient is {largest(grad):.3g}"
        found.why.append(f"the update left the range of {dtype} ({_rate(options)}{size})")
    elif not found.why:
        found.why.append(f"the update was not finite in {dtype} ({_rate(options)})")
    if not found.cures:
        found.cures = [*([MASTERS] if param.dtype in HALVES else []), "a lower learning rate, or clipped gradients"]
    return found


def half_of_master(param: torch.Tensor) -> Written | None:
    """Why ``param``, a weight that a forward found not finite, is so, if an optimizer under amp steps it."""
    for optimizer in list(state.optimizers.live):
        optimizer._amp_stash.look_up(optimizer)
        for group, held in _params(optimizer):
            if held is param:
                return blame(optimizer, group, param)
            master = master_of(held)
            if master is None or master.half is not param:
                continue
            if not is_finite(master.value):
                return blame(optimizer, group, master.value)
            lost = int((~torch.isfinite(param.detach())).sum())
            size, dtype = largest(master.value), str(param.dtype).removeprefix("torch.")
            why = f"its float32 master reached {size:.6g}, and {dtype} ends at {torch.finfo(param.dtype).max:g}"
            return Written(
                optimizer_name(optimizer),
                group,
                name_of(param),
                "",
                param.dtype,
                (lost, param.numel()),
                [why],
                [BFLOAT16, "a lower learning rate, or weight decay"],
            )
    return None


def stepper_of(param: torch.Tensor) -> Any:
    """The optimizer under amp that steps ``param`` or its master."""
    for optimizer in list(state.optimizers.live):
        if any(leaf is param for leaf in optimizer._amp_stash.leaves()):
            return optimizer
    return None


def _state_written(optimizer: Any, group: int, param: torch.Tensor, name: str, tensor: torch.Tensor) -> Written:
    lost = int((~torch.isfinite(tensor)).sum())
    dtype = str(tensor.dtype).removeprefix("torch.")
    found = Written(optimizer_name(optimizer), group, name_of(param), name, tensor.dtype, (lost, tensor.numel()))
    grad = param.grad
    if tensor.dtype in HALVES and grad is not None and not grad.is_sparse:
        size = largest(grad)
        square = f", whose square is {size * size:.3g}" if size * size > LARGEST >= size else ""
        found.why.append(f"it left the range of {dtype}: the largest gradient is {size:.3g}{square}")
        found.cures = [MASTERS, "clipped gradients, or a smaller loss scale"]
    else:
        found.why.append(f"it left the range of {dtype}")
        found.cures = [*([MASTERS] if tensor.dtype in HALVES else []), "clipped gradients"]
    return found


def written_message(found: Written, step: int) -> Message:
    """Describe what the step numbered ``step`` did."""
    left = "state" if found.entry else "a weight"
    head = f"Step {step} of {found.optimizer} left {left} that is not finite."
    fields = [
        ("what", found.what),
        ("where", f"group {found.group} of {found.optimizer}"),
        *(("why" if not index else "and", why) for index, why in enumerate(found.why)),
        *cure_fields(found.cures),
    ]
    return Message("weights", head, fields, {**as_data(found), "step": step})


def as_data(found: Written) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "optimizer": found.optimizer,
        "group": found.group,
        "parameter": found.parameter,
        "state": found.entry,
        "dtype": str(found.dtype).removeprefix("torch."),
        "not_finite": found.bad[0],
        "elements": found.bad[1],
        "why": found.why,
        "cures": found.cures,
    }


def name_of(param: torch.Tensor) -> str:
    """Qualified name of ``param``, or of the weight whose master it is, in the live models."""
    master = master_of(param)
    wanted = (param,) if master is None else (param, master.half)
    models = list(state.models.live)
    for model in models:
        for name, held in model.named_parameters():
            if any(held is one for one in wanted):
                return f"{type(model).__name__}.{name}" if len(models) > 1 else name
    return ""


def _params(optimizer: Any) -> Iterator[tuple[int, torch.Tensor]]:
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if readable(param):
                yield index, param


def _state(optimizer: Any, param: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    held = optimizer.state.get(param)
    for name, value in held.items() if isinstance(held, dict) else ():
        if isinstance(value, torch.Tensor) and readable(value) and value.numel():
            yield str(name), value


def _zeros(optimizer: Any, param: torch.Tensor, lost: torch.Tensor) -> str:
    """Which state is zero where ``param`` is lost."""
    count = int(lost.sum())
    for name, tensor in _state(optimizer, param):
        zeros = int((tensor[lost] == 0).sum()) if tensor.shape == param.shape else 0
        if zeros and "sq" in name:
            return f", and {name} is 0 in {zeros} of these {count}: a division by zero"
    return ""


def _rate(options: Any) -> str:
    return f"lr={float(options['lr']):g}" if "lr" in options else "its learning rate is not known"
