"""The observer: which steps of a run are looked into, and what is told of them.

A step is lost when its loss, a gradient or a weight that it wrote is not finite, or when it is skipped. What is not
finite is looked into at once; the gradients of a skip that may be a normal back-off of the loss scale only while the
steps are watched.

======================================================================  ==============================================
a skipped step                                                          is
======================================================================  ==============================================
that was watched, with a gradient that a lower loss scale holds         held back, and told where overflows persist
that was watched, with any other gradient                               told
that was not watched, at a loss scale at which a step was made before   not told; the next steps are watched
any other                                                               not told; after three in a row, one is watched
======================================================================  ==============================================
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampcompat.tools.core import (
    Args,
    Kwargs,
    LossScaler,
    Optimizer,
    live_optimizers,
    optimizer_name,
    overflowed_scalers,
    was_skipped,
)
from ampcompat.tools.explain import meanings
from ampcompat.tools.explain.again import Forwards
from ampcompat.tools.explain.birth import Birth
from ampcompat.tools.explain.counts import Counts
from ampcompat.tools.explain.growth import Growth
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.explain.misuse import warned
from ampcompat.tools.explain.ranks import Ranks
from ampcompat.tools.explain.steps import Block, Steps
from ampcompat.tools.explain.telling import Fault, Telling
from ampcompat.tools.explain.underflow import underflow
from ampcompat.tools.explain.watch import Watch
from ampcompat.tools.explain.weights import lost_gradients
from ampcompat.tools.explain.written import first_written
from ampcompat.tools.frames import hide_tools
from ampcompat.tools.tensors import is_finite

#: After so many steps that were skipped in a row, one is watched.
SKIPS_TO_A_WATCH = 3
OLD_GRADIENTS = "its gradients were not finite before its first block"


@dataclass(frozen=True)
class Case:
    """Something of one step that is not finite."""

    head: str  # as in "the loss of step 3 is nan"
    number: int  # of the step, among those of its optimizer
    steps: Sequence[Steps]  # of each optimizer that makes the step
    block: Block


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
        self.counts = Counts()
        self.steps: weakref.WeakKeyDictionary[Optimizer, Steps] = weakref.WeakKeyDictionary()
        self._first_blocks: dict[LossScaler, Block] = {}  # of the scalers whose scale moves
        self._is_spoiling_told = False  # whether it was told what has left weights that are not finite

    # -- events --------------------------------------------------------------------------------------------------------
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
        self.counts.add_block()
        block = Block(scaler)
        if scaler.dynamic:
            self._first_blocks.setdefault(scaler, block)
        all_steps = self._steps_of(optimizers)
        are_first = [steps.begin_block(block) for steps in all_steps]
        if self._are_weights_finite():
            self.counts.spoiled_at = 0
        if is_finite(loss):
            for steps, is_first in zip(all_steps, are_first, strict=True):
                if is_first:  # others of the step may be of another loss
                    steps.weights.history.add_loss(loss)
        elif not any(steps.lost for steps in all_steps):
            self._look_into("loss", f"the loss of {{}} is {_number_in(loss)}", all_steps, block, [loss])

    def on_scaled_loss(self, block: object, scaled: torch.Tensor) -> None:
        """Know which gradients have the loss scale in them."""
        self.watch.given_loss(scaled)

    @_unwatched
    def on_gradients(self, scaler: LossScaler, optimizers: Sequence[Optimizer]) -> None:
        """Look at the gradients too at static scales, which skip no step: one host sync a block."""
        all_steps = self._steps_of(optimizers)
        if not optimizers:
            self.watch.after_step(None)  # for the gradient of an input: no step follows
        if any(steps.lost for steps in all_steps):
            return
        grads = [] if scaler.dynamic else lost_gradients(optimizers)
        if grads:
            self._look_into("gradients", "a gradient of {} is not finite", all_steps, Block(scaler), grads)

    def on_failure(self, error: Exception) -> None:
        """Leave no frame of the probe in the traceback, and no probe in the run."""
        self.forwards.leave()
        self.watch.stop()
        hide_tools(error.__traceback__)

    @_unwatched
    def before_step(self, optimizer: Optimizer) -> None:
        """Look at weights that the script has written since the block, so that the step is not blamed for them."""
        for steps in self._steps_of([optimizer]):
            steps.weights.look_at_written(optimizer)

    @_unwatched
    def on_step(self, optimizer: Optimizer, skipped: bool | None) -> None:
        """Count the step; look into it, if it was skipped or left a weight not finite.

        One host sync, and another where only the device knows whether it skipped.
        """
        self.ranks.look()
        (steps,) = self._steps_of([optimizer])
        is_skipped = was_skipped(optimizer, skipped)
        steps.end(is_skipped)
        try:
            if not is_skipped:
                self._look_at_made(steps)
            elif not steps.lost and lost_gradients([optimizer]):  # else the flag of a batch whose gradients are gone
                steps.lost = "gradients"
                self._look_at_skipped(steps)
        finally:  # what is told may end the script, which may catch that
            self.counts.add_step(is_skipped, steps.lost)
            steps.lost, steps.is_told = "", False
            self.forwards.after_step()
            self.watch.after_step(optimizer)

    # -- a step --------------------------------------------------------------------------------------------------------
    def _look_at_made(self, steps: Steps) -> None:
        """Look at what a step has written, and at its gradients."""
        were_finite, was_all_finite = steps.weights.are_finite, steps.weights.is_all_finite
        largest = steps.weights.look_after_step(steps.optimizer)
        steps.steps_of_zeros = steps.steps_of_zeros + 1 if largest == 0 else 0
        steps.underflow = ""
        if largest is not None and steps.blocks:
            scale = min(block.scale for block in steps.blocks.values())
            told = underflow(steps, self._name_of(steps, steps.seen), scale, largest)
            has_learned_all = bool(told) and steps.weights.history.losses[-1:] == [0.0]
            steps.underflow = "" if has_learned_all else told
        if was_all_finite and not steps.weights.is_all_finite and not steps.lost:
            self._look_at_written(steps)
        if were_finite and not steps.weights.are_finite:
            self.counts.spoiled_at = self.counts.spoiled_at or steps.seen
            self._is_spoiling_told = steps.is_told

    def _look_at_written(self, steps: Steps) -> None:
        """Tell of a weight, or state, that a step has left not finite."""
        name = self._name_of(steps, steps.seen)
        grads = lost_gradients([steps.optimizer])
        birth = self.watch.find(grads)  # what the script did to gradients between block and step
        if birth is not None and steps.blocks:
            steps.lost = "gradients"
            block = list(steps.blocks.values())[-1]
            self._tell_birth(birth, Case(f"a gradient of {name} is not finite", steps.seen, [steps], block))
            return
        written = first_written(steps.optimizer)
        if written is None:
            return
        steps.lost, steps.is_told = "weights", True
        lines = [*written.lines, ("before", OLD_GRADIENTS)] if steps.had_old_gradients else written.lines
        content = {**written.content, "had_old_gradients": steps.had_old_gradients}
        row = meanings.OLD_GRADIENTS if steps.had_old_gradients else meanings.STEP
        fault = Fault(written.words, f"{name}: {written.words}", row, lines, content, steps.seen)
        self._tell(fault, self._growth(None))

    def _look_at_skipped(self, steps: Steps) -> None:
        """Look into a skip that is no ordinary back-off of the loss scale."""
        if not steps.blocks:
            return  # an optimizer that no block has named
        overflowed = overflowed_scalers(steps.optimizer)
        scaler = min(overflowed, key=_scale_of, default=list(steps.blocks)[-1])
        block = steps.blocks.get(scaler) or list(steps.blocks.values())[-1]
        name = self._name_of(steps, steps.seen)
        persists = steps.overflows_persist(_scale_of(scaler))
        why = f", as were {steps.often}" if persists else ""
        case = Case(f"{name} was skipped{why}: a gradient is not finite", steps.seen, [steps], block)
        if self.watch.is_on:
            birth = self.watch.find(lost_gradients([steps.optimizer]))
            if birth is not None and birth.may_end_at_lower_scale(block.scale) and not persists:
                steps.held = birth
            elif birth is not None:
                self._tell_birth(birth, case)
            elif persists:
                self._tell_unknown(case, "no op that was seen made it")
        elif persists and steps.held is not None:
            self._tell_birth(steps.held, case)
        elif persists:
            self._tell_unknown(case, "no op that was seen made it")
        elif steps.has_been_made_at(block):
            self.watch.arm()
        if steps.skips % SKIPS_TO_A_WATCH == 0:
            self.watch.arm(1)

    def _look_into(
        self, what: str, head: str, all_steps: Sequence[Steps], block: Block, tensors: list[torch.Tensor]
    ) -> None:
        """Look into a loss, or gradients, that are not finite; ``head`` has a gap for the name of the step to come."""
        for steps in all_steps:
            steps.lost = what
        is_watched = self.watch.is_on
        if self.counts.spoiled_at and (self._is_spoiling_told or not is_watched):
            return  # weights that are not finite lose every step
        number = max([steps.seen for steps in all_steps], default=self.counts.steps) + 1
        name = self._name_of(all_steps[0], number) if all_steps else f"step {number}"
        case = Case(head.format(name), number, all_steps, block)
        if is_watched:
            birth, known = self.watch.find(tensors), "no op that was seen made it"
        else:
            is_nan = what == "loss" and bool(torch.isnan(tensors[0]).any())
            birth, known = self.forwards.find(what == "gradients", is_nan)
        if birth is None:
            self._tell_unknown(case, known)
        elif birth.kind != "parameter" or not self.counts.spoiled_at:
            self._tell_birth(birth, case)

    # -- telling -------------------------------------------------------------------------------------------------------
    def _tell_birth(self, birth: Birth, case: Case) -> None:
        """Tell where a value was born that is not finite."""
        for steps in case.steps:
            steps.is_told = True
        if birth.kind == "parameter":
            for optimizer, steps in self.steps.items():
                steps.weights.look(optimizer)  # so that the next step is not blamed for what `data` has written
            if not self._are_weights_finite():
                self.counts.spoiled_at, self._is_spoiling_told = case.number, True
        scale, is_dynamic = case.block.scale, case.block.scaler.dynamic
        lines, content = birth.lines(scale, is_dynamic), birth.as_dict(scale)
        fault = Fault(birth.words, case.head, birth.row(), lines, content, case.number, birth.key)
        if birth.is_scaled and case.steps:
            fault.key += f" of optimizer {list(self.steps.values()).index(case.steps[0])}"
        if not self.telling.is_known(fault):
            self.watch.disarm()  # what comes again stays watched, to be counted
        self._tell(fault, self._growth(birth.read))
        if birth.kind in ("input", "buffer") and not self.watch.is_on:
            self.watch.arm()  # to see what makes it

    def _tell(self, fault: Fault, growth: Growth | None) -> None:
        fault.growth = growth
        self.telling.tell(fault, self.counts.steps)

    def _tell_unknown(self, case: Case, known: str) -> None:
        """Watch the next steps; tell, once, that a birth was not found."""
        steps = self.watch.arm()
        more = f"; up to {steps} steps are watched as they run" if steps else ""
        fault = Fault("", f"{case.head}; {known}{more}", meanings.UNKNOWN, [], {}, case.number)
        fault.growth = self._growth(None)
        self.telling.tell_unknown(fault)

    def _growth(self, read: frozenset[int] | None) -> Growth | None:
        """The weight of any optimizer that has grown most, of those that were ``read``."""
        grown = [steps.weights.history.growth(optimizer, read) for optimizer, steps in self.steps.items()]
        return max((one for one in grown if one is not None), key=lambda one: one.times, default=None)

    def _are_weights_finite(self) -> bool:
        return all(steps.weights.are_finite for steps in self.steps.values())

    def _steps_of(self, optimizers: Sequence[Optimizer]) -> list[Steps]:
        for one in optimizers:
            if one not in self.steps:
                self.steps[one] = Steps(one)
        return [self.steps[one] for one in optimizers]

    def _name_of(self, steps: Steps, number: int) -> str:
        """As in "step 31"; with the optimizer, where there are several."""
        optimizers = live_optimizers()
        if len(optimizers) < 2:
            return f"step {number}"
        index = optimizers.index(steps.optimizer)
        return f"step {number} of optimizer {index} ({optimizer_name(steps.optimizer)})"

    # -- the end -------------------------------------------------------------------------------------------------------
    def last_words(self) -> list[Message]:
        """Tell what was held back in a run that was mostly skipped; returns the counts of all ranks."""
        counts = self.counts
        self.telling.stop = False  # the script ends
        if counts.steps == 0 and counts.blocks == 0:
            birth = self.forwards.find_in_latest()  # of a script that leaves out each batch
            head = "no step was made, and no scale_loss block begun; the last forward returned what is not finite."
            return [] if birth is None else [Message("verdict", head, birth.lines(1.0, False), birth.as_dict(1.0))]
        if counts.steps == 0 and self.telling.steps:
            return []  # explain itself has ended the script
        if 2 * counts.skipped > counts.steps and not self.telling.steps:
            for steps in self.steps.values():
                if steps.held is not None:
                    case = Case(f"{steps.often} were skipped", steps.seen, [steps], list(steps.blocks.values())[-1])
                    self._tell_birth(steps.held, case)
        self._fill(counts)
        found = sorted(self.ranks.gather(counts).items())
        return [of_rank.message(rank, self.ranks.count) for rank, of_rank in found] if self.ranks.is_first else []

    def _fill(self, counts: Counts) -> None:
        """Add to the counts what is known at the end."""
        counts.told = dict(self.telling.steps)
        counts.warned = warned()
        for scaler, first in self._first_blocks.items():
            of = f" of loss {scaler.loss_id}" if len(self._first_blocks) > 1 else ""
            counts.scales[of] = [first.scale, _scale_of(scaler)]
        if underflows := [steps.underflow for steps in self.steps.values() if steps.underflow]:
            counts.at_end[meanings.ZEROS.name] = "; ".join(underflows)
        if counts.blocks_since and lost_gradients(list(self.steps)):
            counts.at_end[meanings.OLD_GRADIENTS.name] = "gradients are not finite, and were not cleared"


def _number_in(loss: torch.Tensor) -> str:
    """The loss as a number; of a loss with several elements, the first that is not finite."""
    flat = loss.detach().reshape(-1)
    return f"{float(flat[~torch.isfinite(flat)][0]):g}"


def _scale_of(scaler: LossScaler) -> float:
    """A host sync where the scale is on a device."""
    return float(scaler.loss_scale())
