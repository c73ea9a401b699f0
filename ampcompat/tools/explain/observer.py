"""The autopsy as an observer of the run: keeps the last forwards, and runs them again when a step was lost."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ampcompat._types import Optimizer
from ampcompat.amp.amp_model import Args, Kwargs
from ampcompat.amp.optimizer import step_was_skipped
from ampcompat.amp.scaler import LossScaler
from ampcompat.amp.trees import tensors_in
from ampcompat.tools.explain import message, ranges
from ampcompat.tools.explain.growth import Grown
from ampcompat.tools.explain.live import LiveProbe
from ampcompat.tools.explain.options import Options
from ampcompat.tools.explain.probe import Event
from ampcompat.tools.explain.record import BufferCopies, Record
from ampcompat.tools.explain.replay import Finding, replay, runs_alone
from ampcompat.tools.explain.said import End, Note, Said
from ampcompat.tools.explain.steps import Steps
from ampcompat.tools.explain.tensors import is_finite
from ampcompat.tools.explain.weights import Weights
from ampcompat.tools.frames import hide_tools

#: Forwards kept at a time, and steps after which a forward that no backward followed is forgotten.
MOST_RECORDS, OLDEST = 16, 3


class Autopsy:
    """Observer (see :mod:`ampcompat.amp.observers`) that explains overflows.

    Args:
        options: How; after ``options.limit`` explanations nothing is kept any more.
    """

    def __init__(self, options: Options) -> None:
        self.options, self.left = options, options.limit
        self.steps: weakref.WeakKeyDictionary[Optimizer, Steps] = weakref.WeakKeyDictionary()
        self.records: deque[Record] = deque(maxlen=MOST_RECORDS)
        self.buffers: weakref.WeakKeyDictionary[torch.nn.Module, BufferCopies] = weakref.WeakKeyDictionary()
        self.depth: list[Record | None] = []
        self.block: tuple[int, ...] = ()
        self.scaler: LossScaler | None = None
        self.told: set[tuple[object, ...]] = set()
        self.lost = False  # weights, by a step
        self.live = LiveProbe()

    # -- events ------------------------------------------------------------------------------------------------------
    def on_forward(self, model: torch.nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Keep references to what the outermost forward gets."""
        self.live.stop()
        outermost = not any(self.depth)
        if self.left <= 0 or not outermost or not torch.is_grad_enabled() or hasattr(model, "_is_replica"):
            self.depth.append(None)
            return
        if model not in self.buffers:
            self.buffers[model] = BufferCopies(model)
        self.depth.append(Record(model, args, kwargs, self.buffers[model]))

    def on_output(self, model: torch.nn.Module, output: object) -> None:
        """Have the gradients of the outermost forward's outputs noted when they come."""
        record = self.depth.pop() if self.depth else None
        if record is None:
            return
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        record.grads = [None] * len(outputs)
        for index, tensor in enumerate(outputs):
            tensor.register_hook(self._noter(record, index))  # type: ignore[no-untyped-call]
        self.records.append(record)
        self.live.start(outputs)

    def _noter(self, record: Record, index: int) -> Callable[[torch.Tensor], None]:
        def note(grad: torch.Tensor) -> None:
            if self.left > 0:
                record.grads[index] = grad
                record.owners.update(self.block)
                record.scaler = self.scaler
                record.scale = None if self.scaler is None else self.scaler.core.scale

        return note

    def on_scale_loss(self, loss: torch.Tensor, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """A static scale never skips: look at the loss itself. One host sync, at static scales only.

        Another at the first block of an optimizer, and where something other than a step has written its weights: the
        next step is to answer for its own writing alone.
        """
        self.depth.clear()
        self.block, self.scaler = tuple(id(one) for one in optimizers), scaler
        if self.left <= 0:
            return
        for one in optimizers:
            self._steps(one).look_again(one)
        event = self.live.look_at(loss)
        if event is not None:
            self._tell_live(event, scaler, optimizers)
        elif not scaler.dynamic and not is_finite(loss):
            step = self._begin_fault(optimizers)
            records = [r for r in self.records if not r.owners]
            self._explain(records, scaler, "The loss is not finite", step, backward=False)

    def on_gradients(self, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """The same for gradients: one host sync a block, at static scales only."""
        self.block = ()
        if self.left <= 0:
            return
        event = self.live.look_at_gradients(self.records)
        if event is not None:
            self._tell_live(event, scaler, optimizers)
        elif not scaler.dynamic and not _finite_gradients(optimizers):
            step = self._begin_fault(optimizers)
            self._explain(self._of(optimizers[0]), scaler, "A gradient is not finite", step)
        if self.options.ranges and self.left > 0:
            for one in optimizers:
                if self._steps(one).made == 0:  # now: the step writes the weights
                    self._steps(one).ranges = self._measured(self._of(one), self._next_step(optimizers))

    def on_failure(self, error: Exception) -> None:
        """Leave no frame of the probe in the traceback, and no probe in the run."""
        self.depth.clear()
        self.live.stop()
        hide_tools(error.__traceback__)

    def on_step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Explain a skipped step, or one that left a weight not finite; forget the forwards of any other.

        One host sync, and another where only the device knows whether it skipped.
        """
        steps = self._steps(optimizer)
        steps.seen += 1
        if skipped is None:
            skipped = step_was_skipped(optimizer)
        if self.left > 0 and skipped:
            scaler = optimizer._amp_stash.session.scalers[0]
            self._explain(self._of(optimizer), scaler, "A step was skipped", steps.seen)
        elif self.left > 0:
            messages = steps.after(optimizer)
            self.lost = self.lost or not steps.watched
            for one in messages:
                self._emit(one)
                if isinstance(one, Weights):
                    self._count()
        if not skipped:
            steps.made = steps.seen
        steps.faulty = False
        self._forget(optimizer)

    def _steps(self, optimizer: Optimizer) -> Steps:
        if optimizer not in self.steps:
            self.steps[optimizer] = Steps(optimizer)
        return self.steps[optimizer]

    def _next_step(self, optimizers: Sequence[Optimizer]) -> int:
        return max([self._steps(one).seen for one in optimizers], default=0) + 1

    def _begin_fault(self, optimizers: Sequence[Optimizer]) -> int:
        """Note that the next step of ``optimizers`` gets a loss or gradient that is not finite; return its number."""
        for one in optimizers:
            self._steps(one).faulty = True
        return self._next_step(optimizers)

    # -- what is kept ------------------------------------------------------------------------------------------------
    def _of(self, optimizer: Optimizer) -> list[Record]:
        return [r for r in self.records if id(optimizer) in r.owners]

    def _forget(self, optimizer: Optimizer) -> None:
        kept = []
        for record in self.records:
            had = bool(record.owners)
            record.owners.discard(id(optimizer))
            record.age += 1
            if record.owners or (not had and record.age < OLDEST):
                kept.append(record)
        self.records = deque(kept, MOST_RECORDS) if self.left > 0 else deque(maxlen=MOST_RECORDS)

    # -- explaining --------------------------------------------------------------------------------------------------
    def _explain(self, records: list[Record], scaler: LossScaler, what: str, step: int, backward: bool = True) -> None:
        if self.left <= 0:
            return
        findings = []
        for record, model in _repeatable(records):
            try:
                finding = replay(record, model, backward)
            except Exception as problem:  # the run that is observed must go on whatever happens here
                self._not_run_again(problem)
                self._count()
                return
            findings.append(finding)
            if finding.event is not None:
                self._tell(finding, record.scaler or scaler, what, step, record)
                return
        self.live.arm()
        if self._is_new(("elsewhere",)):
            self._emit(message.elsewhere(what, findings, step))
            if not findings and self.options.stop:
                self._count()  # nothing further can be learned

    def _is_new(self, key: tuple[object, ...]) -> bool:
        new = key not in self.told
        self.told.add(key)
        return new

    def _tell_live(self, event: Event, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """Tell what the code between a model and ``scale_loss`` did."""
        self._tell(Finding(event, ""), scaler, "", self._begin_fault(optimizers))

    def _tell(self, finding: Finding, scaler: LossScaler, what: str, step: int, record: Record | None = None) -> None:
        event = finding.event
        if event is None or (event.op == "parameter" and self.lost) or not self._is_new(event.key):
            return  # the step that lost a weight was told, or the fault that came before it
        self.lost = self.lost or event.op == "parameter"
        made = any(one.made for one in self.steps.values())
        self._emit(message.fault(finding, scaler, what, step, made, self._growth()))
        if self.options.ranges and record is not None:
            for one in self._measured([record], step):
                self._emit(one)
        self._count()

    def _growth(self) -> Grown | None:
        """The weight that the last steps of an optimizer made many times larger, if any."""
        found = [steps.history.growth(optimizer) for optimizer, steps in self.steps.items()]
        return max((one for one in found if one is not None), key=lambda one: one.times, default=None)

    def _measured(self, records: list[Record], step: int) -> list[Said]:
        """The ranges of ``records``, the last of each model."""
        messages: list[Said] = []
        for record, model in _repeatable({record.model: record for record in records}.values()):
            try:
                found = ranges.measure(record, model)
            except Exception as problem:  # as above
                self._not_run_again(problem)
                return []
            messages.append(ranges.ranges_message(found, type(model).__name__, step, _scale_of(record)))
        return messages

    def _not_run_again(self, problem: Exception) -> None:
        self._emit(Note(head=f"the batch could not be run again: {type(problem).__name__}: {problem}"))

    def _emit(self, one: Said) -> None:
        one.emit(self.options.json)

    def _count(self) -> None:
        """One more explanation was given: end the script after the last, if that was asked for."""
        self.left -= 1
        if self.left > 0:
            return
        self.records.clear()
        if not self.options.stop:
            hint = "that was the last explanation; amp.explain_overflows(limit=...) sets how many."
            self._emit(Note(head=hint))
            return
        given = f"{self.options.limit} explanation{'s' if self.options.limit > 1 else ''}"
        self._emit(End(head=f"the script ends here, after {given}, as asked."))
        raise SystemExit(1)


def _finite_gradients(optimizers: Sequence[Optimizer]) -> bool:
    grads = [p.grad for one in optimizers for group in one.param_groups for p in group["params"]]
    return all(is_finite(grad) for grad in grads if grad is not None)


def _repeatable(records: Iterable[Record]) -> Iterator[tuple[Record, torch.nn.Module]]:
    """Those of ``records`` whose model lives and can be run again by one process, each with its model."""
    for record in records:
        model = record.model()
        if model is not None and runs_alone(model):
            yield record, model


def _scale_of(record: Record) -> float:
    """The loss scale of the last backward pass of ``record``; at the end of its block the scaler may have moved on."""
    if record.scale is None:
        return 1.0 if record.scaler is None else float(record.scaler.loss_scale())
    return float(record.scale)
