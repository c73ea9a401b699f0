"""The observer that explains lost steps: from events of amp to messages.

A step is lost when its loss, a gradient or a weight that it wrote is not finite, or when it is skipped. What lost it is
asked of the watch, if that was on; otherwise its forwards are run again; and where that shows nothing, the next steps
are watched. A skip that may be a normal back-off of the loss scale is looked into by the watch alone.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
    master_of,
    overflowed_scalers,
    tensors_in,
    was_skipped,
)
from ampcompat.tools.explain.fault import Fault
from ampcompat.tools.explain.forwards import Block, BufferCopies, Forward
from ampcompat.tools.explain.growth import Grown
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.explain.misuse import spoiling_misuse
from ampcompat.tools.explain.numbers import not_representable, optimizer_name
from ampcompat.tools.explain.ops import GRADIENTS, is_too_large_unscaled, op_fault
from ampcompat.tools.explain.probe import Event
from ampcompat.tools.explain.ranks import Ranks
from ampcompat.tools.explain.replay import Finding, replay, runs_alone
from ampcompat.tools.explain.steps import Steps
from ampcompat.tools.explain.tally import Tally, Unknown
from ampcompat.tools.explain.watch import Watch
from ampcompat.tools.frames import hide_tools
from ampcompat.tools.tensors import is_finite

#: Forwards kept at a time, and steps after which a forward that no backward followed is forgotten.
MOST_FORWARDS, OLDEST = 16, 3
#: Lost steps whose forwards are run again.
MOST_RUN_AGAIN = 100
#: Of steps that are skipped in a row, every so-manieth is watched: a scale that comes down may be all that there is.
SKIPS_TO_A_WATCH = 3


@dataclass(frozen=True)
class LostStep:
    """A step that is lost, or is going to be.

    Attributes:
        head: What was seen, as in "The loss of step 3 is nan.".
        number: Its number.
        optimizers: Whose step it is.
        block: The block that lost it.
        tensors: What is not finite: the loss, or gradients.
        backward: Whether these are gradients.
        is_fault: Whether it is known to be no ordinary back-off of the loss scale.
    """

    head: str
    number: int
    optimizers: Sequence[Optimizer]
    block: Block
    tensors: list[torch.Tensor]
    backward: bool = True
    is_fault: bool = True

    @property
    def unknown(self) -> Unknown:
        """The key of such steps whose cause is not known."""
        return Unknown("gradients" if self.backward else "loss")


def _unseen(method: Callable[..., None]) -> Callable[..., None]:
    """Make ``method`` run ops that the watch does not see: they are not the script's."""

    @functools.wraps(method)
    def run(self: OverflowExplainer, *args: Any) -> None:
        with self.watch.paused():
            method(self, *args)

    return run


