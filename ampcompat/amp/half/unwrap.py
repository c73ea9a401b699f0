"""``amp.unwrap``: a plain float32 copy of a model under amp."""

from __future__ import annotations

import copy

import torch

from ampcompat import _torch
from ampcompat.amp.half.casting import cast_weights
from ampcompat.amp.half.model_class import set_policy


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return a plain copy of ``model``: its own class, float32 weights, nothing of amp left on it.

    For export (``torch.export``, ``torch.fx``, ``torch.jit``, ONNX), for saving a whole model that loads where
    ampcompat is not installed, and for evaluation in float32. ``model`` itself is not changed; you can continue to
    train it. apex had no such call.

    Args:
        model: A model given to ``amp.initialize``, or any module around or inside one. DDP, DataParallel and
            ``torch.compile`` around it are taken off.

    Returns:
        A deep copy whose half weights are float32 again: the masters' values where there are masters (bitwise what
        ``model.state_dict()`` says), the widened half ones at O3. Casts that O1 has put in force for code outside
        models apply to it as to any code: run it under ``amp.disable_casts()`` for pure float32.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"amp.unwrap got {type(model).__name__} - it takes a model - pass the module.")
    model = _torch.uncompiled(model)
    while _torch.parallel_wrapper(model):
        model = _torch.uncompiled(model.get_submodule("module"))
    policies = [module.__dict__.get("_amp_policy") for module in model.modules()]
    with torch.inference_mode(False):
        plain = copy.deepcopy(model, {id(policy): policy for policy in policies})  # which print no note then
        modules = list(plain.modules())
        cast_weights(modules, None)
    for module in modules:
        set_policy(module, None)
    return plain
