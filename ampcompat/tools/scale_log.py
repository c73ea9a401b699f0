"""``amp.on_step``: a small record of each optimizer step, for callbacks and experiment trackers."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from ampcompat import _torch
from ampcompat._state import state
from ampcompat._types import Optimizer
from ampcompat.amp.scaler import LossScaler

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


#: Scale and clean passes; on their way, where they are on a device.
_Numbers: TypeAlias = "_torch.HostCopy | tuple[float, float]"


class _Writer(Protocol):
    def add_scalar(self, tag: str, value: float, step: int, /) -> object: ...


class _Logger(Protocol):
    def log_metrics(self, metrics: dict[str, float], /, *, step: int) -> object: ...


class _Run(Protocol):
    def log(self, values: dict[str, float], /) -> object: ...


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
    watcher = _Watcher(_callback(callback))
    state.observers.append(watcher)
    return StepHandle(watcher)


class StepHandle:
    """Ends what :func:`on_step` began; also a context manager that does so at its end."""

    def __init__(self, watcher: _Watcher) -> None:
        self._watcher = watcher

    def flush(self) -> None:
        """Hand over the records that are still on their way from the device; waits for it."""
        self._watcher.deliver(wait=True)

    def remove(self) -> None:
        """Hand over what is left and call the callback no more; a second call does nothing."""
        state.observers[:] = [one for one in state.observers if one is not self._watcher]
        self.flush()

    def __enter__(self) -> StepHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


class Skip:
    """Whether a step was skipped; where only the device knows, that is on its way to the host for amp's own message.

    Args:
        optimizer: It has just made the step, or skipped it.
        skipped: What an observer is told of that; None where only the device knows.
    """

    def __init__(self, optimizer: Optimizer, skipped: bool | None) -> None:
        stash = optimizer._amp_stash
        if skipped is None:
            skipped = stash.last_step.skipped  # another observer may have asked the device meanwhile
        self._known = skipped
        self._flags = [copy for _, copy in stash.undecided_steps[-1]] if skipped is None else []

    def arrived(self) -> bool:
        """Whether :meth:`read` need not wait."""
        return all(flag.arrived() for flag in self._flags)

    def read(self) -> bool:
        """Whether it was skipped; waits for the device where that has not arrived."""
        return self._known or any(flag.read()[0] for flag in self._flags)


@dataclass
class _Underway:
    """A record whose numbers may still be on the device."""

    step: int
    loss_id: int
    skip: Skip
    numbers: _Numbers

    def arrived(self) -> bool:
        return self.skip.arrived() and (isinstance(self.numbers, tuple) or self.numbers.arrived())

    def read(self) -> StepRecord:
        scale, passes = self.numbers if isinstance(self.numbers, tuple) else self.numbers.read()
        return StepRecord(self.step, self.loss_id, scale, self.skip.read(), int(passes))


class _Watcher:
    """The observer behind one callback."""

    def __init__(self, callback: Callable[[StepRecord], object]) -> None:
        self._callback = callback
        self._underway: deque[_Underway] = deque()
        # Of each optimizer, the scalers of its blocks since the last step, with what was copied at their ends.
        self._blocks: weakref.WeakKeyDictionary[Optimizer, dict[LossScaler, _Numbers | None]] = (
            weakref.WeakKeyDictionary()
        )

    def on_scale_loss(self, loss: torch.Tensor, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            self._blocks.setdefault(optimizer, {})[scaler] = None

    def on_gradients(self, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        if _torch.is_capturing():  # a replay runs no Python
            return
        numbers = _numbers(scaler)
        for optimizer in optimizers:
            self._blocks.setdefault(optimizer, {})[scaler] = numbers

    def on_step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        if _torch.is_capturing():
            return
        step = optimizer._amp_stash.session.steps
        skip = Skip(optimizer, skipped)
        for scaler, copied in sorted(self._blocks.pop(optimizer, {}).items(), key=lambda one: one[0].loss_id):
            numbers = _numbers(scaler) if copied is None else copied  # None: gradients were left scaled until the step
            self._underway.append(_Underway(step, scaler.loss_id, skip, numbers))
        self.deliver()

    def deliver(self, wait: bool = False) -> None:
        """Hand over records, oldest first, as far as they have arrived."""
        while self._underway and (wait or self._underway[0].arrived()):
            self._callback(self._underway.popleft().read())


def _numbers(scaler: LossScaler) -> _Numbers:
    """The numbers of ``scaler`` as they are now. No host sync."""
    scale, passes = scaler.core.scale, scaler.core.clean_passes
    if scale is None or passes is None:  # nothing was scaled yet, or it is a static 1
        return scaler.get_scale(), scaler._unskipped
    return _torch.HostCopy([scale, passes.to(scale.dtype)])


# -- where records go --------------------------------------------------------------------------------------------------
def _callback(target: Any) -> Callable[[StepRecord], object]:
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


def _named(record: StepRecord) -> dict[str, float]:
    """The numbers of ``record`` by name; each loss scaler has names of its own."""
    prefix = f"amp/loss{record.loss_id}/"
    numbers = {"scale": record.scale, "skipped": int(record.skipped), "clean_passes": record.clean_passes}
    return {prefix + name: value for name, value in numbers.items()}


def _add_scalars(writer: _Writer) -> Callable[[StepRecord], None]:
    def write(record: StepRecord) -> None:
        for name, value in _named(record).items():
            writer.add_scalar(name, value, record.step)

    return write


def _log_metrics(logger: _Logger) -> Callable[[StepRecord], object]:
    return lambda record: logger.log_metrics(_named(record), step=record.step)


def _log(run: _Run) -> Callable[[StepRecord], object]:
    # Without a step of its own: wandb counts calls, and the script's own calls would be dropped.
    return lambda record: run.log({**_named(record), "amp/step": record.step})
