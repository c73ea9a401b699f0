"""Which modules stay float32 inside a model that runs in half: ``initialize(keep_fp32=...)``.

How such a module runs is in :mod:`ampcompat.amp.half.boundary`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch

from ampcompat._log import say
from ampcompat.amp.half.record import own_tensors

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)
Names = dict[torch.nn.Module, str]


def select_kept(models: list[torch.nn.Module], keep_fp32: Any) -> list[torch.nn.Module]:
    """List the modules that ``keep_fp32`` and ``AMPCOMPAT_KEEP_FP32`` name, the outermost ones only.

    Modules that share a tensor with a kept one are kept as well, with a message: a tied weight has one dtype.

    Args:
        models: The models that ``initialize`` was given.
        keep_fp32: A module, a module type, a pattern of names, or a collection of these; None keeps nothing.

    Raises:
        TypeError: Something is not a module, type or pattern.
        ValueError: Nothing matches, or a module cannot be kept. A pattern of the environment may match nothing, with a
            message: a script may initialize its models one by one.
    """
    names = _names_in(models)
    chosen = [*_chosen_by_argument(keep_fp32, names), *_chosen_by_environment(names)]
    kept = _with_sharers(_without_containers(chosen), names)
    for module in kept:
        _refuse_unsupported(module, names, models)
    return _outermost(kept)


def _names_in(models: Iterable[torch.nn.Module]) -> Names:
    """The qualified name of every module in ``models``; a module of several models has its name in the first."""
    names: Names = {}
    for model in models:
        for name, module in model.named_modules():
            names.setdefault(module, name)
    return names


# -- what is named -----------------------------------------------------------------------------------------------------
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
            say(f"AMPCOMPAT_KEEP_FP32: {pattern!r} keeps {_listed(matches)} in float32.")
        else:
            say(f"AMPCOMPAT_KEEP_FP32: {pattern!r} matches no module of this model, which has {_listed(names)}.")
    return chosen


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


# -- what is kept ------------------------------------------------------------------------------------------------------
def _without_containers(modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return ``modules`` with what a container holds in its place: a container has no forward to put a boundary on."""
    kept: list[torch.nn.Module] = []
    for module in modules:
        if isinstance(module, _CONTAINERS):
            kept += _without_containers(list(module.children()))
        else:
            kept.append(module)
    return kept


def _with_sharers(modules: list[torch.nn.Module], names: Names) -> list[torch.nn.Module]:
    """Return ``modules``, each once, and every module that holds a tensor which is in one of them."""
    kept = list(dict.fromkeys(modules))
    inside = {part for module in kept for part in module.modules()}
    holders = _holders_by_tensor(names)
    for module in kept:  # the list grows while it is read
        for part in module.modules():
            sharers = [holder for _, tensor in own_tensors(part) for holder in holders[id(tensor)]]
            for sharer in sharers:
                if sharer in inside:
                    continue
                say(f"keep_fp32: {names[sharer]!r} shares a tensor with {names[part]!r} and stays float32 with it.")
                kept.append(sharer)
                inside.update(sharer.modules())
    return kept


def _holders_by_tensor(names: Names) -> dict[int, list[torch.nn.Module]]:
    """The modules that hold each tensor, by its id."""
    holders: dict[int, list[torch.nn.Module]] = {}
    for module in names:
        for _, tensor in own_tensors(module):
            holders.setdefault(id(tensor), []).append(module)
    return holders


def _outermost(modules: list[torch.nn.Module]) -> list[torch.nn.Module]:
    inner = {part for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if module not in inner]


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


# -- names in messages -------------------------------------------------------------------------------------------------
def _hint(names: Names) -> str:
    return f"modules are named {_listed(names)}; patterns are shell patterns over these names or over class names."


def _listed(names: Names) -> str:
    """List names for a message; the empty name of a whole model is left out."""
    shown = sorted(name for name in names.values() if name)
    if not shown:
        return "no modules inside"
    listed = ", ".join(shown[:20])
    if len(shown) > 20:
        listed += f" and {len(shown) - 20} more"
    return listed
