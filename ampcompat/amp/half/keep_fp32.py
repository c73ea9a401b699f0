"""Modules that stay float32 inside a model that runs in half: ``initialize(keep_fp32=...)``.

A kept module gets a boundary: its forward has float32 inputs and runs with casts off; where the model's weights are
half, its outputs go back to half. The boundary is a policy of the dynamic subclass that makes a model run under amp, so
that deepcopy, pickle, DataParallel, a direct ``module.forward(x)`` and ``torch.compile`` go through it too.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from ampcompat._log import say
from ampcompat._state import state
from ampcompat._types import HALF_DTYPES
from ampcompat.amp.casts import casts_off
from ampcompat.amp.casts.trees import cast_tree, tensors_in
from ampcompat.amp.half.forward import Args, Forward, Kwargs, ModelPolicy, set_policy
from ampcompat.amp.half.masters import own_tensors

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)
Names = dict[torch.nn.Module, str]


class BoundaryPolicy(ModelPolicy):
    """How a kept module runs; ``output_dtype`` is the half dtype around it, if any."""

    def run(self, model: torch.nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Run ``forward`` on float32 inputs, casts off."""
        tensors = tensors_in((args, kwargs))
        came_from_half = _may_come_from_half_code(tensors)
        args = cast_tree(args, torch.float32)
        kwargs = cast_tree(kwargs, torch.float32)
        tensors = tensors or list(model.parameters())
        device_type = tensors[0].device.type if tensors else "cpu"
        if torch.is_autocast_enabled(device_type):
            with casts_off(device_type):
                output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
        if self.output_dtype is None or not came_from_half:
            return output
        return cast_tree(output, self.output_dtype)


def _may_come_from_half_code(inputs: list[torch.Tensor]) -> bool:
    """Whether ``inputs`` may come from a half model, so that what computes with the outputs expects half ones."""
    dtypes = [tensor.dtype for tensor in inputs if tensor.is_floating_point()]
    if not dtypes:  # integers, as an embedding takes, say nothing of the model around
        return True
    return any(dtype in HALF_DTYPES for dtype in dtypes)


# -- which modules are kept --------------------------------------------------------------------------------------------
def select(models: list[torch.nn.Module], keep_fp32: Any) -> list[torch.nn.Module]:
    """List the modules that ``keep_fp32`` and ``AMPCOMPAT_KEEP_FP32`` name, the outermost ones only.

    Modules that share a tensor with a kept one are kept as well, with a message: a tied weight has one dtype.

    Args:
        models: Those given to ``initialize``.
        keep_fp32: A module, a module type, a pattern of names, or a collection of these; None keeps nothing.

    Raises:
        TypeError: Something is no module, type or pattern.
        ValueError: Nothing matches, or a module cannot be kept. For a pattern of the environment the first
            ``scale_loss`` raises it: a script may initialize its models one by one.
    """
    names = {module: name for model in reversed(models) for name, module in model.named_modules()}
    chosen = [*_chosen_by_argument(keep_fp32, names), *_chosen_by_environment(names)]
    kept = _with_sharers(chosen, names, models)
    inner = {part for module in kept for part in module.modules() if part is not module}
    return [module for module in kept if module not in inner]


def _chosen_by_argument(keep_fp32: Any, names: Names) -> list[torch.nn.Module]:
    if keep_fp32 is None:
        return []
    is_collection = isinstance(keep_fp32, (list, tuple, set, frozenset))
    entries = keep_fp32 if is_collection else [keep_fp32]
    chosen: list[torch.nn.Module] = []
    for wanted in entries:
        matches = _matches(wanted, names)
        if not matches:
            shown = type(wanted).__name__ if isinstance(wanted, torch.nn.Module) else repr(wanted)
            raise ValueError(f"keep_fp32={shown} - it matches no module of the model - {_hint(names)}")
        chosen += matches
    return chosen


def _chosen_by_environment(names: Names) -> list[torch.nn.Module]:
    """List the modules that ``AMPCOMPAT_KEEP_FP32`` names; a pattern that matches none may match a later model."""
    given = os.environ.get("AMPCOMPAT_KEEP_FP32", "").split(",")
    patterns = [pattern.strip() for pattern in given if pattern.strip()]
    chosen: list[torch.nn.Module] = []
    for pattern in patterns:
        matches = _matches(pattern, names)
        chosen += matches
        if matches:
            say(f"AMPCOMPAT_KEEP_FP32: {pattern!r} keeps {_list(matches)} in float32.")
            continue
        say(f"AMPCOMPAT_KEEP_FP32: {pattern!r} matches no module of this model, which has {_list(names)}.")
        if not any(isinstance(observer, Unmatched) for observer in state.observers):
            state.observers.append(Unmatched(patterns))
    return chosen


