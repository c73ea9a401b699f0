"""Modules that stay float32 inside a model that runs in half: ``initialize(keep_fp32=...)``.

A kept module gets a border: its forward has float32 inputs and runs with casts off; where the model's weights are half,
its outputs go back to half. The border is a policy of the dynamic subclass that makes a model run under amp, so that
deepcopy, pickle, DataParallel, a direct ``module.forward(x)`` and ``torch.compile`` go through it too.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from ampcompat._log import say
from ampcompat._state import state
from ampcompat.amp import amp_model
from ampcompat.amp.amp_model import Args, Forward, Kwargs, ModelPolicy
from ampcompat.amp.masters import own_tensors
from ampcompat.amp.properties import HALF_DTYPES
from ampcompat.amp.trees import cast_tree, tensors_in

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)
Names = dict[torch.nn.Module, str]


class BorderPolicy(ModelPolicy):
    """How a kept module runs; ``output_dtype`` is the half dtype around it, if any."""

    def run(self, model: torch.nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Run ``forward`` on float32 inputs, casts off."""
        tensors = tensors_in((args, kwargs))
        given = [t.dtype for t in tensors if t.is_floating_point()]
        args, kwargs = cast_tree(args, torch.float32), cast_tree(kwargs, torch.float32)
        tensors = tensors or list(model.parameters())
        device_type = tensors[0].device.type if tensors else "cpu"
        casting = torch.is_autocast_enabled(device_type)
        with torch.autocast(device_type, enabled=False) if casting else nullcontext():
            output = forward(*args, **kwargs)
        # Integer inputs (an embedding's) come from a half model as well; float32 ones from float32 code.
        if self.output_dtype is None or (given and not any(dtype in HALF_DTYPES for dtype in given)):
            return output
        return cast_tree(output, self.output_dtype)


def select(models: list[torch.nn.Module], keep_fp32: Any) -> list[torch.nn.Module]:
    """List the modules that ``keep_fp32`` and ``AMPCOMPAT_KEEP_FP32`` name, the outermost ones only.

    Modules that share a tensor with a kept one are kept as well, with a message: a tied weight has one dtype. Raises a
    TypeError for what is no module, type or pattern, and a ValueError where nothing matches or a module cannot be kept;
    for a pattern of the environment the first ``scale_loss`` does: a script may initialize its models one by one.
    """
    several = isinstance(keep_fp32, (list, tuple, set, frozenset))
    wanted = [] if keep_fp32 is None else list(keep_fp32) if several else [keep_fp32]
    patterns = [p.strip() for p in os.environ.get("AMPCOMPAT_KEEP_FP32", "").split(",") if p.strip()]
    names = {module: name for model in reversed(models) for name, module in model.named_modules()}
    found: list[torch.nn.Module] = []
    for one in wanted:
        found += (matches := _matches(one, names))
        if not matches:
            shown = type(one).__name__ if isinstance(one, torch.nn.Module) else repr(one)
            raise ValueError(f"keep_fp32={shown} - it matches no module of the model - {_hint(names)}")
    for pattern in patterns:
        found += (matches := _matches(pattern, names))
        missed = f"matches no module of this model, which has {_list(names)}"
        say(f"AMPCOMPAT_KEEP_FP32: {pattern!r} {f'keeps {_list(matches)} in float32' if matches else missed}.")
        if not matches and not any(isinstance(one, Unmatched) for one in state.observers):
            state.observers.append(Unmatched(patterns))
    holders: dict[int, list[torch.nn.Module]] = {}
    for module in names:
        for _, tensor in own_tensors(module):
            holders.setdefault(id(tensor), []).append(module)
    covered = {module for one in found for module in one.modules()}
    for one in found:  # grows meanwhile
        if isinstance(one, _CONTAINERS):  # without a forward: what it contains is kept
            found += one.children()
            continue
        name = names[one]
        if not set(one.modules()).isdisjoint(models):
            raise ValueError(
                f"keep_fp32 keeps a whole model ({type(one).__name__}) - it keeps modules inside of one - initialize"
                " this model with opt_level='O0', or name modules in it."
            )
        if isinstance(one, torch.jit.ScriptModule):
            raise ValueError(f"keep_fp32 keeps {name!r}, a ScriptModule - it runs as scripted - script it later.")
        for parent in names:
            if isinstance(parent, torch.nn.MultiheadAttention) and one in {*parent.children()}:
                raise ValueError(
                    f"keep_fp32 keeps {name!r} inside of a MultiheadAttention - that uses its parts' weights without"
                    f" calling them - keep the whole of {names[parent]!r}."
                )
        for part in one.modules():
            for module in (m for _, tensor in own_tensors(part) for m in holders[id(tensor)] if m not in covered):
                say(f"keep_fp32: {names[module]!r} shares a tensor with {names[part]!r} and stays float32 with it.")
                found.append(module)
                covered.update(module.modules())
    kept = dict.fromkeys(one for one in found if not isinstance(one, _CONTAINERS))
    inner = {child for module in kept for child in list(module.modules())[1:]}
    return [module for module in kept if module not in inner]


@dataclass(eq=False)
class Unmatched:
    """Refuses to train while a pattern of the environment matches no module of any model under amp."""

    patterns: list[str]

    def on_scale_loss(self, *_: object) -> None:
        """Look at all models, once."""
        names = {module: name for model in state.models.live for name, module in model.named_modules()}
        missed = next((pattern for pattern in self.patterns if not _matches(pattern, names)), None)
        if missed is not None:
            raise ValueError(
                f"AMPCOMPAT_KEEP_FP32 (--keep-fp32): {missed!r} - it matches no module of any model - {_hint(names)}"
            )
        state.observers[:] = [one for one in state.observers if one is not self]


def _matches(one: object, names: Names) -> Names:
    if isinstance(one, torch.nn.Module):
        return {one: names[one]} if one in names else {}
    if isinstance(one, type) and issubclass(one, torch.nn.Module):
        return {module: name for module, name in names.items() if isinstance(module, one)}
    if isinstance(one, str):
        return {m: n for m, n in names.items() if n and (fnmatchcase(n, one) or fnmatchcase(type(m).__name__, one))}
    raise TypeError(
        f"keep_fp32 got {one!r} - it takes modules, module types and name patterns, or a list of these - pass"
        " keep_fp32=['encoder.*.wo'] for instance."
    )


def set_border(module: torch.nn.Module, policy: ModelPolicy | None) -> None:
    """Put the border ``policy`` around ``module``, or what was there before."""
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _pass]:
        del hooks[key]
    amp_model.set_policy(module, policy)
    if isinstance(policy, BorderPolicy):
        state.models.live.discard(module)
        # torch's fused encoder layer reads its parts' weights past their forward, but not where a part has hooks.
        module.register_forward_pre_hook(_pass)


def _pass(module: torch.nn.Module, args: object) -> None:
    """Disable torch's fused encoder path, by being a hook."""


def _hint(names: Names) -> str:
    return f"modules are named {_list(names)}; patterns are shell patterns over these names or over class names."


def _list(names: Names) -> str:
    shown = sorted(name for name in names.values() if name)
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "")
