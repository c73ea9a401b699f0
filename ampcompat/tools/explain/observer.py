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
from ampcompat.tools.explain.fault import fault_message, is_too_large_unscaled, outside_message, place_of
from ampcompat.tools.explain.forwards import BufferCopies, Forward
from ampcompat.tools.explain.growth import Grown
from ampcompat.tools.explain.hints import has_stable_form
from ampcompat.tools.explain.loss_watch import LossWatch
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.explain.numbers import optimizer_name
from ampcompat.tools.explain.probe import ARGUMENT, GIVEN, Event
from ampcompat.tools.explain.replay import Finding, replay, runs_alone
from ampcompat.tools.explain.tally import Tally
from ampcompat.tools.explain.weight_watch import WeightWatch
from ampcompat.tools.frames import hide_tools
from ampcompat.tools.tensors import is_finite

#: Forwards kept at a time, and steps after which a forward that no backward followed is forgotten.
MOST_FORWARDS, OLDEST = 16, 3
#: Lost steps that are looked at; a run that loses more knows enough.
MOST_LOST = 100
#: The cause of a step that the code between the models and ``scale_loss`` lost.
OUTSIDE = "the code between the model and scale_loss"


class OverflowExplainer:
    """Observer (see :mod:`ampcompat.amp.observers`) that explains overflows.

    Args:
        limit: Different faults that are explained; after these the run is no longer observed.
        stop: Whether the script ends with the last of them.
        json: Whether each message is a line of JSON.
        tally: Where lost steps are counted.
    """

    def __init__(self, limit: int, stop: bool, json: bool, tally: Tally) -> None:
        self.limit, self.stop, self.json = limit, stop, json
        self.tally = tally
        self.left = limit
        self.left_to_look_at = MOST_LOST
        self.weights: weakref.WeakKeyDictionary[Optimizer, WeightWatch] = weakref.WeakKeyDictionary()
        self.forwards: deque[Forward] = deque(maxlen=MOST_FORWARDS)
        self.buffers: weakref.WeakKeyDictionary[torch.nn.Module, BufferCopies] = weakref.WeakKeyDictionary()
        self.running: list[Forward | None] = []  # forwards that have begun; None for those inside of another
        self.block: tuple[int, ...] = ()
        self.scaler: LossScaler | None = None
        self.explained: set[tuple[object, ...]] = set()
        self.lost_by = ""  # the step that has written weights that are not finite
        self.last_cause = ""
        self.too_large = ""  # the cause that was told of gradients too large at any loss scale: weights then grow too
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
        """Note the gradients of the outermost forward's outputs when they come."""
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
        """Keep the loss; a static scale never skips, so look at it there: one host sync.

        Another at the first block of an optimizer, and where something other than a step has written its weights: the
        next step is to answer for its own writing alone.
        """
        self.running.clear()
        self.block = tuple(id(one) for one in optimizers)
        self.scaler = scaler
        for one in optimizers:
            self._watch(one).begin_block(one, loss)
        event = self.loss_watch.look_at(loss)
        if event is not None:
            self._lose_outside(event, scaler, optimizers, f"the loss is {_number_in(loss)}")
        elif not scaler.dynamic and not is_finite(loss):
            forwards = [forward for forward in self.forwards if not forward.owners]
            head = f"The loss of {self._next_step(optimizers)} is {_number_in(loss)}."
            self._lose(optimizers, forwards, scaler, head, self._number(optimizers), backward=False)

    def on_gradients(self, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """Look at the gradients too at static scales: one host sync a block."""
        self.block = ()
        event = self.loss_watch.look_at_gradients(self.forwards)
        if self._is_lost(optimizers):
            return  # for its loss
        if event is not None:
            self._lose_outside(event, scaler, optimizers, "a gradient is not finite")
        elif not scaler.dynamic and not _finite_gradients(optimizers):
            head = f"A gradient of {self._next_step(optimizers)} is not finite."
            self._lose(optimizers, self._of(optimizers[0]), scaler, head, self._number(optimizers))

    def on_failure(self, error: Exception) -> None:
        """Leave no frame of the probe in the traceback, and no probe in the run."""
        self.running.clear()
        self.loss_watch.stop()
        hide_tools(error.__traceback__)

    def on_step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Explain a skipped step, or one that left a weight not finite; forget the forwards of any other.

        One host sync, and another where only the device knows whether it skipped.
        """
        watch = self._watch(optimizer)
        watch.seen += 1
        was_lost = watch.is_lost
        if was_skipped(optimizer, skipped):
            watch.back_off.add(True)
            self.tally.scale = float(first_scaler(optimizer).loss_scale())
            if not was_lost:
                self._explain_skip(optimizer, watch)
        else:
            watch.back_off.add(False)
            self.tally.not_finite += was_lost
            self._look_at_made_step(optimizer, watch)
        watch.end_step()
        self._forget(optimizer)

    def _look_at_made_step(self, optimizer: Optimizer, watch: WeightWatch) -> None:
        """Tell of a loss that is not finite, and of such weights that the step has written."""
        messages = watch.after(optimizer)
        watch.made = watch.seen
        if not watch.has_finite_loss and not watch.is_lost:
            lost = next(loss for loss in watch.losses if not is_finite(loss))
            name = self._name_of_step(watch.seen, optimizer).capitalize()
            head = f"{name} was made, with finite gradients, although its loss is {_number_in(lost)}."
            self.tally.not_finite += 1
            self._lose([optimizer], self._of(optimizer), first_scaler(optimizer), head, watch.seen, backward=False)
        for message in messages:
            if message.kind != "weights":
                self._emit(message)
                continue
            is_of_growth = message.content["growth"] is not None
            cause = self.too_large if self.too_large and is_of_growth else message.cause
            self.lost_by = cause
            self.tally.not_finite += not watch.is_lost
            self.tally.lose(cause)
            if cause not in self.tally.explained:  # the growth of a weight, or what it follows, may have been told
                self.tally.explain(cause)
                self._emit(message)
                self._count()
        if watch.is_lost and not watch.watched and not self.lost_by:
            self.lost_by = self.last_cause

    # -- the optimizers of a block -----------------------------------------------------------------------------------
    def _watch(self, optimizer: Optimizer) -> WeightWatch:
        if optimizer not in self.weights:
            self.weights[optimizer] = WeightWatch(optimizer)
        return self.weights[optimizer]

    def _is_lost(self, optimizers: Sequence[Optimizer]) -> bool:
        return any(self._watch(one).is_lost for one in optimizers)

    def _number(self, optimizers: Sequence[Optimizer]) -> int:
        """The number of the step to come."""
        return max([self._watch(one).seen for one in optimizers], default=0) + 1

    def _next_step(self, optimizers: Sequence[Optimizer]) -> str:
        return self._name_of_step(self._number(optimizers), optimizers[0] if optimizers else None)

    def _name_of_step(self, number: int, optimizer: Optimizer | None) -> str:
        """As in "step 31"; with the optimizer, where there are several."""
        if len(self.weights) < 2 or optimizer is None:
            return f"step {number}"
        return f"step {number} of optimizer {list(self.weights).index(optimizer)} ({optimizer_name(optimizer)})"

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
    def _explain_skip(self, optimizer: Optimizer, watch: WeightWatch) -> None:
        """Explain a skipped step that is no ordinary back-off of the scale."""
        scaler = first_scaler(optimizer)
        name = self._name_of_step(watch.seen, optimizer).capitalize()
        lost = next((loss for loss in watch.losses if not is_finite(loss)), None)
        persists = watch.back_off.is_fault(self.tally.scale)
        if lost is not None:
            head = f"{name} was skipped: the loss is {_number_in(lost)}."
        elif persists:
            scale = self.tally.scale
            head = f"{name} was skipped, as {watch.back_off}: gradients overflow although the scale is {scale:g}."
        else:
            head = f"{name} was skipped: a gradient is not finite."
        is_fault = lost is not None or persists
        self._lose([optimizer], self._of(optimizer), scaler, head, watch.seen, is_fault=is_fault)

    def _lose(
        self,
        optimizers: Sequence[Optimizer],
        forwards: list[Forward],
        scaler: LossScaler,
        head: str,
        step: int,
        *,
        backward: bool = True,
        is_fault: bool = True,
    ) -> None:
        """Run ``forwards`` again and tell what lost the step of ``optimizers``; hold it back if it may be ordinary."""
        for one in optimizers:
            self._watch(one).is_lost = True
        findings = []
        for forward, model in _repeatable(forwards):
            try:
                finding = replay(forward, model, backward)
            except Exception as problem:  # the run that is observed must go on whatever happens here
                self._tell_of_failure(problem, is_fault)
                return
            findings.append(finding)
            if finding.event is not None:
                self._tell(finding, finding.event, forward.scaler or scaler, head, step, is_fault)
                return
        self._tell_of_outside(head, findings, step, is_fault)

    def _tell(
        self, finding: Finding, event: Event, scaler: LossScaler, head: str, step: int, is_fault: bool = True
    ) -> None:
        """Tell of ``event``, unless it was told already, or may be gone at a lower scale."""
        if event.op == "parameter" and self.lost_by:
            self.tally.lose(self.lost_by)  # that step was told, or the fault that came before it
            return
        was_given = event.op in (*GIVEN, ARGUMENT)
        growth = None if was_given else self._growth()
        blamed = None if has_stable_form(event) else growth
        if blamed is None:
            cause = place_of(finding, event)
        else:
            cause = self.too_large or blamed.cause
        self.last_cause = cause
        self.tally.lose(cause)
        if event.key in self.explained or cause in self.tally.explained:
            self._look_at_one_less()
            return
        made = any(one.made for one in self.weights.values())
        message = fault_message(finding, event, scaler, head, step, made, growth)
        message.cause = cause
        if event.depends_on_scale and not is_fault:
            self.tally.hold(message)
            self._look_at_one_less()
            return
        self.explained.add(event.key)
        if event.op == "parameter":
            self.lost_by = cause
        if blamed is None and is_too_large_unscaled(event, scaler):
            self.too_large = cause
        self.tally.explain(cause)
        self._emit(message)
        self._count()

    def _tell_of_failure(self, problem: Exception, is_fault: bool) -> None:
        """Tell that a batch could not be run again, unless the scale may just be on its way down."""
        if not is_fault:
            self._look_at_one_less()
            return
        self.tally.not_found += 1
        told = f"the batch could not be run again: {type(problem).__name__}: {problem}"
        self._emit(Message("note", told))
        self._count()

    def _tell_of_outside(self, head: str, findings: list[Finding], step: int, is_fault: bool) -> None:
        """Tell that no model lost the step, and watch the code outside of them from now on."""
        self.last_cause = OUTSIDE
        self.tally.lose(OUTSIDE)
        message = outside_message(head, findings, step, is_fault)
        entered = any(finding.entered for finding in findings)
        if is_fault or entered:
            self.loss_watch.arm()
        if not is_fault:
            message.cause = OUTSIDE
            self.tally.hold(message)
            self._look_at_one_less()
            return
        self.tally.not_found += 1
        if (OUTSIDE,) in self.explained:
            self._look_at_one_less()
            return
        self.explained.add((OUTSIDE,))
        self._emit(message)
        if not findings and self.stop:
            self._count()  # nothing further can be learned

    def _lose_outside(self, event: Event, scaler: LossScaler, optimizers: Sequence[Optimizer], what: str) -> None:
        """Tell what the code between a model and ``scale_loss`` did, as the watch there has seen it."""
        persists = not scaler.dynamic or any(
            self._watch(one).back_off.is_fault(float(scaler.loss_scale())) for one in optimizers
        )
        if event.depends_on_scale and not persists:
            return  # the skipped step notes it
        for one in optimizers:
            self._watch(one).is_lost = True
        self.tally.rename(OUTSIDE, place_of(Finding(event, ""), event))
        head = f"{self._next_step(optimizers).capitalize()}: {what}."
        self._tell(Finding(event, ""), event, scaler, head, self._number(optimizers))

    def _growth(self) -> Grown | None:
        """The weight that the last steps of an optimizer made many times larger, if any."""
        found = [weights.history.growth(optimizer) for optimizer, weights in self.weights.items()]
        return max((one for one in found if one is not None), key=lambda one: one.times, default=None)

    def _emit(self, message: Message) -> None:
        message.emit(self.json)

    # -- the end -----------------------------------------------------------------------------------------------------
    def _count(self) -> None:
        """One more explanation was given: observe no more after the last, and end the script if that was asked for."""
        self.left -= 1
        if self.left > 0:
            return
        self._observe_no_more()
        if not self.stop:
            hint = "that was the last explanation; --explain=N, or amp.explain_overflows(limit=N), sets how many."
            self._emit(Message("note", hint))
            return
        given = f"{self.limit} explanation{'s' if self.limit > 1 else ''}"
        self._emit(Message("end", f"the script ends here, after {given}, as asked."))
        raise SystemExit(1)

    def _look_at_one_less(self) -> None:
        """One more lost step was looked at in vain."""
        self.left_to_look_at -= 1
        if self.left_to_look_at == 0:
            self._observe_no_more()
            self._emit(Message("note", f"{MOST_LOST} lost steps were looked at; from here on they are only counted."))

    def _observe_no_more(self) -> None:
        self.forwards.clear()
        self.loss_watch.stop()
        observers()[:] = [one for one in observers() if one is not self]


def _number_in(loss: torch.Tensor) -> str:
    """The loss as a number; of a loss with several elements, the first that is not finite."""
    flat = loss.detach().reshape(-1)
    return f"{float(flat[~torch.isfinite(flat)][0]):g}"


def _finite_gradients(optimizers: Sequence[Optimizer]) -> bool:
    grads = [p.grad for one in optimizers for group in one.param_groups for p in group["params"]]
    return all(is_finite(grad) for grad in grads if grad is not None)


def _repeatable(forwards: Iterable[Forward]) -> Iterator[tuple[Forward, torch.nn.Module]]:
    """Those of ``forwards`` whose model lives and can be run again by one process, each with its model."""
    for forward in forwards:
        model = forward.model()
        if model is not None and runs_alone(model):
            yield forward, model