def _with_sharers(
    chosen: list[torch.nn.Module], names: Names, models: list[torch.nn.Module]
) -> dict[torch.nn.Module, None]:
    """Return ``chosen``, what containers among them contain, and every module that shares a tensor with one of these.

    Raises a ValueError for a module that cannot be kept.
    """
    holders = _holders_by_tensor(names)
    covered = {part for module in chosen for part in module.modules()}
    kept: dict[torch.nn.Module, None] = {}
    waiting = deque(chosen)
    while waiting:
        module = waiting.popleft()
        if isinstance(module, _CONTAINERS):  # it has no forward: what it contains is kept
            waiting.extend(module.children())
            continue
        _refuse_unsupported(module, names, models)
        kept[module] = None
        for part, sharer in _pairs_that_share(module, holders):
            if sharer in covered:
                continue
            say(f"keep_fp32: {names[sharer]!r} shares a tensor with {names[part]!r} and stays float32 with it.")
            waiting.append(sharer)
            covered.update(sharer.modules())
    return kept


def _pairs_that_share(
    module: torch.nn.Module, holders: dict[int, list[torch.nn.Module]]
) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """Each part of ``module``, with each module that holds a tensor of it (the part itself is one)."""
    for part in module.modules():
        for _, tensor in own_tensors(part):
            for holder in holders[id(tensor)]:
                yield part, holder


def _holders_by_tensor(names: Names) -> dict[int, list[torch.nn.Module]]:
    """The modules that hold each tensor, by its id."""
    holders: dict[int, list[torch.nn.Module]] = {}
    for module in names:
        for _, tensor in own_tensors(module):
            holders.setdefault(id(tensor), []).append(module)
    return holders


def _refuse_unsupported(module: torch.nn.Module, names: Names, models: list[torch.nn.Module]) -> None:
    """Raise a ValueError if ``module`` cannot have a boundary of its own."""
    if not set(module.modules()).isdisjoint(models):
        raise ValueError(
            f"keep_fp32 keeps a whole model ({type(module).__name__}) - it keeps modules inside of one - initialize"
            " this model with opt_level='O0', or name modules in it."
        )
    name = names[module]
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"keep_fp32 keeps {name!r}, a ScriptModule - it runs as scripted - script it later.")
    for parent in names:
        if isinstance(parent, torch.nn.MultiheadAttention) and any(child is module for child in parent.children()):
            raise ValueError(
                f"keep_fp32 keeps {name!r} inside of a MultiheadAttention - that uses its parts' weights without"
                f" calling them - keep the whole of {names[parent]!r}."
            )


@dataclass(eq=False)
class Unmatched:
    """Refuses to train while a pattern of the environment matches no module of any model under amp."""

    patterns: list[str]

    def on_scale_loss(self, *_: object) -> None:
        """Look at all models, once."""
        names = {module: name for model in state.models.live for name, module in model.named_modules()}
        for pattern in self.patterns:
            if not _matches(pattern, names):
                raise ValueError(
                    f"AMPCOMPAT_KEEP_FP32 (--keep-fp32): {pattern!r} - it matches no module of any model -"
                    f" {_hint(names)}"
                )
        state.observers[:] = [observer for observer in state.observers if observer is not self]


def _matches(wanted: object, names: Names) -> Names:
    """Return the modules in ``names`` that one entry of ``keep_fp32`` means, with their names."""
    if isinstance(wanted, torch.nn.Module):
        return {wanted: names[wanted]} if wanted in names else {}
    if isinstance(wanted, type) and issubclass(wanted, torch.nn.Module):
        return {module: name for module, name in names.items() if isinstance(module, wanted)}
    if isinstance(wanted, str):
        return {module: name for module, name in names.items() if _fits_pattern(module, name, wanted)}
    raise TypeError(
        f"keep_fp32 got {wanted!r} - it takes modules, module types and name patterns, or a list of these - pass"
        " keep_fp32=['encoder.*.wo'] for instance."
    )


def _fits_pattern(module: torch.nn.Module, name: str, pattern: str) -> bool:
    if not name:  # a whole model
        return False
    return fnmatchcase(name, pattern) or fnmatchcase(type(module).__name__, pattern)


# -- the boundary ------------------------------------------------------------------------------------------------------
def set_boundary(module: torch.nn.Module, policy: ModelPolicy | None) -> None:
    """Put the boundary ``policy`` around ``module``, or what was there before."""
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _keep_off_fused_path]:
        del hooks[key]
    set_policy(module, policy)
    if isinstance(policy, BoundaryPolicy):
        state.models.live.discard(module)
        module.register_forward_pre_hook(_keep_off_fused_path)


def _keep_off_fused_path(module: torch.nn.Module, args: object) -> None:
    """Do nothing: torch's fused encoder layer skips its parts' forwards, but not where a part has a hook."""


# -- names in messages -------------------------------------------------------------------------------------------------
def _hint(names: Names) -> str:
    return f"modules are named {_list(names)}; patterns are shell patterns over these names or over class names."


def _list(names: Names) -> str:
    shown = sorted(name for name in names.values() if name)
    listed = ", ".join(shown[:20])
    if len(shown) > 20:
        listed += f" and {len(shown) - 20} more"
    return listed
