"""Optimizers that a call of ``initialize`` was not given, though they train a model that it was given.

An earlier call had put them under amp. They must go on training that model, whatever became of its weights.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from ampcompat._log import warn_once
from ampcompat.amp import optimizer
from ampcompat.amp.accumulation import leaves
from ampcompat.amp.optimizer_state import match_state
from ampcompat.amp.properties import HALF_DTYPES


def trainers_of(models: list[torch.nn.Module], optimizers: list[Any]) -> list[tuple[Any, bool]]:
    """Optimizers under amp, beside ``optimizers``, that train some of ``models``; whether they train nothing else."""
    weights = {id(p) for model in models for p in model.parameters()}
    found = []
    for one in optimizer.known_optimizers():
        if "_amp_stash" in vars(one) and not any(one is other for other in optimizers):
            held = {id(p) for p in leaves(one, one._amp_stash)}
            if held & weights:
                found.append((one, held <= weights))
    return found


def follow(models: list[torch.nn.Module], optimizers: list[Any], masters: bool, undo: ExitStack) -> None:
    """``models`` were cast: have the optimizers that were left out hold weights that go with them.

    Args:
        models: The models.
        optimizers: What the call was given.
        masters: Half weights of the models are to have masters.
        undo: Takes the undo of every change.
    """
    for one, _ in trainers_of(models, optimizers):
        if masters and any(p.dtype in HALF_DTYPES for group in one.param_groups for p in group["params"]):
            warn_once(
                "optimizer without masters",
                f"{type(one).__name__} of an earlier amp.initialize trains a model that was now given alone, at a level"
                " with master weights - it goes on stepping the half weights, where small updates vanish - pass the"
                " optimizer too.",
                stacklevel=5,
            )
        undo.callback(one._amp_stash.forget_parts)
        undo.callback(optimizer.put_back, optimizer.remember(one))
        one._amp_stash.forget_parts()
        one._amp_stash.parts(one)
        match_state(one)
