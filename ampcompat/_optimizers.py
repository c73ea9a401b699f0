"""Say what an optimizer is to amp and to the tools around it, and find those that another holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from ampcompat.amp.stash import AmpOptimizerState


class Optimizer(Protocol):
    """Type what amp needs of an optimizer (torch's own, or a wrapper as LARC), and what it sets on one."""

    param_groups: list[dict[str, Any]]
    _amp_stash: AmpOptimizerState  # while it is under amp
    _amp_wrapped: bool  # for good: the wrappers of its methods stay
    _amp_stepping: bool  # one that steps by another, meanwhile
    _opt_called: bool  # LR schedulers ask it whether there was a step
    grad_scale: torch.Tensor | None  # both as torch.amp.GradScaler lends them
    found_inf: torch.Tensor
    state: MutableMapping[Any, Any]
    step: Callable[..., object]
    zero_grad: Callable[..., object]
    add_param_group: Callable[..., object]


def is_optimizer(value: object) -> bool:
    """Whether ``value`` is an optimizer, or has what amp needs of one."""
    names = ("param_groups", "state", "step", "zero_grad", "add_param_group")
    return not isinstance(value, type) and all(map(functools.partial(hasattr, value), names))


def inner_optimizers(optimizer: object) -> list[Any]:
    """Every optimizer in the attributes of ``optimizer``, and in theirs: each once."""
    found: list[object] = [optimizer]
    for one in found:  # grows meanwhile
        for held in getattr(one, "__dict__", {}).values():
            several = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else [held]
            for inner in several:
                if isinstance(inner, torch.optim.Optimizer) and not any(inner is known for known in found):
                    found.append(inner)
    return found[1:]
