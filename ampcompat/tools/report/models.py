"""Note what the initialized models hold while they live: a script's models are gone when it has ended."""

from __future__ import annotations

from collections import Counter

import torch

from ampcompat._state import state
from ampcompat.amp.masters import masters_of
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.report.schema import Held, Parameters


class Models:
    """Parameters by module, their devices, and the memory of weights and masters, as last looked at."""

    def __init__(self) -> None:
        self.parameters: list[Parameters] = []
        self.devices: list[str] = []
        self.held = Held()

    def look(self) -> None:
        """Note the models that live now, if any do. No host sync."""
        models = list(state.models.live)
        if not models:
            return
        tensors = {id(t): t for m in models for t in (*m.parameters(), *m.buffers()) if t.is_floating_point()}
        masters = {id(master): master for m in models for master in masters_of(m)}
        self.devices = sorted({t.device.type for t in tensors.values()})
        self.held = Held(
            weights=sum(t.numel() * t.element_size() for t in tensors.values()),
            weights_in_float32=sum(4 * t.numel() for t in tensors.values()),
            masters=sum(4 * m.value.numel() for m in masters.values()),
        )
        self.parameters = _parameters(models)


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
