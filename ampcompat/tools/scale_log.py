"""``amp.on_step``: a small record of each optimizer step, for a callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampcompat.tools.core import observers
from ampcompat.tools.recording.recorder import Recorder
from ampcompat.tools.recording.steps import Step

__all__ = ["StepHandle", "StepRecord", "on_step"]


@dataclass(frozen=True)
class StepRecord:
    """Describe one optimizer step of one loss scaler.

    Attributes:
        step: Number of the step, from 1, over all optimizers of one ``initialize`` call, skipped steps included. Steps
            before the callback was added count too.
        loss_id: Which of the ``num_losses`` scalers.
        scale: The loss scale after the step: what the next loss is multiplied by.
        skipped: Whether the step was skipped for an overflow.
        clean_passes: Backward passes without an overflow since the scale last moved; it grows after 2000 of them.
            ``unskipped`` in ``amp.state_dict()``; 0 where the scale is a static 1, and nothing is counted.
    """

    step: int
    loss_id: int
    scale: float
    skipped: bool
    clean_passes: int


def on_step(callback: Callable[[StepRecord], object]) -> StepHandle:
    """Call ``callback`` with a :class:`StepRecord` after each optimizer step, until the handle's ``remove()``.

    apex had nothing like it. May be called before ``amp.initialize`` or after; any number of callbacks, in the order in
    which they were given. A step that follows the blocks of several losses gives a record for each of their
    ``loss_id``; one without a ``scale_loss`` block since the last step gives none.

    Args:
        callback: A function of one record, such as ``lambda record: writer.add_scalar("scale", record.scale,
            record.step)`` with TensorBoard's ``SummaryWriter``.

    Returns:
        A handle: ``handle.remove()`` ends it, and so does leaving a ``with`` block of the handle. ``amp``'s ``reset``
        ends all.

    Raises:
        TypeError: ``callback`` cannot be called.

    What a callback raises reaches the script, out of ``optimizer.step()``.

    Host syncs: none of its own. The numbers are copied while the device works, and have arrived when ``step()`` has
    read its overflow flag. An optimizer that skips on the device (``fused=True``) makes no sync: its records come with
    a later step, once they are there. ``handle.flush()`` and ``handle.remove()`` wait for those still on their way.
    """
    if not callable(callback):
        raise TypeError(
            f"amp.on_step got {type(callback).__name__} - it takes a function of one record - pass"
            " lambda record: writer.add_scalar('scale', record.scale, record.step), for instance."
        )

    def call_for_each_scaler(step: Step) -> None:
        for one in step.scales:
            callback(StepRecord(step.step_of_session, one.loss_id, one.scale, step.skipped, one.clean_passes))

    recorder = Recorder(call_for_each_scaler)
    observers().append(recorder)
    return StepHandle(recorder)


class StepHandle:
    """Ends what :func:`on_step` began; also a context manager that does so at its end."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def flush(self) -> None:
        """Hand over the records that are still on their way from the device; waits for it."""
        self._recorder.deliver(wait=True)

    def remove(self) -> None:
        """Hand over what is left and call the callback no more; a second call does nothing."""
        observers()[:] = [one for one in observers() if one is not self._recorder]
        self.flush()

    def __enter__(self) -> StepHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()
