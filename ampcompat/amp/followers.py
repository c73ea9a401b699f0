"""Optimizers that go where their model goes, though a call of ``initialize`` names the model alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ampcompat.amp.optimizer_state import optimizers_under_amp
from ampcompat.amp.policy import ModelPolicy, live_models
from ampcompat.amp.properties import HALF_DTYPES


def followers(models: Iterable[torch.nn.Module], given: list[Any], policy: ModelPolicy) -> list[Any]:
    """Optimizers under amp that hold tensors of ``models`` and would not fit them under ``policy``.

    Left behind, they would step half weights without masters, masters of float32 weights, or by gradients of an
    unscaled loss. Those of calls with the same policy stay where they are, and keep their loss scale; so do those
    that another model needs, where the weights were float32 and stay so.

    Args:
        models: What ``initialize`` was given.
        given: The optimizers that it was given.
        policy: How the models will run.

    Raises:
        RuntimeError: An optimizer also holds half weights of another model, which need the masters that it has.
    """
    under_amp, found = optimizers_under_amp(), []
    going = _tensors(models) if under_amp else {}
    for one in under_amp:
        stash = one._amp_stash
        if any(one is other for other in given) or _alike(stash.session.policy, policy):
            continue
        masters, direct = stash.parts(one)
        held = {id(tensor) for tensor in (*(master.half for master in masters), *direct)}
        if held.isdisjoint(going):
            continue
        staying = held & (_tensors(live_models()).keys() - going.keys())
        if staying and policy.half is None and not any(going[key].dtype in HALF_DTYPES for key in held & going.keys()):
            continue  # float32 before and after: unscaling is all that it takes, and the other model needs it
        if not policy.master_weights and any(id(master.half) in staying for master in masters):
            raise RuntimeError(
                f"amp.initialize got a model without its {type(one).__name__}, which has masters of another model's"
                " half weights as well - an optimizer goes where its models go, all of them - pass them together, with"
                " the optimizer."
            )
        found.append(one)
    return found


def _tensors(models: Iterable[torch.nn.Module]) -> dict[int, torch.Tensor]:
    """The parameters of ``models`` by id."""
    return {id(param): param for model in models for param in model.parameters()}


def _alike(one: ModelPolicy, other: ModelPolicy) -> bool:
    return (one.opt_level, one.casts, one.half, one.master_weights) == (
        other.opt_level,
        other.casts,
        other.half,
        other.master_weights,
    )
