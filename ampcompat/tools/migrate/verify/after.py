"""``python after.py RECORD STEPS SEED SCRIPT [ARGS]``: the migrated script, where neither apex nor ampcompat is there.

Run as a file: nothing of ampcompat is imported, and an import of it fails from here on as it would where it is not
installed.
"""

from __future__ import annotations

import importlib.abc
import itertools
import os
import runpy
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ampcompat.tools.migrate.verify.recording import Recording

    Outputs = torch.Tensor | Iterable[torch.Tensor]

GONE = ("apex", "ampcompat", "amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")


class _Gone(importlib.abc.MetaPathFinder):
    """Answers for the packages that the script must do without."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Refuse them, leave the others to the finders that follow."""
        if fullname.partition(".")[0] in GONE:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def main(record: str, steps: str, seed: str, *target: str) -> None:
    """Run the script; what it raises is let through when it has been noted."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    module = runpy.run_path(os.path.join(here, "recording.py"))
    sys.meta_path.insert(0, _Gone())
    recording: Recording = module["Recording"](record, int(steps))
    module["seed_all"](int(seed))
    _watch(recording, module["dtype_of"])
    recording.watch_modules()
    script = target[1] if target[0] == "-m" else target[0]
    sys.argv[:] = [script, *target[2 if target[0] == "-m" else 1 :]]
    sys.path.insert(0, os.getcwd() if target[0] == "-m" else os.path.dirname(os.path.realpath(script)))
    with recording.ending():
        if target[0] == "-m":
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")


def _watch(recording: Recording, dtype_of: Callable[[torch.Tensor], str]) -> None:
    """Have GradScaler tell what it scales and steps."""
    import torch

    scaler = torch.amp.GradScaler
    scale, step = scaler.scale, scaler.step
    numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
    count = itertools.count()
    # A scaler that is switched off also steps what no loss was scaled for: apex knew nothing of such a step.
    used: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()

    def scaled(self: torch.amp.GradScaler, outputs: Outputs) -> Outputs:
        used.add(self)
        result = scale(self, outputs)  # first: the scale is made on the first call
        if isinstance(outputs, torch.Tensor):
            recording.loss(float(outputs.detach().float().mean()), float(self.get_scale()), dtype_of(outputs))
        return result

    def stepped(
        self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object
    ) -> float | None:
        taken: list[bool] = []
        hook = optimizer.register_step_post_hook(lambda *_: taken.append(True))
        try:
            return step(self, optimizer, *args, **kwargs)
        finally:
            hook.remove()
            if self in used:
                number = numbers[optimizer] if optimizer in numbers else numbers.setdefault(optimizer, next(count))
                recording.step(number, not taken)

    scaler.scale, scaler.step = scaled, stepped  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    main(*sys.argv[1:])
