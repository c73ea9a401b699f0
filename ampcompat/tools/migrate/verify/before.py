"""``python -m ampcompat.tools.migrate.verify.before IMPORTS RECORD STEPS SEED SCRIPT [ARGS]``: a script on ampcompat.

IMPORTS is ``apex`` for the script as it was, or ``ampcompat`` for one whose imports were renamed: apex cannot be
imported then.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence


class _Gone(importlib.abc.MetaPathFinder):
    """Answers for apex, which a migrated script must do without."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Refuse apex, leave others to the finders that follow."""
        if fullname.partition(".")[0] in ("apex", "amp_C", "apex_C"):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def main(imports: str, record: str, steps: str, seed: str, *target: str) -> None:
    """Run the script; what it raises is let through when it has been noted."""
    import torch

    from ampcompat._types import Optimizer
    from ampcompat.alias import install_as_apex
    from ampcompat.amp.observers import observers
    from ampcompat.amp.scaler import LossScaler
    from ampcompat.cli import _script
    from ampcompat.tools.migrate.verify.recording import Recording, dtype_of, seed_all
    from ampcompat.tools.parity.record import Step
    from ampcompat.tools.parity.recorder import Recorder

    class Watched(Recorder):
        """The recorder of ``parity``, which also hands on each loss when it is scaled."""

        def on_scale_loss(self, loss: torch.Tensor, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
            super().on_scale_loss(loss, scaler, optimizers)
            recording.loss(float(loss.detach().float().mean()), float(scaler.loss_scale()), dtype_of(loss))

    def on_record(step: Step) -> None:
        recording.step(step.optimizer, step.skipped)

    recording = Recording(record, int(steps))
    seed_all(int(seed))
    if imports == "apex":
        install_as_apex(force=True)
    else:
        sys.meta_path.insert(0, _Gone())
    observers().append(Watched(on_record))
    recording.watch_modules()
    with recording.ending():
        if target[0] == "-m":
            _script.run_module(target[1], target[2:])
        else:
            _script.run_path(target[0], target[1:])


if __name__ == "__main__":
    main(*sys.argv[1:])
