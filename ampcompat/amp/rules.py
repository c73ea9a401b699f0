"""Installs the rules on the dispatcher's autocast keys, once for all calls of ``amp.initialize``, with one undo."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat.amp.kernels import make_kernel
from ampcompat.amp.overloads import Rule, planned


@dataclass
class Installed:
    """What is on the dispatcher, by device type."""

    plans: dict[str, dict[torch._ops.OpOverload, Rule]] = field(default_factory=dict)
    registrations: dict[str, _torch.Registrations] = field(default_factory=dict)


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
    missing = [(d, key) for d in dict.fromkeys(device_types) if d not in rules.plans and (key := _torch.autocast_key(d))]
    if not missing:
        return
    if not rules.plans:
        state.undo.callback(release)
    for device_type, key in missing:
        plan, registrations = planned(device_type, key), _torch.Registrations()
        try:
            for op, rule in plan.items():
                registrations.add(op, make_kernel(rule, op, device_type, key), key)
        except BaseException:
            registrations.close()
            raise
        rules.plans[device_type] = plan
        rules.registrations[device_type] = registrations


def release() -> None:
    """Take all rules off the dispatcher. Idempotent."""
    rules = installed()
    for registrations in rules.registrations.values():
        registrations.close()
    rules.registrations.clear()
    rules.plans.clear()
