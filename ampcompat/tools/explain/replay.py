"""Running a recorded forward, and its backward, again under probes."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ampcompat.tools.core import Args, Kwargs, map_tree, observers, tensors_in
from ampcompat.tools.explain.forwards import Forward, as_it_was
from ampcompat.tools.explain.places import Places
from ampcompat.tools.explain.probe import Event, Probe
from ampcompat.tools.frames import ScriptLine
from ampcompat.tools.tensors import is_finite


@dataclass
class Finding:
    """Hold the result of a replay.

    Attributes:
        event: The fault, or None where the replay stayed finite.
        model: Class name of the model.
        entered: Whether the gradient that came into the model was not finite already.
        has_moved: Whether the weights were written since the forward.
        caveat: What makes the replay unlike the run, if anything.
        called_at: The line of the script that called the model.
    """

    event: Event | None
    model: str
    entered: bool = False
    has_moved: bool = False
    caveat: str = ""
    called_at: ScriptLine | None = None


def replay(forward: Forward, model: torch.nn.Module, backward: bool) -> Finding:
    """Run ``forward`` again and find the origin of what is not finite in its outputs or gradients.

    Nothing of the run changes: generators and buffers are put back, gradients are not accumulated.

    Args:
        forward: A forward.
        model: Its model.
        backward: Run the backward too, from the gradients that the outputs got.
    """
    names = {id(module): name for name, module in model.named_modules()}
    finding = Finding(
        None,
        type(model).__name__,
        has_moved=forward.has_moved,
        caveat=_caveat(forward),
        called_at=forward.called_at,
    )
    places = Places(names, sys._getframe())
    places.modules.stack.append(("", finding.model))  # its forward is called past the hooks that would say so
    probe = Probe(places)
    with run_again(forward, model) as (args, kwargs, leaves), places:
        for number, tensor in enumerate(tensors_in((args, kwargs))):
            probe.given(tensor, "input", str(number))
        for name, tensor in model.named_parameters():
            probe.given(tensor, "parameter", name)
        for name, tensor in model.named_buffers():
            probe.given(tensor, "buffer", name)
        with probe:
            output = model.forward(*args, **kwargs)
        outputs = tensors_in(output)
        finding.event = probe.origin(outputs)
        if finding.event is None and backward:
            finding.event = _backward(forward, model, outputs, leaves, probe, finding)
    return finding


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


def _backward(
    forward: Forward,
    model: torch.nn.Module,
    outputs: list[torch.Tensor],
    leaves: list[torch.Tensor],
    probe: Probe,
    finding: Finding,
) -> Event | None:
    if not all(is_finite(grad) for _, grad in received(forward, outputs)):
        finding.entered = True
        return None
    with probe:
        grads = run_backward(forward, model, outputs, leaves)
    return probe.origin(grads)


def received(forward: Forward, outputs: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Those of ``outputs`` that got a gradient in the run, each with that."""
    differentiable = [output for output in outputs if output.requires_grad]
    pairs = zip(differentiable, forward.grads, strict=False)
    return [(output, grad) for output, grad in pairs if grad is not None]


def run_backward(
    forward: Forward, model: torch.nn.Module, outputs: list[torch.Tensor], leaves: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The gradients of ``leaves`` and parameters, from those that the outputs got; none is accumulated."""
    pairs = received(forward, outputs)
    wanted = [*leaves, *(p for p in model.parameters() if p.requires_grad)]
    if not pairs or not wanted:
        return []
    grads = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    return [grad for grad in grads if grad is not None]


@contextlib.contextmanager
def _unobserved() -> Iterator[None]:
    held = observers()[:]
    observers().clear()
    try:
        yield
    finally:
        observers()[:] = held


def _caveat(forward: Forward) -> str:
    if forward.overwritten:
        return "The inputs were written since the forward, so what was run again is not quite the same batch."
    if forward.has_moved:
        return "The weights were written since the forward, so what was run again is not quite the same."
    return ""


def runs_alone(model: torch.nn.Module) -> bool:
    """Whether ``model`` can be run again by one process: synchronised batch norms wait for the others."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not (distributed and any(isinstance(m, torch.nn.SyncBatchNorm) for m in model.modules()))
