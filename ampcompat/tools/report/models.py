"""Note what the initialized models hold while they live: a script's models are gone when it has ended."""

from __future__ import annotations

from collections import Counter

import torch

from ampcompat._state import state
from ampcompat.amp.masters import masters_of
from ampcompat.tools.devices import slow_halves
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.report.record import Record
from ampcompat.tools.report.schema import Parameters, Setting


def look(record: Record) -> None:
    """Note in ``record`` what ``initialize`` was asked for, and the models that live now, if any do. No host sync."""
    record.setting = _setting()
    if torch.cuda.is_available():
        record.memory.peak = torch.cuda.max_memory_allocated()
    models = list(state.models.live)
    if not models:
        return
    tensors = {id(t): t for m in models for t in (*m.parameters(), *m.buffers()) if t.is_floating_point()}
    masters = {id(master): master for m in models for master in masters_of(m)}
    record.devices = sorted({t.device.type for t in tensors.values()})
    record.memory.weights = sum(t.numel() * t.element_size() for t in tensors.values())
    record.memory.weights_in_float32 = sum(4 * t.numel() for t in tensors.values())
    record.memory.masters = sum(4 * m.value.numel() for m in masters.values())
    record.parameters = _parameters(models)
    record.slow = _slow_devices(record)


def _parameters(models: list[torch.nn.Module]) -> list[Parameters]:
    """The parameters of each module by dtype; a shared one counts where it is met first."""
    found = []
    seen: set[int] = set()
    for model in models:
        root = type(model).__name__ if len(models) > 1 else ""
        for path, module in model.named_modules():
            own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
            seen.update(map(id, own))
            sizes: Counter[str] = Counter()
            for param in own:
                sizes[dtype_name(param.dtype)] += param.numel()
            name = ".".join(filter(None, (root, path)))
            found += [Parameters(name, type(module).__name__, dtype, sizes[dtype]) for dtype in sorted(sizes)]
    return found


def _setting() -> Setting:
    """What the latest ``initialize`` was asked for."""
    latest = state.session
    if latest is None:
        return Setting()
    is_half = latest.enabled and (latest.policy.half_dtype or latest.policy.casts.enabled)
    half = dtype_name(latest.half_dtype) if is_half else ""
    return Setting(initialized=True, enabled=latest.enabled, opt_level=latest.policy.opt_level, half=half)


def _slow_devices(record: Record) -> list[str]:
    """Why half is not fast on those devices where it is used and is not."""
    if state.session is None or not record.setting.half:
        return []
    reasons = [slow_halves(device, state.session.half_dtype) for device in record.devices]
    return [reason for reason in reasons if reason]
