"""The observer: which events of a run are looked into.

A step is lost when its loss, a gradient or a weight that it wrote is not finite, or when it is skipped. What is not
finite is looked into at once; the gradients of a skip that may be a normal back-off of the loss scale only while the
steps are watched.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ampcompat.tools.core import (
    Args,
    Kwargs,
    LossScaler,
    Optimizer,
    count_of_scalers,
    optimizer_name,
    overflowed_scalers,
    rank,
    was_skipped,
)
from ampcompat.tools.explain.diagnosis import Case, Diagnosis
from ampcompat.tools.explain.event import Event
from ampcompat.tools.explain.forwards import Forwards
from ampcompat.tools.explain.lost import (
    FALLING,
    NORMAL,
    SKIPS_TO_A_WATCH,
    WINDOW,
    LostStep,
    end_fall,
    is_mostly_skipped,
    overflows_persist,
    put_down,
    skipped_of,
)
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.explain.misuse import warned
from ampcompat.tools.explain.numbers import not_representable
from ampcompat.tools.explain.ops import cause_of
from ampcompat.tools.explain.ranks import Ranks
from ampcompat.tools.explain.steps import BlockScale, OptimizerSteps
from ampcompat.tools.explain.telling import Telling
from ampcompat.tools.explain.underflow import Underflow
from ampcompat.tools.explain.verdict import Account, Verdict
from ampcompat.tools.explain.watch import Watch
from ampcompat.tools.explain.weights import lost_gradients
from ampcompat.tools.frames import hide_tools
from ampcompat.tools.tensors import is_finite
from ampcompat.tools.words import counted, were


def _unwatched(method: Callable[..., None]) -> Callable[..., None]:
    """Make ``method`` run ops that the watch does not see: they are not the script's."""

    @functools.wraps(method)
    def run(self: OverflowExplainer, *args: Any) -> None:
        with self.watch.paused():
            method(self, *args)

    return run


