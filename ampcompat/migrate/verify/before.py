"""``python -m ampcompat.migrate.verify.before RECORD STEPS SEED SCRIPT [ARGS]``: the script on ampcompat, recorded."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(record: str, steps: str, seed: str, *target: str) -> None:
    """Run the script; what it raises is let through when it has been noted."""
    import torch

    from ampcompat._types import Optimizer
    from ampcompat.alias import install_as_apex
    from ampcompat.amp.observers import observers
    from ampcompat.amp.scaler import LossScaler
    from ampcompat.cli import _script
    from ampcompat.migrate.verify.recording import Recording, dtype_of, seed_all
    from ampcompat.parity.record import Step
    from ampcompat.parity.recorder import Recorder

    class Watched(Recorder):
        """The recorder of ``parity``, which also hands on each loss when it is scaled."""

        def on_scale_loss(self, loss: torch.Tensor, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
            super().on_scale_loss(loss, scaler, optimizers)
            recording.loss(float(loss.detach().float().mean()), float(scaler.loss_scale()), dtype_of(loss))

    def on_record(step: Step) -> None:
        recording.step(step.optimizer, step.skipped)

    recording = Recording(record, int(steps))
    seed_all(int(seed))
    install_as_apex(force=True)
    observers().append(Watched(on_record))
    recording.watch_modules()
    with recording.ending():
        if target[0] == "-m":
            _script.run_module(target[1], target[2:])
        else:
            _script.run_path(target[0], target[1:])


if __name__ == "__main__":
    main(*sys.argv[1:])
