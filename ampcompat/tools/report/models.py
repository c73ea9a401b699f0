"""What the initialized models hold, seen while they live: a script's models are gone when it has ended."""

from __future__ import annotations

from collections import Counter

import torch

from ampcompat.tools.core import LatestCall, latest_call, live_models, masters_of
from ampcompat.tools.devices import slow_halves
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.report.facts import Facts, Parameters, Setting


def add_models(facts: Facts) -> None:
    """Note in ``facts`` what ``initialize`` was asked for, and the models that live now, if any do. No host sync."""
    latest = latest_call()
    if latest is not None:
        facts.setting = _setting(latest)
    if torch.cuda.is_available():
        facts.memory.peak = torch.cuda.max_memory_allocated()
    models = live_models()
    if not models:
        return
    tensors = {id(t): t for m in models for t in (*m.parameters(), *m.buffers()) if t.is_floating_point()}
    masters = {id(master): master for m in models for master in masters_of(m)}
    facts.devices = sorted({t.device.type for t in tensors.values()})
    facts.memory.weights = sum(t.numel() * t.element_size() for t in tensors.values())
    facts.memory.weights_in_float32 = sum(4 * t.numel() for t in tensors.values())
    facts.memory.masters = sum(4 * m.value.numel() for m in masters.values())
    facts.parameters = _parameters(models)
    if latest is not None and latest.half_dtype is not None:
        reasons = [slow_halves(device, latest.half_dtype) for device in facts.devices]
        facts.slow = [reason for reason in reasons if reason]


def _setting(latest: LatestCall) -> Setting:
    half = "" if latest.half_dtype is None else dtype_name(latest.half_dtype)
    return Setting(initialized=True, enabled=latest.enabled, opt_level=latest.opt_level, half=half)


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
            for dtype in sorted(sizes):
                found.append(Parameters(name, type(module).__name__, dtype, sizes[dtype]))
    return found