class OverflowExplainer:
    """Observer (see :mod:`ampcompat.amp.observers`) that explains lost steps.

    Args:
        limit: Different faults that are explained; more are only counted.
        stop: Whether the script ends with the last of them.
        json: Whether each message is a line of JSON.
        tally: Where lost steps are counted.
    """

    def __init__(self, limit: int, stop: bool, json: bool, tally: Tally) -> None:
        self.limit, self.stop, self.json = limit, stop, json
        self.tally = tally
        self.watch = Watch()
        self.ranks = Ranks()
        self.left = limit
        self.left_to_run_again = MOST_RUN_AGAIN
        self.steps: weakref.WeakKeyDictionary[Optimizer, Steps] = weakref.WeakKeyDictionary()
        self.forwards: deque[Forward] = deque(maxlen=MOST_FORWARDS)
        self.buffers: weakref.WeakKeyDictionary[torch.nn.Module, BufferCopies] = weakref.WeakKeyDictionary()
        self.running: list[Forward | None] = []  # forwards that have begun; None for those that are not kept
        self.block: Block | None = None  # the one that is open
        self.given: object = None  # the key of an input that was not finite, until it is known what made it
        self.lost_by: object = None  # the key of the fault that has left weights that are not finite
        self.too_large: Fault | None = None  # gradients too large at any loss scale, once told: weights then grow too
        self.has_seen_initialize = False
        self.lost_before: set[tuple[str, str]] = set()  # models and weights that were not finite at initialize

    # -- events ------------------------------------------------------------------------------------------------------
    @_unseen
    def on_initialize(self) -> None:
        """Note the weights that are not finite before any step."""
        self.has_seen_initialize = True
        for model in live_models():
            for name, param in model.named_parameters():
                if not is_finite(param):
                    self.lost_before.add((type(model).__name__, name))

    @_unseen
    def on_forward(self, model: torch.nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Keep references to what the outermost forward gets."""
        self.watch.given_to(model, args, kwargs)
        is_kept = not any(self.running) and torch.is_grad_enabled() and not is_replica(model)
        if not is_kept or self.watch.is_on or self.left_to_run_again <= 0:
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
        forward.end(tensors_in(output))
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        forward.grads = [None] * len(outputs)
        for index, tensor in enumerate(outputs):
            tensor.register_hook(self._noter(forward, index))  # type: ignore[no-untyped-call]
        self.forwards.append(forward)

    def _noter(self, forward: Forward, index: int) -> Callable[[torch.Tensor], None]:
        def note(grad: torch.Tensor) -> None:
            forward.grads[index] = grad
            if self.block is not None:
                forward.owners.update(self.block.optimizers)
                forward.block = self.block

        return note

    @_unseen
    def on_scale_loss(self, loss: torch.Tensor, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """Look at the loss, while the weights are those that made it: one host sync.

        Another at the first block of an optimizer, and where something other than a step has written its weights.
        """
        self.running.clear()
        self.block = Block(scaler, optimizers)
        is_lost = not is_finite(loss)
        for one in optimizers:
            self._steps_of(one).begin_block(one, self.block)
        if is_lost and not self._is_lost(optimizers):
            number, name = self._next_step(optimizers)
            head = f"The loss of {name} is {_number_in(loss)}."
            self._look_into(LostStep(head, number, optimizers, self.block, [loss], backward=False))

    @_unseen
    def on_gradients(self, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """Look at the gradients too at static scales: one host sync a block."""
        block, self.block = self.block, None
        if not optimizers:
            self.watch.after_step(self)  # such a block is for the gradient of an input: no step follows
        if block is None or scaler.dynamic or self._is_lost(optimizers):
            return
        grads = _lost_gradients(optimizers)
        if grads:
            number, name = self._next_step(optimizers)
            self._look_into(LostStep(f"A gradient of {name} is not finite.", number, optimizers, block, grads))

    def on_failure(self, error: Exception) -> None:
        """Leave no frame of the probe in the traceback, and no probe in the run."""
        self.running.clear()
        self.watch.stop()
        hide_tools(error.__traceback__)

    @_unseen
    def before_step(self, optimizer: Optimizer) -> None:
        """Look at weights that the script has written since the block: the step is not to answer for them."""
        self._steps_of(optimizer).look_at_written(optimizer)

    @_unseen
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
            self.tally.excuse(steps.descent)
            steps.descent.clear()
            self._look_at_made_step(optimizer, steps)
        if steps.lost_to is not None:
            self.tally.lose(steps.lost_to, is_skipped)
        steps.lost_to = None
        self._forget(optimizer)
        self.ranks.look()
        self.watch.after_step(optimizer)

    # -- a step ------------------------------------------------------------------------------------------------------
    def _look_at_skipped_step(self, optimizer: Optimizer, steps: Steps) -> None:
        """Explain a skipped step, unless that is an ordinary back-off of the scale."""
        overflowed = overflowed_scalers(optimizer)
        if steps.block is None:
            return  # no block was seen
        scaler = min(overflowed, key=_scale_of, default=steps.block.scaler)
        block = steps.last_blocks.get(scaler, steps.block)
        name = f"of loss {scaler.loss_id} " if count_of_scalers(optimizer) > 1 else ""
        scale = _scale_of(scaler)
        if overflowed:
            self.tally.scale_came_down(f"{name}came down to {scale:g}")
        if steps.lost_to is not None:
            return  # for its loss, or a gradient
        step = self._name_of_step(steps.seen, optimizer)
        if not overflowed and has_old_gradients(optimizer):
            self._tell_of_old_gradients(optimizer, steps, step)
            return
        persists = steps.back_off.is_fault(scale)
        if persists:
            why = f", as {steps.back_off}: gradients overflow although the scale {name}is {scale:g}."
        else:
            why = ": a gradient is not finite."
        head = f"S{step[1:]} was skipped{why}"
        lost = LostStep(head, steps.seen, [optimizer], block, _lost_gradients([optimizer]), is_fault=persists)
        if persists:
            steps.descent.clear()  # that was no descent to a scale that works
        if persists or self.watch.is_on:
            self._look_into(lost)
            return
        # What makes such gradients once, and at a scale that had worked, is likely to do so again.
        if steps.has_been_made_at(scaler):
            self._tell_of_unknown(lost, "")
            self.watch.arm()
            return
        if self.tally.is_held(GRADIENTS):
            self._note_lost(lost, GRADIENTS)
        else:
            self._tell_of_unknown(lost, "")
        steps.descent.append(self.tally.steps)
        if steps.skips % SKIPS_TO_A_WATCH == 0:
            self.watch.arm(1)

    def _look_at_made_step(self, optimizer: Optimizer, steps: Steps) -> None:
        """Tell of weights that are not finite and that the step has written, and at the first step of its numbers."""
        is_first = steps.made == 0
        written, self.tally.underflow = steps.after(optimizer)
        if is_first:
            for number in not_representable(optimizer):
                if written is None or number not in written.numbers:
                    head = f"{number.optimizer} has a number that the dtype of its parameters does not hold."
                    number.fault.message(head, steps.seen).emit(self.json)
        if written is not None and steps.block is not None:
            # What the script did to gradients between block and step is seen under the watch.
            head = f"A gradient of step {steps.seen} is not finite."
            lost = LostStep(head, steps.seen, [optimizer], steps.block, _lost_gradients([optimizer]))
            if self._look_at_origin(lost):
                written = None
        if written is not None:
            growth = None if written.at_any_rate else steps.history.growth(optimizer)
            misuse = None if written.at_any_rate else spoiling_misuse()
            fault = self._after_too_large(written.fault(steps.seen, growth, misuse))
            steps.lost_to = self.lost_by = fault.key
            self._tell(fault, f"Step {steps.seen} of {written.head}", steps.seen)
        if not steps.is_finite and self.lost_by is None:
            self.lost_by = steps.lost_to
            self.tally.weights_lost_at = self.tally.weights_lost_at or self.tally.steps

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
    def _forwards_of(self, lost: LostStep) -> list[Forward]:
        """The forwards that may have lost a step; for a loss, first those that no backward pass has followed yet."""
        ids = set(map(id, lost.optimizers))
        followed = [forward for forward in self.forwards if forward.owners & ids]
        return followed if lost.backward else [*(one for one in self.forwards if not one.owners), *followed]

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
    def _look_into(self, lost: LostStep) -> None:
        """Find what lost the step and tell it, or watch the next ones."""
        if self.watch.is_on:
            if not self._look_at_origin(lost):
                self._tell_of_unknown(lost, self._what_the_watch_shows(lost))
        elif self.left_to_run_again <= 0 and self.watch.arm() == 0:
            self._note_lost(lost, lost.unknown._replace(was_looked_into=False))
        else:
            self._look_at_forwards(lost)

    def _look_at_origin(self, lost: LostStep) -> bool:
        """Tell the origin that the watch has seen, if any; returns whether there is one."""
        event = self.watch.origin(lost.tensors)
        if event is None:
            return False
        key = self._lose_to(lost, event, lost.block)
        self.tally.find(lost.unknown.what, key, was_watched=True)
        if self.given is not None and self.watch.came_in(event):
            self.tally.is_one(self.given, key)
        return True

    def _look_at_forwards(self, lost: LostStep) -> None:
        """Run the forwards of the step again; where they stay finite, watch the next steps."""
        self.left_to_run_again -= 1
        findings = []
        problem = ""
        for forward, model in _repeatable(self._forwards_of(lost)):
            try:
                finding = replay(forward, model, lost.backward)
            except Exception as error:  # the run that is observed must go on whatever happens here
                problem = f" The batch could not be run again: {type(error).__name__}: {error}."
                break
            findings.append(finding)
            if finding.event is not None:
                key = self._lose_to(lost, finding.event, forward.block or lost.block)
                self.tally.find(lost.unknown.what, key, was_watched=False)
                if finding.event.op in ("input", "buffer"):
                    self.given = key
                    self.watch.arm()  # it shows what makes such an input, or writes the buffer
                return
        steps = self.watch.arm()
        known = problem or _what_forwards_show(lost, findings)
        watched = f" The next steps, {steps} at most, are watched as they run." if steps else ""
        self._tell_of_unknown(lost, known + watched)

    def _what_the_watch_shows(self, lost: LostStep) -> str:
        if self.watch.is_of_another_rank(lost.tensors):
            return " It came with the gradients of another rank."
        return (
            " The step was watched as it ran, and no op shows why. Ops in CUDA graphs and in DataParallel are not"
            " seen: start the script once without graphs, on one device (CUDA_VISIBLE_DEVICES=0)."
        )

    def _lose_to(self, lost: LostStep, event: Event, block: Block) -> object:
        """Note that the step is lost to ``event``, and tell it; returns the key of the fault."""
        if event.op == "parameter" and self.lost_by is not None:
            self._note_lost(lost, self.lost_by)  # that step was told, or the fault that came before it
            return self.lost_by
        fault = op_fault(event, block.scale, block.scaler.dynamic, self._origin_of_weight(event), self._growth())
        fault = self._after_too_large(fault)
        self._note_lost(lost, fault.key)
        if event.depends_on_scale and not lost.is_fault and not self.tally.is_known(fault.key):
            self.tally.hold(fault.key, fault.message(lost.head, lost.number), fault.cause)
            for one in lost.optimizers:
                self.tally.put_down(self._steps_of(one).descent, fault.key)
            return fault.key
        if event.op == "parameter":
            self.lost_by = fault.key
        if fault.growth is None and is_too_large_unscaled(event, block.scale):
            self.too_large = fault
        self._tell(fault, lost.head, lost.number)
        return fault.key

    def _note_lost(self, lost: LostStep, key: object) -> None:
        for one in lost.optimizers:
            self._steps_of(one).lost_to = key

    def _origin_of_weight(self, event: Event) -> str:
        """Where a parameter that is not finite may come from."""
        if (event.place.model, event.place.module) in self.lost_before:
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
        """Tell of ``fault``, unless it was told already or enough was told."""
        self.watch.disarm()
        if self.tally.is_known(fault.key):
            return
        if fault.growth is not None and self.tally.is_costly(GRADIENTS):
            self._release(GRADIENTS)  # what has cost so many steps is likely to have made the weight grow
        self.tally.know(fault.key, fault.cause)
        self._explain(fault.message(head, step))

    def _release(self, key: object) -> bool:
        """Tell what was held back for ``key``; returns whether there was anything to tell."""
        held = self.tally.release(key)
        if held is not None:
            self._explain(held)
        return held is not None

    def _tell_of_unknown(self, lost: LostStep, known: str) -> None:
        """Tell that the cause was not found, once; or what was held back, if it is known to be no back-off now."""
        self._note_lost(lost, lost.unknown)
        message = Message("unknown", f"{lost.head}{known}", content={"step": lost.number})
        if not lost.is_fault:
            self.tally.hold(lost.unknown, message)
            return
        if lost.backward and self._release(GRADIENTS):
            return
        if not self.tally.has_told_unknown and not self.tally.has_found(lost.unknown):
            self.tally.has_told_unknown = True
            message.emit(self.json)

    # -- the end -----------------------------------------------------------------------------------------------------
    def _explain(self, message: Message) -> None:
        """Write an explanation, if there are any left; after the last, end the script if that was asked for."""
        if self.left == 0:
            return
        message.emit(self.json)
        self.left -= 1
        if self.left > 0:
            return
        if not self.stop:
            hint = "that was the last explanation; --explain=N, or amp.explain_overflows(limit=N), sets how many."
            Message("note", hint).emit(self.json)
            return
        self.watch.stop()
        given = f"{self.limit} explanation{'s' if self.limit > 1 else ''}"
        Message("end", f"the script ends here, after {given}, as asked.").emit(self.json)
        raise SystemExit(1)


def _number_in(loss: torch.Tensor) -> str:
    """The loss as a number; of a loss with several elements, the first that is not finite."""
    flat = loss.detach().reshape(-1)
    return f"{float(flat[~torch.isfinite(flat)][0]):g}"


def _scale_of(scaler: LossScaler) -> float:
    """A host sync where the scale is on a device."""
    return float(scaler.loss_scale())


def _lost_gradients(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """The gradients that are not finite; those of half weights, where these have any, before those of their masters."""
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                master = master_of(param)
                halves = [] if master is None else [master.half]
                grads = [one.grad for one in (*halves, param) if one.grad is not None]
                found += [grad for grad in grads if not is_finite(grad)]
    return found


def _repeatable(forwards: Iterable[Forward]) -> list[tuple[Forward, torch.nn.Module]]:
    """Those of ``forwards`` that can be run again as they were, by one process, each with its model."""
    found = []
    for forward in forwards:
        model = forward.model()
        if model is not None and forward.is_as_it_was and runs_alone(model):
            found.append((forward, model))
    return found


def _what_forwards_show(lost: LostStep, findings: Sequence[Finding]) -> str:
    """What is known where no forward that was run again is the cause."""
    if not findings or any(finding.differs for finding in findings):
        return " Its forward could not be run again as it was."
    if any(finding.entered for finding in findings):
        known = " The gradient that came into the model was not finite already: the code after the model made it."
        scaler = lost.block.scaler
        if not scaler.dynamic and not scaler.is_one:
            known += f" The loss scale of {lost.block.scale:g} may be too high for it: a lower one shows."
        return known
    count = len(findings)
    if not lost.backward:
        which = "forward was" if count == 1 else f"{count} forwards were"
        largest = max(finding.largest for finding in findings)
        return f" Its {which} run again and stayed finite, with results up to {largest:.3g}."
    if count == 1:
        return " Its forward and backward were run again and stayed finite."
    return f" Its {count} forwards and their backwards were run again and stayed finite."
