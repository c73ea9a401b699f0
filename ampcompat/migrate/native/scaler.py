"""The statements that take the place of ``amp.initialize``: a device, a switch where one is needed, and scalers."""

from __future__ import annotations

import ast

from ampcompat.check.source import number
from ampcompat.migrate.native.facts import Facts
from ampcompat.migrate.result import MARK

# GradScaler has no static mode: with this interval the scale does not grow.
NEVER = "2**31 - 1"


def made_lines(facts: Facts) -> list[str]:
    """Source text of each statement, in order."""
    lines = [facts.rebinds] if facts.rebinds else []
    if facts.is_global and facts.branch is None:
        lines.append(_global(facts))
    model = facts.models[0]
    parameters = f"{model}[0].parameters()" if model in facts.containers else f"{model}.parameters()"
    if model in facts.walked:
        parameters = f"p for model in {model} for p in model.parameters()"
    lines.append(f"{facts.device} = next({parameters}).device.type")
    if facts.switched:
        lines.append(f"{facts.switch} = {facts.enabled or 'True'}")
    options, notes = _options(facts)
    scaler = f"torch.amp.GradScaler({', '.join([facts.device, *options])})"
    if facts.many:
        count = facts.option(10, "num_losses")
        scaler = f"[{scaler} for _ in range({ast.unparse(count) if count is not None else 1})]"
    lines.append("".join(f"{MARK}{note}\n" for note in [*facts.notes, *notes]) + f"{facts.scaler} = {scaler}")
    return lines


def switched_off_lines(facts: Facts) -> list[str]:
    """Return what holds when the ``if`` around ``initialize`` is not entered."""
    off = "torch.amp.GradScaler(enabled=False)"
    if facts.many:
        count = facts.option(10, "num_losses")
        off = f"[{off} for _ in range({ast.unparse(count) if count is not None else 1})]"
    lines = [_global(facts)] if facts.is_global else []
    return [*lines, f'{facts.device}, {facts.switch} = "cpu", False', f"{facts.scaler} = {off}"]


def _global(facts: Facts) -> str:
    names = [facts.device, *([facts.switch] if facts.switched else []), facts.scaler]
    return f"global {', '.join(names)}"


def _options(facts: Facts) -> tuple[list[str], list[str]]:
    """Arguments of GradScaler for apex's ``loss_scale`` and its limits, and what they cannot express."""
    options: list[str] = []
    notes: list[str] = []
    scale = facts.option(8, "loss_scale")
    largest = number(facts.option(13, "max_loss_scale"))
    given = number(scale) if scale is not None else None
    if given is None and isinstance(scale, ast.Constant) and isinstance(scale.value, str) and scale.value != "dynamic":
        try:
            given = float(scale.value)
        except ValueError:
            notes.append(f"loss_scale={scale.value!r} is no number")
    elif given is None and scale is not None and not isinstance(scale, ast.Constant):
        notes.append(f"the scale is dynamic here; loss_scale was {ast.unparse(scale)}")
    enabled = facts.switch if facts.switched else None
    if facts.static or given == 1.0:
        enabled = "False"
    elif given is not None:
        options += [f"init_scale={given!r}", f"growth_interval={NEVER}"]
        notes.append("a static scale halves here when gradients overflow, and the step is skipped")
    elif largest is not None and largest < 2.0**16:
        options.append(f"init_scale={largest!r}")
    if facts.option(12, "min_loss_scale") is not None or facts.option(13, "max_loss_scale") is not None:
        notes.append("GradScaler has no min_loss_scale and no max_loss_scale")
    return [*options, *([f"enabled={enabled}"] if enabled else [])], notes
