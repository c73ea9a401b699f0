"""The autopsy as an observer of the run: keeps the last forwards, and runs them again when a step was lost."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch

from ampcompat._log import say
from ampcompat.explain import message
from ampcompat.explain.live import LiveProbe
from ampcompat.explain.record import BufferWatch, Record
from ampcompat.explain.replay import Finding, replay, runs_alone
from ampcompat.explain.tensors import is_finite, tensors_in

#: Forwards kept at a time, and steps after which a forward that no backward followed is forgotten.
MOST_RECORDS, OLDEST = 16, 3


class Autopsy:
    """Observer (see :mod:`ampcompat.amp.observers`) that explains overflows.

    Args:
        limit: Explanations given; afterwards nothing is kept any more.
    """

    def __init__(self, limit: int) -> None:
        self.left = limit
        self.records: deque[Record] = deque(maxlen=MOST_RECORDS)
        self.watches: weakref.WeakKeyDictionary[torch.nn.Module, BufferWatch] = weakref.WeakKeyDictionary()
        self.depth: list[Record | None] = []
        self.block: tuple[int, ...] = ()
        self.scaler: Any = None
        self.asked: list[weakref.ref[Any]] = []  # optimizers that only the device knows about
        self.told: dict[tuple[Any, ...], int] = {}
        self.live = LiveProbe()

    # -- events ------------------------------------------------------------------------------------------------------
    def on_forward(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Keep references to what the outermost forward gets."""
        self.live.stop()
        outermost = not any(self.depth)
        if self.left <= 0 or not outermost or not torch.is_grad_enabled() or hasattr(model, "_is_replica"):
            self.depth.append(None)
            return
        if model not in self.watches:
            self.watches[model] = BufferWatch(model)
        self.depth.append(Record(model, args, kwargs, self.watches[model]))

    def on_output(self, model: torch.nn.Module, output: Any) -> None:
        """Have the gradients of the outermost forward's outputs noted when they come."""
        record = self.depth.pop() if self.depth else None
        if record is None:
            return
        record.forward_ended()
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        record.grads = [None] * len(outputs)
        for index, tensor in enumerate(outputs):
            tensor.register_hook(self._noter(record, index))  # type: ignore[no-untyped-call]
        self.records.append(record)
        self.live.start(outputs)

    def _noter(self, record: Record, index: int) -> Any:
        def note(grad: torch.Tensor) -> None:
            if self.left > 0:
                record.grads[index] = grad
                record.owners.update(self.block)
                record.scaler = self.scaler

        return note

    def on_scale_loss(self, loss: torch.Tensor, scaler: Any, optimizers: Any) -> None:
        """A static scale never skips: look at the loss itself. One host sync, at static scales only."""
        self.depth.clear()
        for ref in self.asked:
            self._ask(ref())
        self.asked = []
        self.block, self.scaler = tuple(id(one) for one in optimizers), scaler
        if self.left <= 0:
            return
        event = self.live.look_at(loss)
        if event is not None:
            self._tell(Finding(event, ""), scaler, "")
        elif not scaler.dynamic and not is_finite(loss):
            self._explain([r for r in self.records if not r.owners], scaler, "The loss is not finite", backward=False)

    def on_gradients(self, scaler: Any, optimizers: Any) -> None:
        """The same for gradients: one host sync a block, at static scales only."""
        self.block = ()
        if self.left <= 0:
            return
        event = self.live.look_at_gradients(self.records)
        if event is not None:
            self._tell(Finding(event, ""), scaler, "")
        elif not scaler.dynamic:
            grads = [p.grad for o in optimizers for g in o.param_groups for p in g["params"] if p.grad is not None]
            if not all(map(is_finite, grads)):
                self._explain(self._of(optimizers[0]), scaler, "A gradient is not finite")

    def on_step(self, optimizer: Any, skipped: bool | None) -> None:
        """Explain a skipped step; forget the forwards of any other."""
        if skipped:
            self._explain(self._of(optimizer), optimizer._amp_stash.session.scalers[0], "A step was skipped")
        if skipped is None:
            self.asked.append(weakref.ref(optimizer))
        else:
            self._forget(optimizer)

    def _ask(self, optimizer: Any) -> None:
        from ampcompat.amp.optimizer import step_was_skipped

        if optimizer is not None:
            self.on_step(optimizer, step_was_skipped(optimizer))

    # -- what is kept ------------------------------------------------------------------------------------------------
    def _of(self, optimizer: Any) -> list[Record]:
        return [r for r in self.records if id(optimizer) in r.owners]

    def _forget(self, optimizer: Any) -> None:
        kept = []
        for record in self.records:
            had = bool(record.owners)
            record.owners.discard(id(optimizer))
            record.age += 1
            if record.owners or (not had and record.age < OLDEST):
                kept.append(record)
        self.records = deque(kept, MOST_RECORDS) if self.left > 0 else deque(maxlen=MOST_RECORDS)

    # -- explaining --------------------------------------------------------------------------------------------------
    def _explain(self, records: list[Record], scaler: Any, what: str, backward: bool = True) -> None:
        if self.left <= 0:
            return
        findings = []
        for record in records:
            model = record.model()
            if model is None or not runs_alone(model):
                continue
            try:
                finding = replay(record, backward)
            except Exception as problem:  # the run that is observed must go on whatever happens here
                say(f"ampcompat explain: the batch could not be run again: {type(problem).__name__}: {problem}")
                self.left -= 1
                return
            if finding is not None:
                findings.append(finding)
            if finding is not None and finding.event is not None:
                self._tell(finding, record.scaler or scaler, what)
                return
        self.live.arm()
        if self._is_new(("elsewhere",)):
            say(message.elsewhere(what, findings))

    def _is_new(self, key: tuple[Any, ...]) -> bool:
        self.told[key] = self.told.get(key, 0) + 1
        return self.told[key] == 1

    def _tell(self, finding: Finding, scaler: Any, what: str) -> None:
        if finding.event is None or (finding.event.op == "parameter" and self.told):
            return  # weights that are lost are what a fault leaves behind: it was told
        if not self._is_new(finding.event.key):
            return
        self.left -= 1
        say(message.explain(finding, scaler, what))
        if self.left == 0:
            say("ampcompat explain: that was the last explanation; amp.explain_overflows(limit=...) sets how many.")
            self.records.clear()
