"""Installs the rules on the dispatcher's autocast keys, once for all calls of ``amp.initialize``, with one undo."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._undo import on_undo
from ampcompat.amp import compiled, wrappers
from ampcompat.amp.kernels import make_kernel
from ampcompat.amp.overloads import Rule, planned


@dataclass
class Installed:
    """What is in force, by device type."""

    plans: dict[str, dict[torch._ops.OpOverload, Rule]] = field(default_factory=dict)
    undo: ExitStack = field(default_factory=ExitStack)

    def lines(self) -> list[str]:
        """The rules in words, one a line."""
        return [f"{d} {_torch.op_name(op)} {rule.value}" for d, plan in self.plans.items() for op, rule in plan.items()]


def installed() -> Installed:
    """The rules that are on the dispatcher now."""
    made: Installed = state.room("amp.rules", Installed)
    return made


def acquire(device_types: Iterable[str]) -> None:
    """Install the rules for ``device_types``, as far as they are not installed and native autocast lacks them.

    Idempotent for each device type. A device type that this torch cannot autocast is passed over. The rules act only
    where autocast is on. Nothing is installed if any registration fails.

    Args:
        device_types: As in ``torch.device(...).type``.
    """
    rules = installed()
    missing = [
        (d, key) for d in dict.fromkeys(device_types) if d not in rules.plans and (key := _torch.autocast_key(d))
    ]
    if not missing:
        return
    first = not rules.plans
    with ExitStack() as undo:
        plans = {}
        for device_type, key in missing:
            plans[device_type] = planned(device_type, key)
            registrations = _torch.Registrations()
            on_undo(undo, registrations.close)
            for op, rule in plans[device_type].items():
                registrations.add(op, make_kernel(rule, op, device_type, key), key)
        if first:
            wrappers.install(undo)
            on_undo(state.undo, release)
        before = rules.lines()
        on_undo(undo, compiled.bind, before)
        compiled.bind([*before, *Installed(plans).lines()])
        on_undo(undo, _forget, rules, plans)
        rules.plans.update(plans)
        rules.undo.push(undo.pop_all())


def release() -> None:
    """Take all rules off again. Idempotent."""
    installed().undo.close()


def _forget(rules: Installed, plans: Iterable[str]) -> None:
    for device_type in plans:
        rules.plans.pop(device_type, None)
