"""The observer that explains overflows: keeps the last forwards, and runs them again when a step was lost."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ampcompat.tools.core import (
    Args,
    Kwargs,
    LossScaler,
    Optimizer,
    first_scaler,
    is_replica,
    observers,
    tensors_in,
    was_skipped,
)
from ampcompat.tools.explain.fault import fault_message, outside_message
from ampcompat.tools.explain.forwards import BufferCopies, Forward
from ampcompat.tools.explain.growth import Grown
from ampcompat.tools.explain.loss_watch import LossWatch
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.explain.probe import Event
from ampcompat.tools.explain.replay import Finding, replay, runs_alone
from ampcompat.tools.explain.weight_watch import WeightWatch
from ampcompat.tools.frames import hide_tools
from ampcompat.tools.tensors import is_finite

#: Forwards kept at a time, and steps after which a forward that no backward followed is forgotten.
MOST_FORWARDS, OLDEST = 16, 3


class OverflowExplainer:
    """Observer (see :mod:`ampcompat.amp.observers`) that explains overflows.

    Args:
        limit: Different faults that are explained; after these the run is no longer observed.
        stop: Whether the script ends with the last of them.
        json: Whether each message is a line of JSON.
    """

    def __init__(self, limit: int, stop: bool, json: bool) -> None:
        self.limit, self.stop, self.json = limit, stop, json
        self.left = limit
        self.weights: weakref.WeakKeyDictionary[Optimizer, WeightWatch] = weakref.WeakKeyDictionary()
        self.forwards: deque[Forward] = deque(maxlen=MOST_FORWARDS)
        self.buffers: weakref.WeakKeyDictionary[torch.nn.Module, BufferCopies] = weakref.WeakKeyDictionary()
        self.running: list[Forward | None] = []  # forwards that have begun; None for those inside of another
        self.block: tuple[int, ...] = ()
        self.scaler: LossScaler | None = None
        self.explained: set[tuple[object, ...]] = set()
        self.lost = False  # weights, by a step
        self.loss_watch = LossWatch()

    # -- events ------------------------------------------------------------------------------------------------------
    def on_forward(self, model: torch.nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Keep references to what the outermost forward gets."""
        self.loss_watch.stop()
        outermost = not any(self.running)
        if not outermost or not torch.is_grad_enabled() or is_replica(model):
            self.running.append(None)
            return
        if model not in self.buffers:
            self.buffers[model] = BufferCopies(model)
        self.running.append(Forward(model, args, kwargs, self.buffers[model]))

    def on_output(self, model: torch.nn.Module, output: object) -> None:
        """Have the gradients of the outermost forward's outputs noted when they come."""
        forward = self.running.pop() if self.running else None
        if forward is None:
            return
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        forward.grads = [None] * len(outputs)
        for index, tensor in enumerate(outputs):
            tensor.register_hook(self._noter(forward, index))  # type: ignore[no-untyped-call]
        self.forwards.append(forward)
        self.loss_watch.start(outputs)

    def _noter(self, forward: Forward, index: int) -> Callable[[torch.Tensor], None]:
        def note(grad: torch.Tensor) -> None:
            forward.grads[index] = grad
            forward.owners.update(self.block)
            forward.scaler = self.scaler

        return note

    def on_scale_loss(self, loss: torch.Tensor, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """A static scale never skips: look at the loss itself. One host sync, at static scales only.

        Another at the first block of an optimizer, and where something other than a step has written its weights: the
        next step is to answer for its own writing alone.
        """
        self.running.clear()
        self.block = tuple(id(one) for one in optimizers)
        self.scaler = scaler
        for one in optimizers:
            self._weights(one).look_again(one)
        event = self.loss_watch.look_at(loss)
        if event is not None:
            self._tell_of_outside(event, scaler, optimizers)
        elif not scaler.dynamic and not is_finite(loss):
            step = self._begin_fault(optimizers)
            forwards = [forward for forward in self.forwards if not forward.owners]
            self._explain(forwards, scaler, "The loss is not finite", step, backward=False)

    def on_gradients(self, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """The same for gradients: one host sync a block, at static scales only."""
        self.block = ()
        event = self.loss_watch.look_at_gradients(self.forwards)
        if event is not None:
            self._tell_of_outside(event, scaler, optimizers)
        elif not scaler.dynamic and not _finite_gradients(optimizers):
            step = self._begin_fault(optimizers)
            self._explain(self._of(optimizers[0]), scaler, "A gradient is not finite", step)

    def on_failure(self, error: Exception) -> None:
        """Leave no frame of the probe in the traceback, and no probe in the run."""
        self.running.clear()
        self.loss_watch.stop()
        hide_tools(error.__traceback__)

    def on_step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Explain a skipped step, or one that left a weight not finite; forget the forwards of any other.

        One host sync, and another where only the device knows whether it skipped.
        """
        weights = self._weights(optimizer)
        weights.seen += 1
        if was_skipped(optimizer, skipped):
            self._explain(self._of(optimizer), first_scaler(optimizer), "A step was skipped", weights.seen)
        else:
            messages = weights.after(optimizer)
            self.lost = self.lost or not weights.watched
            weights.made = weights.seen
            for one in messages:
                self._emit(one)
                if one.kind == "weights":
                    self._count()
        weights.faulty = False
        self._forget(optimizer)

    def _weights(self, optimizer: Optimizer) -> WeightWatch:
        if optimizer not in self.weights:
            self.weights[optimizer] = WeightWatch(optimizer)
        return self.weights[optimizer]

    def _next_step(self, optimizers: Sequence[Optimizer]) -> int:
        return max([self._weights(one).seen for one in optimizers], default=0) + 1

    def _begin_fault(self, optimizers: Sequence[Optimizer]) -> int:
        """Note that the next step of ``optimizers`` gets a loss or gradient that is not finite; return its number."""
        for one in optimizers:
            self._weights(one).faulty = True
        return self._next_step(optimizers)

    # -- what is kept ------------------------------------------------------------------------------------------------
    def _of(self, optimizer: Optimizer) -> list[Forward]:
        return [forward for forward in self.forwards if id(optimizer) in forward.owners]

    def _forget(self, optimizer: Optimizer) -> None:
        kept = []
        for forward in self.forwards:
            had = bool(forward.owners)
            forward.owners.discard(id(optimizer))
            forward.age += 1
            if forward.owners or (not had and forward.age < OLDEST):
                kept.append(forward)
        self.forwards = deque(kept, MOST_FORWARDS)

    # -- explaining --------------------------------------------------------------------------------------------------
    def _explain(
        self, forwards: list[Forward], scaler: LossScaler, what: str, step: int, backward: bool = True
    ) -> None:
        findings = []
        for forward, model in _repeatable(forwards):
            try:
                finding = replay(forward, model, backward)
            except Exception as problem:  # the run that is observed must go on whatever happens here
                told = f"the batch could not be run again: {type(problem).__name__}: {problem}"
                self._emit(Message("note", told))
                self._count()
                return
            findings.append(finding)
            if finding.event is not None:
                self._tell(finding, forward.scaler or scaler, what, step)
                return
        self.loss_watch.arm()
        if self._is_new(("outside",)):
            self._emit(outside_message(what, findings, step))
            if not findings and self.stop:
                self._count()  # nothing further can be learned

    def _is_new(self, key: tuple[object, ...]) -> bool:
        new = key not in self.explained
        self.explained.add(key)
        return new

    def _tell_of_outside(self, event: Event, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """Tell what the code between a model and ``scale_loss`` did."""
        self._tell(Finding(event, ""), scaler, "", self._begin_fault(optimizers))

    def _tell(self, finding: Finding, scaler: LossScaler, what: str, step: int) -> None:
        event = finding.event
        if event is None or (event.op == "parameter" and self.lost) or not self._is_new(event.key):
            return  # the step that lost a weight was told, or the fault that came before it
        self.lost = self.lost or event.op == "parameter"
        made = any(one.made for one in self.weights.values())
        self._emit(fault_message(finding, scaler, what, step, made, self._growth()))
        self._count()

    def _growth(self) -> Grown | None:
        """The weight that the last steps of an optimizer made many times larger, if any."""
        found = [weights.history.growth(optimizer) for optimizer, weights in self.weights.items()]
        return max((one for one in found if one is not None), key=lambda one: one.times, default=None)

    def _emit(self, message: Message) -> None:
        message.emit(self.json)

    def _count(self) -> None:
        """One more explanation was given: observe no more after the last, and end the script if that was asked for."""
        self.left -= 1
        if self.left > 0:
            return
        self.forwards.clear()
        self.loss_watch.stop()
        observers()[:] = [one for one in observers() if one is not self]
        if not self.stop:
            hint = "that was the last explanation; amp.explain_overflows(limit=...) sets how many."
            self._emit(Message("note", hint))
            return
        given = f"{self.limit} explanation{'s' if self.limit > 1 else ''}"
        self._emit(Message("end", f"the script ends here, after {given}, as asked."))
        raise SystemExit(1)


def _finite_gradients(optimizers: Sequence[Optimizer]) -> bool:
    grads = [p.grad for one in optimizers for group in one.param_groups for p in group["params"]]
    return all(is_finite(grad) for grad in grads if grad is not None)


def _repeatable(forwards: Iterable[Forward]) -> Iterator[tuple[Forward, torch.nn.Module]]:
    """Those of ``forwards`` whose model lives and can be run again by one process, each with its model."""
    for forward in forwards:
        model = forward.model()
        if model is not None and runs_alone(model):
            yield forward, model
