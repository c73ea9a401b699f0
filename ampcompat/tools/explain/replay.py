"""Running a recorded forward, and its backward, again under probes."""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ampcompat.tools.core import Args, Kwargs, map_tree, observers, tensors_in
from ampcompat.tools.explain.forwards import Forward, as_it_was
from ampcompat.tools.explain.places import Places
from ampcompat.tools.explain.probe import Event, Probe
from ampcompat.tools.tensors import is_finite, largest


@dataclass
class Finding:
    """Hold what running a forward again has shown.

    Attributes:
        event: The fault, or None where everything stayed finite.
        entered: Whether the gradient that came into the model was not finite already.
        largest: The largest magnitude that it returned.
        differs: Whether it has returned something else than in the run: it is not that forward that was run again.
    """

    event: Event | None = None
    entered: bool = False
    differs: bool = False
    largest: float = 0.0


def replay(forward: Forward, model: torch.nn.Module, backward: bool) -> Finding:
    """Run ``forward`` again and find the origin of what is not finite in its outputs or gradients.

    Nothing of the run changes: generators and buffers are put back, gradients are not accumulated.

    Args:
        forward: A forward that can be run again.
        model: Its model.
        backward: Run the backward too, from the gradients that the outputs got.
    """
    places = Places([model], model, sys._getframe(), forward.called_at)
    probe = Probe(places)
    with run_again(forward, model) as (args, kwargs, leaves), places:
        probe.given_to(model, args, kwargs)
        with probe:
            output = model.forward(*args, **kwargs)
        outputs = tensors_in(output)
        if not forward.has_returned(outputs):
            return Finding(differs=True)
        event = probe.origin(outputs)
        if not backward:
            return Finding(event, largest=max(map(largest, outputs), default=0.0))
        pairs = received(forward, outputs)
        if not all(is_finite(grad) for _, grad in pairs):
            return Finding(event, entered=True)
        with probe:
            grads = run_backward(model, pairs, leaves)
        event = probe.origin(grads) or event
        if event is not None and event.depends_on_scale and forward.block is not None:
            event.largest_gradient = _largest_unscaled(places, model, pairs, leaves, forward.block.scale)
    return Finding(event)


def _largest_unscaled(
    places: Places, model: torch.nn.Module, pairs: Pairs, leaves: list[torch.Tensor], scale: float
) -> float:
    """The largest half gradient of a backward without the loss scale; inf where float16 does not hold that either."""
    probe = Probe(places)
    with probe:
        grads = run_backward(model, [(output, grad / scale) for output, grad in pairs], leaves)
    return probe.largest_gradient if all(map(is_finite, grads)) else math.inf


@contextlib.contextmanager
def run_again(forward: Forward, model: torch.nn.Module) -> Iterator[tuple[Args, Kwargs, list[torch.Tensor]]]:
    """Inside: everything as at the recorded forward, unobserved, grad on. Afterwards: as outside, bitwise.

    Yields copies of the arguments, positional and by keyword, and those leaves among them that want gradients.
    """
    leaves: list[torch.Tensor] = []

    def detached(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone()  # the forward may write into it
        if not tensor.requires_grad:
            return copy
        leaves.append(copy.requires_grad_())
        return copy.view_as(copy)  # what wants gradients must not be written in place as a leaf; the run's was none

    with _unobserved(), as_it_was(forward, model), torch.enable_grad():
        args = tuple(_copied(value, detached) for value in forward.args)
        kwargs = {name: _copied(value, detached) for name, value in forward.kwargs.items()}
        yield args, kwargs, leaves


def _copied(value: object, detached: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """A copy of one argument: a forward that writes into its batch, or collects in it, must not do so twice.

    ``detached`` copies a tensor. Objects that move themselves (``.to``) are asked for a copy, or copied with their
    attributes; any other object is handed over itself.
    """

    def copied_leaf(leaf: Any) -> object:
        if isinstance(leaf, torch.Tensor):
            return detached(leaf)
        if callable(getattr(leaf, "clone", None)):
            with torch.no_grad():
                return leaf.clone()
        clone = copy.copy(leaf)
        for name, attribute in getattr(clone, "__dict__", {}).items():
            clone.__dict__[name] = map_tree(attribute, detached, objects=False)
        return clone

    changed = map_tree(value, copied_leaf)
    if changed is value and isinstance(value, (list, dict, set)):
        return copy.copy(value)
    return changed


Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def received(forward: Forward, outputs: list[torch.Tensor]) -> Pairs:
    """Those of ``outputs`` that got a gradient in the run, each with that."""
    differentiable = [output for output in outputs if output.requires_grad]
    pairs = zip(differentiable, forward.grads, strict=False)
    return [(output, grad) for output, grad in pairs if grad is not None]


def run_backward(model: torch.nn.Module, pairs: Pairs, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of ``leaves`` and parameters, from those that outputs got; none is accumulated."""
    wanted = [*leaves, *(p for p in model.parameters() if p.requires_grad)]
    if not pairs or not wanted:
        return []
    outputs, received_grads = zip(*pairs, strict=True)
    grads = torch.autograd.grad(outputs, wanted, received_grads, retain_graph=True, allow_unused=True)
    return [grad for grad in grads if grad is not None]


@contextlib.contextmanager
def _unobserved() -> Iterator[None]:
    held = observers()[:]
    observers().clear()
    try:
        yield
    finally:
        observers()[:] = held


def runs_alone(model: torch.nn.Module) -> bool:
    """Whether ``model`` can be run again by one process: synchronised batch norms wait for the others."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not (distributed and any(isinstance(m, torch.nn.SyncBatchNorm) for m in model.modules()))
