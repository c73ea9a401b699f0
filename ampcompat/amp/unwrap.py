"""``unwrap``: the plain float32 module behind a model under amp."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import torch

from ampcompat import _torch
from ampcompat.amp import amp_model
from ampcompat.amp.cast_model import cast_weights


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """A plain copy of ``model``: its own class, float32 weights, nothing of amp left on it.

    For export (``torch.export``, ``torch.fx``, ``torch.jit``, ONNX), for saving a whole model that loads where
    ampcompat is not installed, and for evaluation in float32. ``model`` itself is not changed and goes on training.

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
    while True:
        inner = _torch.uncompiled(model)
        if _torch.parallel_wrapper(inner) and isinstance(inner.module, torch.nn.Module):
            inner = inner.module
        if inner is model:
            break
        model = inner
    plain = copy.deepcopy(model)
    cast_weights([plain], None, False, False, set(), ExitStack())
    for module in plain.modules():
        amp_model.detach(module)
    return plain
