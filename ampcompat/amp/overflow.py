"""Whether a step is skipped, and saying so.

The flags stay on the device until the step, which reads all of them at once: one host sync. An optimizer that takes
``found_inf`` (torch's ``fused=True``) decides on the device: no sync, and the message follows with the next host read.
"""

from __future__ import annotations

from typing import Any

import torch

from ampcompat import _torch
from ampcompat._log import say
from ampcompat.amp.master_passes import push_all
from ampcompat.amp.masters import Master
from ampcompat.amp.optimizer_state import AmpOptimizerState
from ampcompat.amp.scale_move import Flag
from ampcompat.amp.scaler import LossScaler

#: Blocks without a step after which their flags become one per scaler.
MANY = 64


def joined(noted: list[Flag], more: list[Flag]) -> list[Flag]:
    """Flags of earlier blocks and of one more, of bounded number; no host sync."""
    if len(noted) < MANY:
        return [*noted, *more]
    by_owner: dict[tuple[LossScaler, int | None], torch.Tensor] = {}
    for flag in [one for one in [*noted, *more] if one.skips]:
        owner, found = (flag.scaler, flag.update), flag.found
        earlier = by_owner.get(owner)
        by_owner[owner] = found if earlier is None else torch.maximum(earlier.to(found.device), found)
    return [Flag(scaler, found, update) for (scaler, update), found in by_owner.items()]


def decide(optimizer: Any, stash: AmpOptimizerState, on_host: bool = False) -> tuple[bool, dict[str, Any]]:
    """Whether the host skips this step, and the attributes of ``stash`` for when it is made or skipped.

    Until these are set, a step that fails leaves the flags to the next one.

    Host syncs: one, or none with an optimizer that takes ``found_inf`` (it gets the flag and this says False).
    """
    report_if_known(stash)
    noted = [flag for flag in stash.overflows if flag.skips]
    after: dict[str, Any] = {"overflows": [], "already_patched": False, "skipped": False}
    if not noted:
        return False, after
    if takes_found_inf(optimizer) and not on_host:
        device = noted[0].found.device
        flags = [flag.found.to(device, non_blocking=True) for flag in noted]
        optimizer.grad_scale = None
        optimizer.found_inf = torch.stack(flags).amax() if len(flags) > 1 else flags[0]
        copies = [(s, _torch.HostCopy([found, s.scale_to_say(found.device)])) for s, found, _ in noted]
        return False, {**after, "reports": [*stash.reports, copies], "skipped": None}
    report(stash)
    after["skipped"] = skip = _say_which(noted)
    return skip, after


def end_step(optimizer: Any, stash: AmpOptimizerState, masters: list[Master], skip: bool, verdict: Any) -> None:
    """After the optimizer's own step, or instead of it; does no harm again."""
    withdraw(optimizer)
    if skip:
        optimizer._opt_called = True  # LR schedulers warn when the first step they see never happened
        free_gradients(masters)
    elif masters:  # without any, entering no_grad would be half of what this costs
        push_all(masters)
        for master in masters:
            master.spent = True
    stash.end_step(verdict)


def free_gradients(masters: list[Master]) -> None:
    """After a skipped step: clear the gradients of masters, and the half ones with them."""
    for master in masters:
        master.folded = master.half.grad = master.value.grad = None


def withdraw(optimizer: Any) -> None:
    """Take back what :func:`decide` lent to the optimizer."""
    if takes_found_inf(optimizer):
        for name in ("grad_scale", "found_inf"):
            if name in vars(optimizer):
                delattr(optimizer, name)


def takes_found_inf(optimizer: Any) -> bool:
    """Whether ``optimizer.step`` looks at ``optimizer.found_inf`` and skips on the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def report(stash: AmpOptimizerState) -> None:
    """Say which earlier steps the device skipped. Waits for the device if that is not known yet."""
    _report(stash, wait=True)


def report_if_known(stash: AmpOptimizerState) -> None:
    """As :func:`report`, of the steps whose flags have reached the host: no host sync."""
    _report(stash, wait=False)


def _report(stash: AmpOptimizerState, wait: bool) -> None:
    while stash.reports and (wait or all(copy.arrived() for _, copy in stash.reports[0])):
        overflowed = []
        for scaler, copy in stash.reports.pop(0):
            found, scale = copy.read()
            if found:
                overflowed.append((scaler, scale))
        if not stash.reports and stash.skipped is None:
            stash.skipped = bool(overflowed)
        _announce(overflowed)


def _say_which(noted: list[Flag]) -> bool:
    """Read the flags, in one host sync per device, and announce the scalers that overflowed."""
    if len(noted) == 1 and not noted[0].found.item():
        return False  # the rule
    by_device: dict[torch.device, list[Flag]] = {}
    for flag in noted:
        by_device.setdefault(flag.found.device, []).append(flag)
    overflowed = []
    for entries in by_device.values():
        held = [flag.found for flag in entries]
        flags = torch.stack(held).to("cpu").tolist() if len(held) > 1 else [held[0].item()]
        overflowed += [entry.scaler for entry, flag in zip(entries, flags, strict=True) if flag]
    _announce([(scaler, scaler.scale_to_say(torch.device("cpu")).item()) for scaler in overflowed])
    return bool(overflowed)


def _announce(overflowed: list[tuple[LossScaler, float]]) -> None:
    for scaler, scale in dict(overflowed).items():
        say(f"Gradient overflow. Skipping step, loss scaler {scaler.loss_id} reducing loss scale to {scale}")
