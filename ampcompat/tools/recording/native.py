"""``python native.py``: run the migrated script, where neither apex nor ampcompat is there, and record it.

Run as a file: nothing of ampcompat is imported, and an import of it fails from here on as it would where it is not
installed.
"""

from __future__ import annotations

import os
import runpy
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ampcompat.tools.recording.journal import Journal

    Outputs = torch.Tensor | Iterable[torch.Tensor]


def main(argv: Sequence[str]) -> None:
    """Run the script; what it raises is let through when it has been noted."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    ours = runpy.run_path(os.path.join(here, "journal.py"))
    settings, target = ours["read_words"](argv)
    sys.meta_path.insert(0, ours["Missing"]((*ours["APEX"], "ampcompat")))
    journal: Journal = ours["Journal"](settings.journal, settings.steps)
    ours["seed_all"](settings.seed)
    _watch_scaler(journal)
    journal.watch_modules()
    with journal.ending():
        _run(target)


def _run(target: Sequence[str]) -> None:
    """Run ``[script, args…]`` or ``["-m", module, args…]`` as ``python`` does."""
    is_module = target[0] == "-m"
    script, *rest = target[1:] if is_module else target
    sys.argv[:] = [script, *rest]
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.realpath(script)))
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def _watch_scaler(journal: Journal) -> None:
    """Have GradScaler tell what it scales and steps."""
    import torch

    scaler = torch.amp.GradScaler
    scale = scaler.scale
    step = scaler.step
    numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
    # A scaler that is switched off also steps what no loss was scaled for: apex knew nothing of such a step.
    used: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
    optimizers = 0

    def scaled(self: torch.amp.GradScaler, outputs: Outputs) -> Outputs:
        used.add(self)
        result = scale(self, outputs)  # first: the scale is made on the first call
        if isinstance(outputs, torch.Tensor):
            journal.loss(float(outputs.detach().float().mean()), float(self.get_scale()), outputs.dtype)
        return result

    def stepped(
        self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object
    ) -> float | None:
        nonlocal optimizers
        taken: list[bool] = []
        hook = optimizer.register_step_post_hook(lambda *_: taken.append(True))
        try:
            return step(self, optimizer, *args, **kwargs)
        finally:
            hook.remove()
            if self in used:
                if optimizer not in numbers:
                    numbers[optimizer] = optimizers
                    optimizers += 1
                journal.step(optimizer=numbers[optimizer], skipped=not taken)

    scaler.scale, scaler.step = scaled, stepped  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    main(sys.argv[1:])
