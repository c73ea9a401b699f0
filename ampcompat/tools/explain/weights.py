"""Weights and optimizer state that a step wrote and that are not finite: which step, which tensor, and what for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ampcompat import _torch
from ampcompat._types import Optimizer, ParamGroup
from ampcompat.amp.masters import Master, master_of
from ampcompat.amp.properties import HALF_DTYPES
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.cure import BFLOAT16
from ampcompat.tools.explain.growth import Sizes, name_of
from ampcompat.tools.explain.numbers import MASTERS, Unheld, optimizer_name, unheld
from ampcompat.tools.explain.schema import Grown, Weights
from ampcompat.tools.explain.tensors import LARGEST, is_finite, largest, readable
from ampcompat.tools.explain.words import Message, cure_fields


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
        numbers: Those among the causes that the parameters' dtype does not hold.
        growth: The weight that the last steps made many times larger, if any.
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
    growth: Grown | None = None

    @property
    def what(self) -> str:
        """The tensor, and how much of it is lost."""
        entry = f"{self.entry} of " if self.entry else ""
        name = self.parameter or f"a parameter of group {self.group}"
        dtype = dtype_name(self.dtype)
        return f"{entry}{name} ({dtype}): {self.bad[0]} of {self.bad[1]} elements are not finite"


def examine(optimizer: Optimizer) -> tuple[bool, list[Sizes]]:
    """Whether all weights that ``optimizer`` steps, the halves of masters too, and all its state are finite.

    Reads the device: one host sync each.

    Returns:
        That, and how large the weights are, which stays on the device.
    """
    stepped: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    others: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for _, param in _params(optimizer):
        if param.numel():
            stepped.setdefault((param.device, param.dtype), []).append(param)
        master = master_of(param)
        halves = [] if master is None else [master.half]
        for tensor in (*halves, *(tensor for _, tensor in _state(optimizer, param))):
            if tensor.numel():
                others.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    flags: dict[torch.device, list[torch.Tensor]] = {}
    sizes: list[Sizes] = []
    for (device, _), tensors in stepped.items():
        largest_of_each = _largest_of_each(tensors)
        flags.setdefault(device, []).append(torch.isfinite(largest_of_each).all())
        sizes.append(Sizes([id(tensor) for tensor in tensors], largest_of_each))
    for (device, _), tensors in others.items():
        flags.setdefault(device, []).append(torch.isfinite(_largest_of_each(tensors)).all())
    finite = all(bool(torch.stack(found).all()) for found in flags.values())
    return finite, sizes


def _largest_of_each(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(_torch.foreach_norm([tensor.detach() for tensor in tensors], float("inf")))


def versions(optimizer: Optimizer) -> list[int]:
    """Numbers that change when anything writes a weight that ``optimizer`` steps. Runs no op."""
    masters = [(param, master_of(param)) for group in optimizer.param_groups for param in group["params"]]
    return [param._version + (0 if master is None else master.half._version) for param, master in masters]


def first_written(optimizer: Optimizer) -> Written | None:
    """The first weight, or state where all weights are finite, that is not, and why."""
    for group, param in _params(optimizer):
        if not is_finite(param):
            return _blame(optimizer, group, param)
        master = master_of(param)
        if master is not None and not is_finite(master.half):
            return _half_of_master(optimizer, group, master)
    for group, param in _params(optimizer):
        for name, tensor in _state(optimizer, param):
            if not is_finite(tensor):
                return _state_written(optimizer, group, param, name, tensor)
    return None


def _blame(optimizer: Optimizer, group: int, param: torch.Tensor) -> Written:
    """Why a step of ``optimizer`` may have written ``param`` as it is."""
    lost = ~torch.isfinite(param.detach())
    found = Written(optimizer_name(optimizer), group, name_of(param), "", param.dtype, (int(lost.sum()), param.numel()))
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
        found.cures.insert(
            0, "look at what writes gradients outside scale_loss, such as clipping by a norm of 0 or inf"
        )
    if not found.why:
        found.why.append(_update(param, optimizer.param_groups[group]))
    if not found.cures:
        masters = [MASTERS] if param.dtype in HALF_DTYPES else []
        found.cures = [*masters, "a lower learning rate, or clipped gradients"]
    return found


def _update(param: torch.Tensor, options: ParamGroup) -> str:
    """Why an update from finite gradients is not finite."""
    dtype, grad = dtype_name(param.dtype), param.grad
    if param.dtype not in HALF_DTYPES:
        return f"the update was not finite in {dtype} ({_rate(options)})"
    size = "" if grad is None or grad.is_sparse else f", its largest gradient is {largest(grad):.3g}"
    return f"the update left the range of {dtype} ({_rate(options)}{size})"


def _half_of_master(optimizer: Optimizer, group: int, master: Master) -> Written:
    """Why the half weight is not finite although its master is."""
    half, dtype = master.half, dtype_name(master.half.dtype)
    lost = int((~torch.isfinite(half.detach())).sum())
    why = f"its float32 master reached {largest(master.value):.6g}, and {dtype} ends at {torch.finfo(half.dtype).max:g}"
    name, cures = name_of(half), [BFLOAT16, "a lower learning rate, or weight decay"]
    return Written(optimizer_name(optimizer), group, name, "", half.dtype, (lost, half.numel()), [why], cures)


def _state_written(optimizer: Optimizer, group: int, param: torch.Tensor, name: str, tensor: torch.Tensor) -> Written:
    lost = int((~torch.isfinite(tensor)).sum())
    dtype = dtype_name(tensor.dtype)
    found = Written(optimizer_name(optimizer), group, name_of(param), name, tensor.dtype, (lost, tensor.numel()))
    grad = param.grad
    if tensor.dtype in HALF_DTYPES and grad is not None and not grad.is_sparse:
        size = largest(grad)
        square = f", whose square is {size * size:.3g}" if size * size > LARGEST >= size else ""
        found.why.append(f"it left the range of {dtype}: the largest gradient is {size:.3g}{square}")
        found.cures = [MASTERS, "clipped gradients, or a smaller loss scale"]
    else:
        found.why.append(f"it left the range of {dtype}")
        found.cures = [*([MASTERS] if tensor.dtype in HALF_DTYPES else []), "clipped gradients"]
    return found


def written_message(found: Written, step: int) -> Message:
    """Describe what the step numbered ``step`` did."""
    left = "state" if found.entry else "a weight"
    head = f"Step {step} of {found.optimizer} left {left} that is not finite."
    fields = [
        ("what", found.what),
        ("where", f"group {found.group} of {found.optimizer}"),
        *(("why" if not index else "and", why) for index, why in enumerate(found.why)),
    ]
    cures = found.cures
    if found.growth is not None:
        fields.append(("growth", found.growth.text))
        others = [cure for cure in cures if not cure.startswith("a lower learning rate")]
        cures = [found.growth.cure, *others]
    fields += cure_fields(cures)
    data = Weights(
        optimizer=found.optimizer,
        group=found.group,
        parameter=found.parameter,
        state=found.entry,
        dtype=dtype_name(found.dtype),
        not_finite=found.bad[0],
        elements=found.bad[1],
        why=found.why,
        growth=found.growth,
        cures=cures,
        step=step,
    )
    return Message(head, data, fields)


def _whole(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` can be looked at here: a part of a DTensor is left to its own collectives."""
    return not _torch.is_sharded(tensor) and readable(tensor)


def _params(optimizer: Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if _whole(param):
                yield index, param


def _state(optimizer: Optimizer, param: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    held = optimizer.state.get(param)
    for name, value in held.items() if isinstance(held, dict) else ():
        if isinstance(value, torch.Tensor) and _whole(value) and value.numel():
            yield str(name), value


def _zeros(optimizer: Optimizer, param: torch.Tensor, lost: torch.Tensor) -> str:
    """Which state is zero where ``param`` is lost."""
    count = int(lost.sum())
    for name, tensor in _state(optimizer, param):
        zeros = int((tensor[lost] == 0).sum()) if tensor.shape == param.shape else 0
        if zeros and "sq" in name:
            return f", and {name} is 0 in {zeros} of these {count}: a division by zero"
    return ""


def _rate(options: ParamGroup) -> str:
    return f"lr={float(options['lr']):g}" if "lr" in options else "its learning rate is not known"
