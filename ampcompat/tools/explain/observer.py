"""The observer that explains lost steps: keeps the last forwards, and runs them again when a step was lost."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ampcompat.tools.core import (
    Args,
    Kwargs,
    LossScaler,
    Optimizer,
    count_of_scalers,
    has_old_gradients,
    is_replica,
    live_models,
    observers,
    overflowed_scalers,
    tensors_in,
    was_skipped,
)
from ampcompat.tools.explain.fault import Fault
from ampcompat.tools.explain.forwards import BufferCopies, Forward
from ampcompat.tools.explain.growth import Grown
from ampcompat.tools.explain.loss_watch import LossWatch
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.explain.numbers import not_representable, optimizer_name
from ampcompat.tools.explain.ops import GRADIENTS, is_too_large_unscaled, op_fault
from ampcompat.tools.explain.probe import Event
from ampcompat.tools.explain.replay import Finding, replay, runs_alone
from ampcompat.tools.explain.tally import AFTER_MODELS, UNKNOWN, Tally
from ampcompat.tools.explain.unknown import unknown_message
from ampcompat.tools.explain.weights import Steps
from ampcompat.tools.frames import hide_tools
from ampcompat.tools.tensors import is_finite

#: Forwards kept at a time, and steps after which a forward that no backward followed is forgotten.
MOST_FORWARDS, OLDEST = 16, 3
#: Lost steps that are looked at; a run that loses more knows enough.
MOST_LOST = 100


@dataclass(frozen=True)
class LostStep:
    """A step that is lost, or is going to be.

    Attributes:
        head: What was seen, as in "The loss of step 3 is nan.".
        number: Its number.
        optimizers: Whose step it is.
        scaler: Of the loss whose block was lost.
        is_fault: Whether it is known to be no ordinary back-off of the loss scale.
    """

    head: str
    number: int
    optimizers: Sequence[Optimizer]
    scaler: LossScaler
    is_fault: bool = True


class OverflowExplainer:
    """Observer (see :mod:`ampcompat.amp.observers`) that explains lost steps.

    A loss that is not finite is looked into before the step that it may spoil, a skipped step and what a step has
    written right after it.

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
        self.steps: weakref.WeakKeyDictionary[Optimizer, Steps] = weakref.WeakKeyDictionary()
        self.forwards: deque[Forward] = deque(maxlen=MOST_FORWARDS)
        self.buffers: weakref.WeakKeyDictionary[torch.nn.Module, BufferCopies] = weakref.WeakKeyDictionary()
        self.running: list[Forward | None] = []  # forwards that have begun; None for those inside of another
        self.block: tuple[int, ...] = ()
        self.scaler: LossScaler | None = None
        self.lost_by: object = None  # the key of the fault that has left weights that are not finite
        self.too_large: Fault | None = None  # gradients too large at any loss scale, once told: weights then grow too
        self.loss_watch = LossWatch()
        self.has_seen_initialize = False
        self.lost_before: set[tuple[str, str]] = set()  # models and weights that were not finite at initialize

    # -- events ------------------------------------------------------------------------------------------------------
    def on_initialize(self) -> None:
        """Note the weights that are not finite before any step."""
        self.has_seen_initialize = True
        for model in live_models():
            for name, param in model.named_parameters():
                if not is_finite(param):
                    self.lost_before.add((type(model).__name__, name))

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
        """Look at the loss, while the weights are those that made it: one host sync.

        Another at the first block of an optimizer, and where something other than a step has written its weights.
        """
        self.running.clear()
        self.block = tuple(id(one) for one in optimizers)
        self.scaler = scaler
        event = self.loss_watch.look_at(loss)
        is_lost = event is not None or not is_finite(loss)
        for one in optimizers:
            self._steps_of(one).begin_block(one, scaler)
        if not is_lost or self._is_lost(optimizers):
            return
        number, name = self._next_step(optimizers)
        lost = LostStep(f"The loss of {name} is {_number_in(loss)}.", number, optimizers, scaler)
        if event is not None:
            self._lose_to_loss_code(lost, event)
        else:
            self._look_into(lost, self._of_loss(optimizers), backward=False)

    def on_gradients(self, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """Look at the gradients too at static scales: one host sync a block."""
        self.block = ()
        event = self.loss_watch.look_at_gradients(self.forwards)
        if self._is_lost(optimizers):
            return  # for its loss
        number, name = self._next_step(optimizers)
        lost = LostStep(f"A gradient of {name} is not finite.", number, optimizers, scaler)
        if event is not None:
            if not event.depends_on_scale or self._persists(scaler, optimizers):
                self._lose_to_loss_code(lost, event)
        elif not scaler.dynamic and not _finite_gradients(optimizers):
            self._look_into(lost, self._of(optimizers[0]))

    def on_failure(self, error: Exception) -> None:
        """Leave no frame of the probe in the traceback, and no probe in the run."""
        self.running.clear()
        self.loss_watch.stop()
        hide_tools(error.__traceback__)

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at weights that the script has written since the block: the step is not to answer for them."""
        self._steps_of(optimizer).look_at_written(optimizer)

    def on_step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Explain a skipped step, or one that left a weight not finite; forget the forwards of any other.

        One host sync, and another where only the device knows whether it skipped.
        """
        steps = self._steps_of(optimizer)
        is_skipped = was_skipped(optimizer, skipped)
        steps.end(is_skipped)
        if is_skipped:
            self._look_at_skipped_step(optimizer, steps)
        else:
            self._look_at_made_step(optimizer, steps)
        if steps.lost_to is not None:
            self.tally.lose(steps.lost_to)
            self.tally.not_finite += not is_skipped
        steps.lost_to = None
        self._forget(optimizer)

    # -- a step ------------------------------------------------------------------------------------------------------
    def _look_at_skipped_step(self, optimizer: Optimizer, steps: Steps) -> None:
        """Explain a skipped step, unless that is an ordinary back-off of the scale."""
        overflowed = overflowed_scalers(optimizer)
        scaler = min(overflowed, key=_scale_of, default=steps.scaler)
        if scaler is None:
            return  # no block was seen
        name = f"of loss {scaler.loss_id} " if count_of_scalers(optimizer) > 1 else ""
        scale = _scale_of(scaler)
        if overflowed:
            self.tally.scale = f"{name}came down to {scale:g}"
        if steps.lost_to is not None:
            return  # for its loss
        step = self._name_of_step(steps.seen, optimizer)
        if not overflowed and has_old_gradients(optimizer):
            self._tell_of_old_gradients(optimizer, steps, step)
            return
        persists = steps.back_off.is_fault(scale)
        if persists:
            why = f", as {steps.back_off}: gradients overflow although the scale {name}is {scale:g}."
        else:
            why = ": a gradient is not finite."
        lost = LostStep(f"S{step[1:]} was skipped{why}", steps.seen, [optimizer], scaler, persists)
        self._look_into(lost, self._of(optimizer))

    def _look_at_made_step(self, optimizer: Optimizer, steps: Steps) -> None:
        """Tell of weights that are not finite and that the step has written, and at the first step of its numbers."""
        is_first = steps.made == 0
        written, self.tally.underflow = steps.after(optimizer)
        if is_first:
            for number in not_representable(optimizer):
                if written is None or number not in written.numbers:
                    head = f"{number.optimizer} has a number that the dtype of its parameters does not hold."
                    number.fault.message(head, steps.seen).emit(self.json)
        if written is not None:
            growth = None if written.at_any_rate else steps.history.growth(optimizer)
            fault = self._after_too_large(written.fault(steps.seen, growth))
            steps.lost_to = self.lost_by = fault.key
            self._tell(fault, f"Step {steps.seen} of {written.head}", steps.seen)
        if not steps.is_watched and self.lost_by is None:
            self.lost_by = steps.lost_to

    def _tell_of_old_gradients(self, optimizer: Optimizer, steps: Steps, step: str) -> None:
        fault = Fault(
            what="gradients that overflowed in an earlier step were not cleared",
            where=f"the parameters of {optimizer_name(optimizer)}",
            cause="gradients of an earlier overflow that were not cleared",
            key="old gradients",
            hints=["call optimizer.zero_grad() after a skipped step too, before the next block"],
        )
        steps.lost_to = fault.key
        self._tell(fault, f"S{step[1:]} was skipped, though its own gradients did not overflow.", steps.seen)

    # -- the optimizers of a block -----------------------------------------------------------------------------------
    def _steps_of(self, optimizer: Optimizer) -> Steps:
        if optimizer not in self.steps:
            self.steps[optimizer] = Steps(optimizer)
        return self.steps[optimizer]

    def _is_lost(self, optimizers: Sequence[Optimizer]) -> bool:
        return any(self._steps_of(one).lost_to is not None for one in optimizers)

    def _persists(self, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> bool:
        """Whether an overflow of a gradient is no ordinary back-off of the scale."""
        scale = _scale_of(scaler)
        return not scaler.dynamic or any(self._steps_of(one).back_off.is_fault(scale) for one in optimizers)

    def _next_step(self, optimizers: Sequence[Optimizer]) -> tuple[int, str]:
        """The number of the step to come, and its name."""
        number = max([self._steps_of(one).seen for one in optimizers], default=0) + 1
        return number, self._name_of_step(number, optimizers[0] if optimizers else None)

    def _name_of_step(self, number: int, optimizer: Optimizer | None) -> str:
        """As in "step 31"; with the optimizer, where there are several."""
        if len(self.steps) < 2 or optimizer is None:
            return f"step {number}"
        return f"step {number} of optimizer {list(self.steps).index(optimizer)} ({optimizer_name(optimizer)})"

    # -- what is kept ------------------------------------------------------------------------------------------------
    def _of(self, optimizer: Optimizer) -> list[Forward]:
        return [forward for forward in self.forwards if id(optimizer) in forward.owners]

    def _of_loss(self, optimizers: Sequence[Optimizer]) -> list[Forward]:
        """The forwards that may have made a loss: first those that no backward pass has followed yet."""
        new = [forward for forward in self.forwards if not forward.owners]
        ids = {id(one) for one in optimizers}
        return [*new, *(forward for forward in self.forwards if forward.owners & ids)]

    def _forget(self, optimizer: Optimizer) -> None:
        kept = []
        for forward in self.forwards:
            had = bool(forward.owners)
            forward.owners.discard(id(optimizer))
            forward.age += 1
            if forward.owners or (not had and forward.age < OLDEST):
                kept.append(forward)
        self.forwards = deque(kept, MOST_FORWARDS)

    # -- looking into a lost step ------------------------------------------------------------------------------------
    def _look_into(self, lost: LostStep, forwards: list[Forward], *, backward: bool = True) -> None:
        """Run ``forwards`` again and tell what lost the step; hold it back if it may be ordinary."""
        findings = []
        for forward, model in _repeatable(forwards):
            try:
                finding = replay(forward, model, backward)
            except Exception as problem:  # the run that is observed must go on whatever happens here
                told = f"the batch could not be run again: {type(problem).__name__}: {problem}"
                self._tell_of_unknown(lost, Message("note", told), UNKNOWN, counts=True)
                return
            findings.append(finding)
            if finding.event is not None:
                self._lose_to(replace(lost, scaler=forward.scaler or lost.scaler), finding.event, finding)
                return
        is_after_models = any(finding.entered for finding in findings) or (bool(findings) and not backward)
        if lost.is_fault or is_after_models:
            self.loss_watch.arm()
        message = unknown_message(
            lost.head, findings, lost.number, lost.scaler, backward=backward, is_watched=lost.is_fault
        )
        key = AFTER_MODELS if is_after_models else UNKNOWN
        self._tell_of_unknown(lost, message, key, counts=not findings and self.stop)

    def _lose_to(self, lost: LostStep, event: Event, finding: Finding) -> None:
        """Note that the step is lost to ``event``, and tell it."""
        if event.op == "parameter" and self.lost_by is not None:
            self._note_lost(lost, self.lost_by)  # that step was told, or the fault that came before it
            self._look_at_one_less()
            return
        origin = self._origin(event, finding)
        fault = self._after_too_large(op_fault(event, finding, lost.scaler, origin, self._growth()))
        self._note_lost(lost, fault.key)
        if event.depends_on_scale and not lost.is_fault and not self.tally.is_explained(fault.key):
            self.tally.hold(fault.key, fault.message(lost.head, lost.number), fault.cause)
            self._look_at_one_less()
            return
        if event.op == "parameter":
            self.lost_by = fault.key
        if fault.growth is None and is_too_large_unscaled(event, lost.scaler):
            self.too_large = fault
        self._tell(fault, lost.head, lost.number)

    def _lose_to_loss_code(self, lost: LostStep, event: Event) -> None:
        """Tell what the code between a model and ``scale_loss`` did, as the watch there has seen it."""
        self._lose_to(lost, event, Finding(event, ""))
        if lost.optimizers:
            self.tally.rename(AFTER_MODELS, self._steps_of(lost.optimizers[0]).lost_to)

    def _note_lost(self, lost: LostStep, key: object) -> None:
        for one in lost.optimizers:
            self._steps_of(one).lost_to = key

    def _origin(self, event: Event, finding: Finding) -> str:
        """Where a parameter that is not finite may come from."""
        if (finding.model, event.place.module) in self.lost_before:
            return (
                "it was not finite before amp.initialize already: look at how the model is made, or at the checkpoint"
                " it came from"
            )
        if any(one.made for one in self.steps.values()):
            return "no step is known to have written it: look at what else writes weights, such as load_state_dict"
        if self.has_seen_initialize:
            return "it was finite at amp.initialize, and no step was made yet: look at what loads or writes it"
        return "no step was made yet: look at how the model is initialized, or at the checkpoint it came from"

    def _growth(self) -> Grown | None:
        """The weight that the last steps of an optimizer made many times larger, if any."""
        found = [steps.history.growth(optimizer) for optimizer, steps in self.steps.items()]
        return max((one for one in found if one is not None), key=lambda one: one.times, default=None)

    def _after_too_large(self, fault: Fault) -> Fault:
        """``fault``; where a weight grew after gradients were told to be too large at any scale, as that fault."""
        is_of_growth = fault.growth is not None and fault.cause == fault.growth.cause
        if is_of_growth and self.too_large is not None:
            fault.key, fault.cause = self.too_large.key, self.too_large.cause
        return fault

    # -- telling -----------------------------------------------------------------------------------------------------
    def _tell(self, fault: Fault, head: str, step: int) -> None:
        """Tell of ``fault``, unless it was told already."""
        if self.tally.is_explained(fault.key):
            self._look_at_one_less()
            return
        if fault.growth is not None and self.tally.is_costly(GRADIENTS):
            self._release(GRADIENTS)  # what has cost so many steps is likely to have made the weight grow
        self.tally.explain(fault.key, fault.cause)
        fault.message(head, step).emit(self.json)
        self._count()

    def _release(self, key: object = None) -> bool:
        """Tell what was held back, for ``key`` or at all; returns whether there was anything to tell."""
        held = self.tally.release(key)
        if held is None:
            return False
        held.emit(self.json)
        self._count()
        return True

    def _tell_of_unknown(self, lost: LostStep, message: Message, key: str, counts: bool) -> None:
        """Tell that the cause was not found, once; or what was held back, if it is known to be no back-off now."""
        self._note_lost(lost, key)
        if not lost.is_fault:
            self.tally.hold(key, message)
            self._look_at_one_less()
            return
        if self._release():
            return
        if self.tally.has_told_unknown:
            self._look_at_one_less()
        else:
            self.tally.has_told_unknown = True
            message.emit(self.json)
        if counts:
            self._count()

    # -- the end -----------------------------------------------------------------------------------------------------
    def _count(self) -> None:
        """One more explanation was given: observe no more after the last, and end the script if that was asked for."""
        self.left -= 1
        if self.left > 0:
            return
        self._observe_no_more()
        if not self.stop:
            hint = "that was the last explanation; --explain=N, or amp.explain_overflows(limit=N), sets how many."
            Message("note", hint).emit(self.json)
            return
        given = f"{self.limit} explanation{'s' if self.limit > 1 else ''}"
        Message("end", f"the script ends here, after {given}, as asked.").emit(self.json)
        raise SystemExit(1)

    def _look_at_one_less(self) -> None:
        """One more lost step was looked at in vain."""
        self.left_to_look_at -= 1
        if self.left_to_look_at == 0:
            self._observe_no_more()
            told = f"{MOST_LOST} lost steps were looked at; from here on they are only counted."
            Message("note", told).emit(self.json)

    def _observe_no_more(self) -> None:
        self.forwards.clear()
        self.loss_watch.stop()
        observers()[:] = [one for one in observers() if one is not self]


def _number_in(loss: torch.Tensor) -> str:
    """The loss as a number; of a loss with several elements, the first that is not finite."""
    flat = loss.detach().reshape(-1)
    return f"{float(flat[~torch.isfinite(flat)][0]):g}"


def _scale_of(scaler: LossScaler) -> float:
    """A host sync where the scale is on a device."""
    return float(scaler.loss_scale())


def _finite_gradients(optimizers: Sequence[Optimizer]) -> bool:
    grads = [p.grad for one in optimizers for group in one.param_groups for p in group["params"]]
    return all(is_finite(grad) for grad in grads if grad is not None)


def _repeatable(forwards: Iterable[Forward]) -> Iterator[tuple[Forward, torch.nn.Module]]:
    """Those of ``forwards`` whose model lives and can be run again by one process, each with its model."""
    for forward in forwards:
        model = forward.model()
        if model is not None and runs_alone(model):
            yield forward, model
