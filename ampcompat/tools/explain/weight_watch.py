"""Check what the steps of one optimizer write to its weights and its state."""

from __future__ import annotations

import torch

from ampcompat import _torch
from ampcompat.tools.core import Optimizer, master_of
from ampcompat.tools.explain.growth import History, Sizes
from ampcompat.tools.explain.lost_weights import first_written, params_of, state_of, weights_message
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.explain.numbers import not_representable, numbers_message
from ampcompat.tools.explain.tally import BackOff
from ampcompat.tools.tensors import largest_on_device


class WeightWatch:
    """The weights of one optimizer, step by step.

    Attributes:
        seen: How many it was asked for.
        made: The number of the last that was not skipped; 0 before.
        watched: Whether weights and state were finite when they were last looked at.
        versions: Of the weights, then.
        history: How large the weights were, after each of the last steps.
        back_off: Which of the last steps were skipped.
        losses: Those of the blocks since the last step.
        is_lost: Whether the step to come is known to be lost: its loss or a gradient is not finite.
        has_finite_loss: Whether the losses of the last step were finite, if it was made.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.seen = self.made = 0
        self.history = History()
        self.back_off = BackOff()
        self.losses: list[torch.Tensor] = []
        self.is_lost = False
        self.has_finite_loss = True
        self._look(optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        """Look at the weights as something other than a step has written them. One host sync."""
        self.watched, _, sizes = _examine(optimizer, [])
        self.versions = _versions(optimizer)
        self.history.begin(sizes)

    def begin_block(self, optimizer: Optimizer, loss: torch.Tensor) -> None:
        """Keep the loss, and look at weights that something other than a step has written: one host sync, if so.

        The step to come is to answer for its own writing alone.
        """
        self.losses.append(loss.detach())
        if self.watched and self.versions != _versions(optimizer):
            self._look(optimizer)

    def end_step(self) -> None:
        """A step was made or skipped, and told of."""
        self.losses.clear()
        self.is_lost = False

    def after(self, optimizer: Optimizer) -> list[Message]:
        """Look at what a step wrote and at its losses (one host sync a device), and at its numbers the first time.

        Returns:
            What is to be told of that.
        """
        written = None
        if self.watched:
            self.watched, self.has_finite_loss, sizes = _examine(optimizer, self.losses)
            self.history.add(sizes, optimizer)
            if not self.watched and not self.is_lost:  # otherwise the fault was told
                written = first_written(optimizer)
        self.versions = _versions(optimizer)
        messages: list[Message] = []
        if self.made == 0:
            blamed = [] if written is None else written.numbers
            found = [number for number in not_representable(optimizer) if number not in blamed]
            if found:
                messages.append(numbers_message(found))
        if written is not None:
            # A division by zero, or such a gradient, is infinite at any learning rate.
            at_any_rate = bool(written.numbers) or written.of_gradient
            growth = None if at_any_rate else self.history.growth(optimizer)
            messages.append(weights_message(written, self.seen, growth))
        return messages


def _examine(optimizer: Optimizer, losses: list[torch.Tensor]) -> tuple[bool, bool, list[Sizes]]:
    """Look at all weights that ``optimizer`` steps, the halves of masters too, at all its state, and at ``losses``.

    Reads each device: one host sync each.

    Returns:
        Whether weights and state are finite, whether the losses are, and how large the weights are, which stays on the
        device.
    """
    stepped: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    others: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for _, param in params_of(optimizer):
        if param.numel():
            stepped.setdefault((param.device, param.dtype), []).append(param)
        master = master_of(param)
        halves = [] if master is None else [master.half]
        for tensor in (*halves, *(tensor for _, tensor in state_of(optimizer, param))):
            if tensor.numel():
                others.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    flags: dict[torch.device, list[torch.Tensor]] = {}
    sizes: list[Sizes] = []
    for (device, _), tensors in stepped.items():
        largest_of_each = _largest_of_each(tensors)
        flags.setdefault(device, []).append(torch.isfinite(largest_of_each).all())
        sizes.append(Sizes([id(tensor) for tensor in tensors], largest_of_each))
    for (device, _), tensors in others.items():
        flags.setdefault(device, []).append(torch.isfinite(_largest_of_each(tensors)).all())
    counts = {device: len(found) for device, found in flags.items()}
    for loss in losses:
        flags.setdefault(loss.device, []).append(torch.isfinite(loss).all())
    weights_are_finite = losses_are_finite = True
    for device, found in flags.items():
        seen = torch.stack(found).tolist()
        count = counts.get(device, 0)
        weights_are_finite = weights_are_finite and all(seen[:count])
        losses_are_finite = losses_are_finite and all(seen[count:])
    return weights_are_finite, losses_are_finite, sizes


def _largest_of_each(tensors: list[torch.Tensor]) -> torch.Tensor:
    if tensors[0].device.type == "cpu":  # torch's norm is slow there
        return torch.stack([largest_on_device(tensor) for tensor in tensors])
    return torch.stack(_torch.foreach_norm([tensor.detach() for tensor in tensors], float("inf")))


def _versions(optimizer: Optimizer) -> list[int]:
    """Numbers that change when anything writes a weight that ``optimizer`` steps. Runs no op."""
    masters = [(param, master_of(param)) for group in optimizer.param_groups for param in group["params"]]
    return [param._version + (0 if master is None else master.half._version) for param, master in masters]
