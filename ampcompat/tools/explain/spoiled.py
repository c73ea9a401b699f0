"""Weights that are not finite: since when, what has spoiled them, and where else they may come from."""

from __future__ import annotations

import torch

from ampcompat.tools.core import live_models
from ampcompat.tools.explain.event import Event
from ampcompat.tools.tensors import is_finite

_WRITERS = (
    "load_state_dict, or an update of the script's own (SAM, an average of weights) with gradients that overflowed: amp"
    " skips optimizer.step() alone"
)


class SpoiledWeights:
    """What is known of weights that are not finite."""

    def __init__(self) -> None:
        self.since = 0  # the step that left them, among those of all optimizers; 0 where none is known
        self.by = ""  # the key of the fault that this step was lost to; "" where that is not known
        self._has_seen_initialize = False
        self._before: set[tuple[str, str]] = set()  # models, and weights and buffers that were not finite at initialize

    def note_initialize(self) -> None:
        """Note the weights and buffers that are not finite before any step."""
        self._has_seen_initialize = True
        for model in live_models():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if not is_finite(tensor):
                    self._before.add((type(model).__name__, name))

    def buffers_lost_since(self) -> list[str]:
        """The buffers that were finite at initialize and are not now, but for masks, as "buffer norm.mean of Net"."""
        found = []
        for model in live_models() if self._has_seen_initialize else ():
            kind = type(model).__name__
            for name, tensor in model.named_buffers():
                is_lost = not is_finite(tensor) and (kind, name) not in self._before
                if is_lost and not bool(tensor.amax() < torch.inf):  # a mask has -inf alone
                    found.append(f"buffer {name} of {kind}")
        return found

    def note(self, step: int, fault: str) -> None:
        """Note the step that left weights that are not finite, if it is the first, and what it was lost to."""
        if not self.since:
            self.since, self.by = step, fault

    def forget(self) -> None:
        """Note that all weights are finite again: the script has written others."""
        self.since, self.by = 0, ""

    def origin(self, event: Event, is_any_step_made: bool) -> str:
        """Where the parameter, or buffer, that ``event`` is may come from; "" where that is not known."""
        if (event.place.model, event.place.module) in self._before:
            return (
                "it was not finite before amp.initialize already: look at how the model is made, or at the checkpoint"
                " it came from"
            )
        if event.op == "buffer":
            return ""
        if is_any_step_made:
            return f"no step is known to have written it: look at what else writes weights, such as {_WRITERS}"
        if self._has_seen_initialize:
            return (
                f"it was finite at amp.initialize, and no step was made yet: look at what writes it, such as {_WRITERS}"
            )
        return "no step was made yet: look at how the model is initialized, or at the checkpoint it came from"