class OverflowExplainer:
    """Observer (see :mod:`ampcompat.amp.observers`) that explains lost steps; takes what :class:`.Telling` takes."""

    def __init__(self, limit: int, stop: bool, json: bool) -> None:
        self.watch = Watch()
        self.forwards = Forwards()
        self.telling = Telling(limit, stop, json, self.watch.stop)
        self.ranks = Ranks()
        self.steps: weakref.WeakKeyDictionary[Optimizer, OptimizerSteps] = weakref.WeakKeyDictionary()
        self.diagnosis = Diagnosis(self.watch, self.forwards, self.telling, self.steps)
        self.blocks_begun = 0
        self._blocks_at_step = 0  # how many had begun at the last step
        self._most_blocks = 1  # from one step to the next
        self.underflow: Underflow | None = None  # of the latest step, if its gradients were too small
        self.open_block: BlockScale | None = None

    # -- events ------------------------------------------------------------------------------------------------------
    @_unwatched
    def on_initialize(self) -> None:
        """Note the weights that are not finite before any step."""
        self.diagnosis.spoiled.note_initialize()

    @_unwatched
    def on_forward(self, model: torch.nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Keep references to what it gets."""
        self.watch.given_to(model, args, kwargs)
        self.forwards.begin(model, args, kwargs, self.watch.is_on)

    def on_output(self, model: torch.nn.Module, output: object) -> None:
        """Keep what it has returned."""
        self.forwards.end(output)

    @_unwatched
    def on_scale_loss(self, loss: torch.Tensor, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """Look at the loss, while the weights are those that made it: one host sync.

        Another at the first block of an optimizer, and where something other than a step has written its weights.
        """
        self.blocks_begun += 1
        block = self.open_block = BlockScale(scaler)
        is_lost = not is_finite(loss)
        for one in optimizers:
            self._steps_of(one).begin_block(one, block)
        if all(steps.weights.are_finite for steps in self.steps.values()):
            self.diagnosis.spoiled.forget()
        if not is_lost:
            for one in optimizers:
                self._steps_of(one).weights.history.add_loss(loss)
        elif not self._is_lost(optimizers):
            self._look_into_block(f"The loss of {{}} is {_number_in(loss)}.", "loss", optimizers, block, [loss])

    @_unwatched
    def on_gradients(self, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """Look at the gradients too at static scales: one host sync a block. At dynamic ones, after a step of zeros."""
        block, self.open_block = self.open_block, None
        if not optimizers:
            self.watch.after_block()  # for the gradient of an input: no step follows
        if block is None or self._is_lost(optimizers):
            return
        for one in optimizers:
            self._steps_of(one).end_block(one)
        if scaler.dynamic:
            return
        grads = lost_gradients(optimizers)
        if grads:
            self._look_into_block("A gradient of {} is not finite.", "gradients", optimizers, block, grads)

    def on_failure(self, error: Exception) -> None:
        """Leave no frame of the probe in the traceback, and no probe in the run."""
        self.forwards.leave()
        self.watch.stop()
        hide_tools(error.__traceback__)

    @_unwatched
    def before_step(self, optimizer: Optimizer) -> None:
        """Look at weights that the script has written since the block, so that the step is not blamed for them."""
        self._steps_of(optimizer).weights.look_at_written(optimizer)

    @_unwatched
    def on_step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Count the step; explain it, if it was skipped or left a weight not finite.

        One host sync, and another where only the device knows whether it skipped.
        """
        self.ranks.look()
        self._most_blocks = max(self._most_blocks, self.blocks_begun - self._blocks_at_step)
        self._blocks_at_step = self.blocks_begun
        steps = self._steps_of(optimizer)
        is_skipped = was_skipped(optimizer, skipped)
        is_known = steps.lost is not None  # from its block: the loss, or a gradient, is not finite
        if is_skipped and not is_known:
            steps.lost = LostStep("gradients", back_off=NORMAL if steps.block is None else "")
        if steps.lost is not None:
            self.diagnosis.record(steps.lost, is_skipped)
        steps.end(is_skipped)
        try:
            if not is_skipped:
                self._look_at_made_step(optimizer, steps)
            elif steps.lost is not None and steps.block is not None:
                self._look_at_skipped_step(optimizer, steps, steps.block, steps.lost, is_known)
        finally:  # what is told may end the script, which may catch that
            steps.lost = None
            self.diagnosis.ended += 1
            self.forwards.after_step()
            self.watch.after_step(optimizer)

    # -- a step ------------------------------------------------------------------------------------------------------
    def _look_at_skipped_step(
        self, optimizer: Optimizer, steps: OptimizerSteps, block: BlockScale, lost: LostStep, is_known: bool
    ) -> None:
        """Note to what the loss scale has come down; look into a skip that is no ordinary back-off of it."""
        overflowed = overflowed_scalers(optimizer)
        scaler = min(overflowed, key=_scale_of, default=block.scaler)
        scale = _scale_of(scaler)
        of_loss = f"of loss {scaler.loss_id} " if count_of_scalers(optimizer) > 1 else ""
        if overflowed:
            lost.scale, lost.of_loss = f"came down to {scale:g}", of_loss
        if is_known:
            return
        name = self._name_of_step(steps.seen, optimizer)
        name = name[0].upper() + name[1:]
        persists = overflows_persist(steps.last, scale)
        why = ": a gradient is not finite."
        if persists:
            overflowed_at = steps.last_blocks.get(scaler, block).scale
            why = (
                f", as {skipped_of(steps.last)}: gradients overflow although the scale {of_loss}was {overflowed_at:g}."
            )
            end_fall(steps.last, "")
        block = steps.last_blocks.get(scaler, block)
        grads = lost_gradients([optimizer])
        case = Case(f"{name} was skipped{why}", steps.seen, "gradients", [steps], block, grads, is_fault=persists)
        self._look_at_overflow(case, steps, lost)

    def _look_at_overflow(self, case: Case, steps: OptimizerSteps, lost: LostStep) -> None:
        """Look into gradients that are not finite if the step was watched; otherwise watch others, where due."""
        if self.watch.is_on:
            self.diagnosis.look_into(case)
            return
        if case.is_fault:
            self.diagnosis.tell_of_persistent(case)
        elif steps.has_been_made_at(case.block.scaler):
            self.watch.arm()  # what makes such gradients once, and at a scale that had worked, is likely to do so again
        else:
            lost.back_off = FALLING
            if steps.held is not None and not steps.held.is_told:
                lost.fault = lost.fault or steps.held.key
        if steps.skips % SKIPS_TO_A_WATCH == 0:
            self.watch.arm(1)

    def _look_at_made_step(self, optimizer: Optimizer, steps: OptimizerSteps) -> None:
        """Tell of weights that are not finite and that the step has written, and at the first step of its numbers."""
        is_first = steps.made == 0
        were_finite = steps.weights.are_finite
        written, self.underflow = steps.after(optimizer)
        if is_first:
            self._tell_of_numbers(optimizer, steps.seen, [] if written is None else written.covers)
        if written is not None:
            grads = lost_gradients([optimizer])
            event, _ = self.watch.find(grads)  # what the script did to gradients between block and step
            was_seen = event is not None and steps.block is not None
            lost = steps.lost = LostStep("gradients" if was_seen else "weights", was_watched=was_seen)
            self.diagnosis.record(lost, is_skipped=False)
            if event is not None and steps.block is not None:
                head = f"A gradient of step {steps.seen} is not finite."
                self.diagnosis.blame(event, Case(head, steps.seen, "gradients", [steps], steps.block, grads))
            else:
                self.diagnosis.tell_of_written(written, lost)
        if were_finite and not steps.weights.are_finite and steps.lost is not None:
            self.diagnosis.spoiled.note(self.diagnosis.current, steps.lost.fault)

    def _tell_of_numbers(self, optimizer: Optimizer, step: int, told: Sequence[str]) -> None:
        """Tell of those that the parameters' dtype does not hold: they may cost nothing, and are not counted."""
        faults = {number.text: number.fault for number in not_representable(optimizer)}  # one for all groups
        for fault in faults.values():
            if fault.key not in told:
                fault.step = step
                fault.message().emit(self.telling.json)

    # -- the optimizers of a block -----------------------------------------------------------------------------------
    def _steps_of(self, optimizer: Optimizer) -> OptimizerSteps:
        if optimizer not in self.steps:
            self.steps[optimizer] = OptimizerSteps(optimizer)
        return self.steps[optimizer]

    def _is_lost(self, optimizers: Sequence[Optimizer]) -> bool:
        return any(self._steps_of(one).lost is not None for one in optimizers)

    def _name_of_step(self, number: int, optimizer: Optimizer | None) -> str:
        """As in "step 31"; with the optimizer, where there are several."""
        if len(self.steps) < 2 or optimizer is None:
            return f"step {number}"
        return f"step {number} of optimizer {list(self.steps).index(optimizer)} ({optimizer_name(optimizer)})"

    # -- looking into a lost step ------------------------------------------------------------------------------------
    def _look_into_block(
        self, head: str, what: str, optimizers: Sequence[Optimizer], block: BlockScale, tensors: list[torch.Tensor]
    ) -> None:
        """Look into the step to come, which a block has lost; ``head`` has a gap for its name."""
        number = max([self._steps_of(one).seen for one in optimizers], default=self.diagnosis.ended) + 1
        name = self._name_of_step(number, optimizers[0] if optimizers else None)
        all_steps = [self._steps_of(one) for one in optimizers]
        for steps in all_steps:
            steps.lost = LostStep(what)
        self.diagnosis.look_into(Case(head.format(name), number, what, all_steps, block, tensors))

    # -- the end -----------------------------------------------------------------------------------------------------
    def last_words(self) -> list[Message]:
        """What is to be told when the run ends: the verdict, and before it what was held back without need."""
        steps = self.diagnosis.ended
        if steps == 0 and not self.blocks_begun:
            event = self.forwards.find_in_latest()
            return [] if event is None else [Message("verdict", _without_block(event))]
        if steps == 0 and self.telling.told:
            return []  # explain itself has ended the script
        if steps == 0:
            blocks = f"{counted(self.blocks_begun, 'scale_loss block')} {were(self.blocks_begun)}"
            old = self._old_gradients()
            return [Message("verdict", f"no step was made: {blocks} followed by no optimizer.step(){old}.")]
        held = []
        if is_mostly_skipped(self.diagnosis.lost, steps):
            held = self.telling.held_for_nothing()
        own = Account(
            rank=rank(),
            steps=steps,
            lost=put_down(self.diagnosis.lost),
            told={fault.key: fault.cause for fault in self.telling.told},
            has_told_unknown=self.telling.has_told_unknown,
            weights_lost_at=self.diagnosis.spoiled.since,
            warned=warned(),
            underflow=self.underflow,
            unstepped=self._unstepped(),
            lost_buffers=self.diagnosis.spoiled.buffers_lost_since(),
        )
        verdict = Verdict(self.ranks.gather(own), self.ranks.count)
        return [*held, Message("verdict", str(verdict), content=verdict.as_dict())]

    def _unstepped(self) -> str:
        """The blocks after the last step, in words, if they are far more than a step usually takes; otherwise ""."""
        since = self.blocks_begun - self._blocks_at_step
        if since <= max(WINDOW, 2 * self._most_blocks):
            return ""
        return f"no step was made after the last {since} scale_loss blocks{self._old_gradients()}"

    def _old_gradients(self) -> str:
        """As a part of a sentence, that no zero_grad() has cleared what is not finite; "" where none is left."""
        if not lost_gradients(list(self.steps)):
            return ""
        return ", and gradients that are not finite were not cleared: call zero_grad() where no step is made too"


def _without_block(event: Event) -> str:
    """For a script that leaves out each batch, since what the model returns is not finite."""
    return (
        "no step was made, and no scale_loss block begun: the last forward returned what is not finite, made in"
        f" {cause_of(event)}."
    )


def _number_in(loss: torch.Tensor) -> str:
    """The loss as a number; of a loss with several elements, the first that is not finite."""
    flat = loss.detach().reshape(-1)
    return f"{float(flat[~torch.isfinite(flat)][0]):g}"


def _scale_of(scaler: LossScaler) -> float:
    """A host sync where the scale is on a device."""
    return float(scaler.loss_scale())
