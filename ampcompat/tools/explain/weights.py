"""The weights that one optimizer steps: whether they are finite, and how large."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ampcompat import _torch
from ampcompat.tools.core import Optimizer, latest_session, master_of
from ampcompat.tools.explain.growth import History
from ampcompat.tools.tensors import largest_on_device, readable


class Weights:
    """The weights of one optimizer, and its state, as they were when they were last looked at."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.history = History()  # how large the weights were, after each of the last steps
        self.look(optimizer)

    def look(self, optimizer: Optimizer) -> None:
        """Look at weights that something other than a step may have written: one host sync."""
        self.are_finite, self.is_state_finite, _, sizes = _examine(optimizer)
        self._versions = _versions(optimizer)
        self.history.begin(sizes)

    @property
    def is_all_finite(self) -> bool:
        """Whether weights and state are."""
        return self.are_finite and self.is_state_finite

    def look_at_written(self, optimizer: Optimizer) -> None:
        """Look, if something other than a step has written weights, which the step to come is not blamed for."""
        if self._versions != _versions(optimizer):
            self.look(optimizer)

    def look_after_step(self, optimizer: Optimizer) -> float | None:
        """Look at what a step has written, and at its gradients: one host sync a device.

        Returns:
            The largest gradient; None where it has none or float16 is not used.
        """
        largest_grad = None
        if self.are_finite:
            self.are_finite, self.is_state_finite, largest_grad, sizes = _examine(optimizer)
            self.history.add(sizes, optimizer)
        self._versions = _versions(optimizer)
        return largest_grad


def _examine(optimizer: Optimizer) -> tuple[bool, bool, float | None, dict[int, float]]:
    """Look at all weights that ``optimizer`` steps, the halves of masters too, and at its state and gradients.

    Returns:
        Whether weights and state are finite; the largest gradient, None where it has none or float16 is not used; and
        the largest magnitudes of the weights, by their ids.
    """
    weights = [param for _, param in params_of(optimizer) if param.numel()]
    masters = [master for master in map(master_of, weights) if master is not None]
    states = [tensor for param in weights for _, tensor in state_of(optimizer, param)]
    written = [*weights, *(master.half for master in masters)]
    grads = gradients_of(optimizer) if _computes_in_float16() else []
    sizes = _largest_of_each([*written, *states, *grads])
    are_finite = all(map(math.isfinite, sizes[: len(written)]))
    is_state_finite = all(map(math.isfinite, sizes[len(written) : len(written) + len(states)]))
    largest_grad = max(sizes[len(written) + len(states) :], default=None)
    return are_finite, is_state_finite, largest_grad, dict(zip(map(id, weights), sizes, strict=False))


def _computes_in_float16() -> bool:
    latest = latest_session()
    return latest is not None and latest.half_dtype == torch.float16


def _largest_of_each(tensors: list[torch.Tensor]) -> list[float]:
    """The largest magnitude in each: one host sync a device."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(index)
    order: dict[torch.device, list[int]] = {}
    found: dict[torch.device, list[torch.Tensor]] = {}
    for (device, _), indices in by_kind.items():
        alike = [tensors[index].detach() for index in indices]
        if device.type == "cpu":  # torch's norm is slow there
            largest = [largest_on_device(tensor) for tensor in alike]
        else:
            largest = list(_torch.foreach_norm(alike, float("inf")))
        order.setdefault(device, []).extend(indices)
        found.setdefault(device, []).append(torch.stack(largest).float())
    sizes = [0.0] * len(tensors)
    for device, parts in found.items():
        for index, size in zip(order[device], torch.cat(parts).tolist(), strict=True):
            sizes[index] = size
    return sizes


def _versions(optimizer: Optimizer) -> list[int]:
    """Numbers that change with writes to the weights of ``optimizer``, but for those to ``p.data``. Runs no op."""
    masters = [(param, master_of(param)) for group in optimizer.param_groups for param in group["params"]]
    return [param._version + (0 if master is None else master.half._version) for param, master in masters]


# -- what an optimizer steps -------------------------------------------------------------------------------------------
def params_of(optimizer: Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    """The parameters that can be looked at here, each with the index of its group."""
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if readable(param):
                yield index, param


def state_of(optimizer: Optimizer, param: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the optimizer's state for ``param``, each with its name."""
    held = optimizer.state.get(param)
    if not isinstance(held, dict):
        return
    for name, value in held.items():
        if isinstance(value, torch.Tensor) and readable(value) and value.numel():
            yield str(name), value


def gradients_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The dense gradients that ``optimizer`` has stepped with, unscaled."""
    grads = [param.grad for _, param in params_of(optimizer)]
    return [grad.detach() for grad in grads if grad is not None and not grad.is_sparse and grad.numel()]


def lost_gradients(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """The gradients that are not finite; those of half weights, where these have any, before those of their masters."""
    grads: list[torch.Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                master = master_of(param)
                holders = [param] if master is None else [master.half, param]
                grads += [one.grad for one in holders if one.grad is not None]
    grads = [grad for grad in grads if readable(grad) and grad.numel()]
    sizes = _largest_of_each(grads)
    return [grad for grad, size in zip(grads, sizes, strict=True) if not math.isfinite(size)]
