"""Follow the steps of one optimizer: what they write, which were lost to what, and at which loss scale."""

from __future__ import annotations

import math

import torch

from ampcompat import _torch
from ampcompat.tools.core import LossScaler, Optimizer, master_of
from ampcompat.tools.explain.forwards import Block
from ampcompat.tools.explain.growth import History, Sizes
from ampcompat.tools.explain.tally import BackOff
from ampcompat.tools.explain.underflow import (
    LEAST_SHARE,
    Underflow,
    can_vanish,
    gradients_of,
    is_too_small,
    share_of_zeros,
)
from ampcompat.tools.explain.written import Written, first_written, params_of, state_of
from ampcompat.tools.tensors import largest_on_device


class Steps:
    """The steps of one optimizer.

    Attributes:
        seen: How many there were.
        made: The number of the last that was not skipped; 0 before.
        back_off: Which of the last steps were skipped.
        lost_to: The key of the fault that the step to come is known to be lost to; None where it may be well.
        block: The last block; None before the first.
        last_blocks: Those since the step before, by their scalers.
        is_finite: Whether weights and state were finite when they were last looked at.
        history: How large the weights were, after each of the last steps.
        skips: How many steps in a row were skipped, up to the last.
        descent: Numbers, in the tally, of skips at scales that no step was made at, up to the last.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.seen = self.made = 0
        self.back_off = BackOff()
        self.lost_to: object = None
        self.block: Block | None = None
        self.history = History()
        self.last_blocks: dict[LossScaler, Block] = {}
        self.skips = 0
        self.descent: list[int] = []
        self._has_stepped = False
        self._made_at: dict[LossScaler, float] = {}  # the highest scales of steps that were made
        self._scales: dict[LossScaler, tuple[float, int]] = {}  # and the step that each came with
        self._look(optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        """Look at the weights as something other than a step has written them. One host sync."""
        self.is_finite, _, sizes = _examine(optimizer)
        self._versions = _versions(optimizer)
        self.history.begin(sizes)

    def begin_block(self, optimizer: Optimizer, block: Block) -> None:
        """Note a block, and look at weights that something other than a step has written."""
        if self._has_stepped:
            self._has_stepped = False
            self.last_blocks = {}
        self.block = self.last_blocks[block.scaler] = block
        if self.lost_to is not None and not gradients_of(optimizer):
            self.lost_to = None  # the script has dropped that batch
        self.look_at_written(optimizer)

    def look_at_written(self, optimizer: Optimizer) -> None:
        """Look at weights that something other than a step has written: one host sync, if so.

        The step to come is to answer for its own writing alone.
        """
        if self.is_finite and self._versions != _versions(optimizer):
            self._look(optimizer)

    def end(self, skipped: bool) -> None:
        """Note that a step was made or skipped, and the scales of its blocks."""
        self.seen += 1
        self.back_off.add(skipped)
        self._has_stepped = True
        self.skips = self.skips + 1 if skipped else 0
        for scaler, block in self.last_blocks.items():
            known, _ = self._scales.get(scaler, (math.nan, 0))
            if block.scale != known:
                self._scales[scaler] = block.scale, self.seen
            if not skipped:
                self._made_at[scaler] = max(block.scale, self._made_at.get(scaler, 0.0))

    def has_been_made_at(self, scaler: LossScaler) -> bool:
        """Whether a step was made at a loss scale as high as that of the last block of ``scaler``."""
        block = self.last_blocks.get(scaler)
        return block is not None and block.scale <= self._made_at.get(scaler, 0.0)

    def after(self, optimizer: Optimizer) -> tuple[Written | None, Underflow | None]:
        """Look at what a step that was made has written, and at its gradients: one host sync a device.

        Returns:
            The weight or state that it has left not finite, and gradients that were too small.
        """
        self.made = self.seen
        written = underflow = None
        if self.is_finite:
            self.is_finite, largest_grad, sizes = _examine(optimizer)
            self.history.add(sizes, optimizer)
            if not self.is_finite and self.lost_to is None:  # otherwise the fault was told
                written = first_written(optimizer)
            if largest_grad is not None and self._scales:
                underflow = self._underflow(optimizer, largest_grad)
        self._versions = _versions(optimizer)
        return written, underflow

    def _underflow(self, optimizer: Optimizer, largest: float) -> Underflow | None:
        scale, since = min(self._scales.values())
        if not is_too_small(largest, scale):
            return None
        share = share_of_zeros(gradients_of(optimizer))
        return Underflow(self.seen, share, scale, since) if share >= LEAST_SHARE else None


def _examine(optimizer: Optimizer) -> tuple[bool, float | None, list[Sizes]]:
    """Look at all weights that ``optimizer`` steps, the halves of masters too, and at its state and gradients.

    Reads each device: one host sync each.

    Returns:
        Whether weights and state are finite; the largest gradient, None where it has none or float16 is not used; and
        how large the weights are, which stays on the device.
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
    found: dict[torch.device, list[torch.Tensor]] = {}
    sizes: list[Sizes] = []
    for (device, _), tensors in stepped.items():
        largest_of_each = _largest_of_each(tensors)
        found.setdefault(device, []).append(_finite(largest_of_each))
        sizes.append(Sizes([id(tensor) for tensor in tensors], largest_of_each))
    for (device, _), tensors in others.items():
        found.setdefault(device, []).append(_finite(_largest_of_each(tensors)))
    counts = {device: len(tensors) for device, tensors in found.items()}
    grads: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in gradients_of(optimizer) if can_vanish() else ():
        grads.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), tensors in grads.items():
        found.setdefault(device, []).append(_largest_of_each(tensors).max().float())
    are_finite = True
    largest_grad: float | None = None
    for device, tensors in found.items():
        seen = torch.stack(tensors).tolist()
        count = counts.get(device, 0)
        are_finite = are_finite and all(seen[:count])
        largest_grad = max([*seen[count:], *([] if largest_grad is None else [largest_grad])], default=None)
    return are_finite, largest_grad, sizes


def _finite(largest_of_each: torch.Tensor) -> torch.Tensor:
    """1 where all are finite, 0 where one is not."""
    return torch.isfinite(largest_of_each).all().float()


def _largest_of_each(tensors: list[torch.Tensor]) -> torch.Tensor:
    if tensors[0].device.type == "cpu":  # torch's norm is slow there
        return torch.stack([largest_on_device(tensor) for tensor in tensors])
    return torch.stack(_torch.foreach_norm([tensor.detach() for tensor in tensors], float("inf")))


def _versions(optimizer: Optimizer) -> list[int]:
    """Numbers that change when anything writes a weight that ``optimizer`` steps. Runs no op."""
    masters = [(param, master_of(param)) for group in optimizer.param_groups for param in group["params"]]
    return [param._version + (0 if master is None else master.half._version) for param, master in masters]
