"""From something that is not finite to what is told of it: find its origin, and name the fault that this is.

The gradients of a skip may be gone at a lower loss scale, which is normal: their explanation is held back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from ampcompat.tools.core import LossScaler, Optimizer, optimizer_name
from ampcompat.tools.explain.event import Event
from ampcompat.tools.explain.fault import Fault
from ampcompat.tools.explain.forwards import Forwards
from ampcompat.tools.explain.growth import Grown
from ampcompat.tools.explain.lost import WINDOW, LostStep, falling
from ampcompat.tools.explain.ops import GRADIENTS, op_fault
from ampcompat.tools.explain.setting import setting_of
from ampcompat.tools.explain.spoiled import SpoiledWeights
from ampcompat.tools.explain.steps import BlockScale, OptimizerSteps
from ampcompat.tools.explain.telling import Telling
from ampcompat.tools.explain.watch import Watch


@dataclass(frozen=True)
class Case:
    """What is looked into: something of a step that is not finite."""

    head: str  # what was seen, as in "The loss of step 3 is nan."
    number: int  # of the step, among those of its optimizer
    what: str  # is not finite: "loss" or "gradients"
    steps: Sequence[OptimizerSteps]  # of each optimizer that makes the step
    block: BlockScale  # that lost it
    tensors: list[torch.Tensor]  # the loss, or the gradients that are not finite
    is_fault: bool = True  # known to be no ordinary back-off of the loss scale

    @property
    def rows(self) -> list[LostStep]:
        """Its rows, one for each optimizer."""
        return [steps.lost for steps in self.steps if steps.lost is not None]

    @property
    def is_nan_loss(self) -> bool:
        """Whether it is a loss that is NaN."""
        return self.what == "loss" and any(bool(torch.isnan(tensor).any()) for tensor in self.tensors)

    def lose_to(self, key: str) -> None:
        """Note the fault that the step was lost to."""
        for row in self.rows:
            row.fault = key


class Diagnosis:
    """Find out what lost steps, and tell it.

    Args:
        watch: Finds the origin in a step that was watched.
        forwards: Finds it otherwise.
        telling: Tells.
        steps_of: The steps of each optimizer.
    """

    def __init__(
        self, watch: Watch, forwards: Forwards, telling: Telling, steps_of: Mapping[Optimizer, OptimizerSteps]
    ) -> None:
        self.watch = watch
        self.forwards = forwards
        self.telling = telling
        self.steps_of = steps_of
        self.ended = 0  # how many steps have, of all optimizers
        self.lost: list[LostStep] = []  # in the whole run
        self.spoiled = SpoiledWeights()
        self._lost_input = ""  # the key of an input that was not finite, until it is known what made it

    @property
    def current(self) -> int:
        """The number of the step that is on, or to come, among those of all optimizers."""
        return self.ended + 1

    def record(self, lost: LostStep, is_skipped: bool) -> None:
        """Note that the step that ends now was lost."""
        lost.number = self.current
        lost.skipped = is_skipped
        self.lost.append(lost)

    def look_into(self, case: Case) -> None:
        """Find what lost the step and tell it, or watch the next ones."""
        is_watched = self.watch.is_on
        promise = ""
        if self.spoiled.since and (self.spoiled.by or not is_watched):
            case.lose_to(self.spoiled.by)  # weights that are not finite lose every step
            return
        if is_watched:
            event, known = self.watch.find(case.tensors)
        else:
            event, known = self.forwards.find(case.what == "gradients", case.is_nan_loss, case.block)
            if event is None:
                promise = self._watch_next(case.block.scaler)
        for row in case.rows:
            row.was_watched = is_watched
            row.was_looked_into = event is not None or bool(known or promise)
        if event is not None:
            self.blame(event, case)
        elif known or (promise and not self.telling.told):
            self._tell_of_unknown(case, f"{known}{promise}")

    def _watch_next(self, scaler: LossScaler) -> str:
        """Watch the next steps; says so."""
        steps = self.watch.arm()
        if not steps:
            return ""
        watched = f" The next steps, {steps} at most, are watched as they run."
        if scaler.dynamic:
            return watched
        return f"{watched} They show nothing if this one spoils the weights: pass loss_scale='dynamic', which skips it."

    def blame(self, event: Event, case: Case) -> None:
        """Tell the fault that ``event`` is, or hold it back while the step may be a normal back-off."""
        if event.op == "parameter" and self.spoiled.since:
            case.lose_to(self.spoiled.by)
            return
        fault = self._fault_of(event, case)
        case.lose_to(fault.key)
        if event.depends_on_scale:  # so do the skips before, at higher scales
            for row in [row for steps in case.steps for row in falling(steps.last)]:
                row.fault = row.fault or fault.key
        may_be_back_off = event.depends_on_scale and not fault.is_too_large and not case.is_fault
        if may_be_back_off and not self.telling.is_told(fault.key):
            self.telling.hold(fault)
            for steps in case.steps:
                steps.held = fault
            return
        if event.op == "parameter":
            self.spoiled.note(self.current, fault.key)
            for optimizer, steps in self.steps_of.items():
                steps.weights.look(optimizer)  # so that the next step is not blamed for what `data` has written
        self._tell(fault)
        self._look_for_writer(event, fault)

    def _fault_of(self, event: Event, case: Case) -> Fault:
        origin = self.spoiled.origin(event, any(steps.made for steps in self.steps_of.values()))
        growth = self._growth(event.unread) or self._earlier_growth(event)
        fault = op_fault(event, setting_of(case.block.scaler, case.block.scale, origin, growth))
        fault.head, fault.step = case.head, case.number
        if case.is_fault:
            fault.wait = ""  # overflows persist, so that no lower scale is to be waited for
        if fault.key == GRADIENTS:
            fault.key = self._gradients_of(case)
        self._join_too_large(fault)
        return fault

    def _look_for_writer(self, event: Event, fault: Fault) -> None:
        """Watch what makes an input, or writes a buffer, that is not finite; what was seen is the cause of it."""
        if event.op in ("input", "buffer") and not self.watch.is_on:
            self._lost_input = fault.key
            self.watch.arm()
        elif self._lost_input and self.watch.came_in(event):
            self.telling.found[self._lost_input].cause = fault.cause

    def _growth(self, but: Collection[int] = ()) -> Grown | None:
        """The weight that the last steps of an optimizer made many times larger, if any, ``but`` for some storages."""
        found = [steps.weights.history.growth(optimizer, but) for optimizer, steps in self.steps_of.items()]
        return max((one for one in found if one is not None), key=lambda one: one.times, default=None)

    def _earlier_growth(self, event: Event) -> Grown | None:
        """A weight that has grown for longer, if half would have held ``event`` were it as much smaller."""
        told = [
            fault.growth for fault in self.telling.told if fault.growth is not None and fault.key == fault.growth.key
        ]
        for optimizer, steps in self.steps_of.items():
            history = steps.weights.history
            of_this = [one for one in told if one.optimizer == id(optimizer)]
            found = [one for one in of_this if history.is_still_large(one, event.unread)]
            found += [one for one in [history.growth_since_first(optimizer, event.weights)] if one is not None]
            for grown in found:
                if event.fits_if_smaller(grown.times):
                    return grown
        return None

    def _join_too_large(self, fault: Fault) -> None:
        """Make a weight that grew, after gradients were told to be too large at any scale, the same fault as these."""
        if fault.growth is None or fault.cause != fault.growth.cause:
            return
        for told in self.telling.told:
            if told.is_too_large:
                fault.key, fault.cause = told.key, told.cause

    def _gradients_of(self, case: Case) -> str:
        """The key of gradients that are too large: as the scale falls, they are found in one op after the other."""
        number = list(self.steps_of.values()).index(case.steps[0]) if case.steps else 0
        return f"{GRADIENTS} of optimizer {number}"

    # -- telling -----------------------------------------------------------------------------------------------------
    def _tell(self, fault: Fault) -> None:
        self.watch.disarm()
        self.telling.tell(fault)

    def tell_of_persistent(self, case: Case) -> None:
        """Tell what a watched step has shown: overflows persist, so it is a fault. If none has, watch more steps."""
        lately = [row for steps in case.steps for row in steps.last if row is not None and row.what == case.what]
        if any(row.was_watched and self.telling.is_told(row.fault) for row in lately):
            return  # every third step is watched: another fault may have come
        growth = self._growth()
        if growth is not None and self.telling.is_told(growth.key):
            case.lose_to(growth.key)  # what is held back was seen before
            return
        latest = case.steps[0].held
        if latest is not None and not latest.is_told and case.number - latest.step <= WINDOW:
            case.lose_to(latest.key)
            latest.wait = ""
            latest.note = f"this is what step {latest.step} showed, which was watched"
            latest.head, latest.step = case.head, case.number
            self.telling.tell(latest)
        elif not self.telling.is_told(self._gradients_of(case)):
            watched = self._watch_next(case.block.scaler)
            for row in case.rows:
                row.was_looked_into = bool(watched)
            self._tell_of_unknown(case, watched)

    def _tell_of_unknown(self, case: Case, known: str) -> None:
        """Tell, once, that the cause was not found, where the step is known to be no normal back-off."""
        is_found = any(row.what == case.what and row.was_watched and row.fault for row in self.lost)
        if case.is_fault and not is_found:
            self.telling.tell_unknown(f"{case.head}{known}", case.number)

    def tell_of_written(self, fault: Fault, lost: LostStep) -> None:
        """Tell of weights that are not finite, and that a step has written."""
        self._join_too_large(fault)
        lost.fault = fault.key
        self._tell(fault)

    def tell_of_old_gradients(self, head: str, lost: LostStep, step: int, optimizer: Optimizer) -> None:
        """Tell of gradients that overflowed before, and lose each step since."""
        fault = Fault(
            what="gradients that overflowed in an earlier step were not cleared",
            where=f"the parameters of {optimizer_name(optimizer)}",
            cause="gradients of an earlier overflow that were not cleared",
            key="old gradients",
            head=head,
            step=step,
            hints=["call optimizer.zero_grad() after a skipped step too, before the next block"],
        )
        lost.fault = fault.key
        self._tell(fault)
