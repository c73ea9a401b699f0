"""``amp.on_step``: a small record of each optimizer step, for callbacks and experiment trackers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


def on_step(callback: Callable[[StepRecord], object] | object) -> StepHandle:
    """Call ``callback`` with a :class:`StepRecord` after each optimizer step, until the handle's ``remove()``.

    apex had nothing like it. May be called before ``amp.initialize`` or after; any number of callbacks, in the order in
    which they were given. A step that follows the blocks of several losses gives a record for each of their
    ``loss_id``; one without a ``scale_loss`` block since the last step gives none.

    Args:
        callback: A function of one record; or the object to log to: one with ``add_scalar`` (TensorBoard's
            ``SummaryWriter``), with ``log_metrics`` (mlflow, a Lightning logger), or with ``log`` (wandb, or anything
            else that takes a dict).

    Returns:
        A handle: ``handle.remove()`` ends it, and so does leaving a ``with`` block of the handle. ``amp``'s ``reset``
        ends all.

    Raises:
        TypeError: ``callback`` is neither.

    What a callback raises reaches the script, out of ``optimizer.step()``.

    Host syncs: none of its own. The numbers are copied while the device works, and have arrived when ``step()`` has
    read its overflow flag. An optimizer that skips on the device (``fused=True``) makes no sync: its records come with
    a later step, once they are there. ``handle.flush()`` and ``handle.remove()`` wait for those still on their way.
    """
    write = _writer_to(callback)

    def write_each_scaler(step: Step) -> None:
        for one in step.scales:
            write(StepRecord(step.step_of_call, one.loss_id, one.scale, step.skipped, one.clean_passes))

    recorder = Recorder(write_each_scaler)
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


# -- where records go --------------------------------------------------------------------------------------------------
def _writer_to(target: Any) -> Callable[[StepRecord], object]:
    """``target``, or a function that logs to it."""
    if callable(target):
        return target  # type: ignore[no-any-return]
    for name, adapter in (("add_scalar", _add_scalars), ("log_metrics", _log_metrics), ("log", _log)):
        if callable(getattr(target, name, None)):
            return adapter(target)
    raise TypeError(
        f"amp.on_step got {type(target).__name__} - it takes a function of one record, or an object with add_scalar,"
        " log_metrics or log - pass lambda record: print(record), or a SummaryWriter."
    )


def _by_name(record: StepRecord) -> dict[str, float]:
    """The numbers of ``record`` by name; each loss scaler has names of its own."""
    prefix = f"amp/loss{record.loss_id}/"
    numbers = {"scale": record.scale, "skipped": int(record.skipped), "clean_passes": record.clean_passes}
    return {prefix + name: value for name, value in numbers.items()}


def _add_scalars(writer: Any) -> Callable[[StepRecord], None]:
    def write(record: StepRecord) -> None:
        for name, value in _by_name(record).items():
            writer.add_scalar(name, value, record.step)

    return write


def _log_metrics(logger: Any) -> Callable[[StepRecord], object]:
    return lambda record: logger.log_metrics(_by_name(record), step=record.step)


def _log(run: Any) -> Callable[[StepRecord], object]:
    # Without a step of its own: wandb counts calls, and the script's own calls would be dropped.
    return lambda record: run.log({**_by_name(record), "amp/step": record.step})
