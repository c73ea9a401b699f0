"""``initialize(enabled=False)`` on objects that an earlier call had put under amp: the later call wins.

They become what they would be had amp never been there: the user's class, float32 weights with the masters' values, an
optimizer that holds the model's own parameters and steps them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from ampcompat import _torch
from ampcompat.amp import amp_model, keep_fp32, optimizer, session
from ampcompat.amp.cast_model import cast_weights
from ampcompat.amp.policy import ModelPolicy, live_models


class Taken(NamedTuple):
    """What was taken out of amp: anything at all, and the policies that the models had."""

    anything: bool
    policies: list[ModelPolicy]


def modules_in(models: Any) -> list[torch.nn.Module]:
    """The modules in what ``initialize`` was given as models, which may be no models at all."""
    given = models if isinstance(models, (list, tuple)) else [models]
    return [_torch.uncompiled(model) for model in given if isinstance(model, torch.nn.Module)]


def take_out(roots: list[torch.nn.Module], optimizers: list[Any], undo: ExitStack) -> Taken:
    """Take models, and models within them, and optimizers out of amp; what is not under amp is left alone.

    Args:
        roots: The models.
        optimizers: Optimizers.
        undo: Takes the undo of every change.

    Returns:
        For :func:`release`, which is to follow.
    """
    under = list({id(m): m for root in roots for m in root.modules() if m in live_models()}.values())
    policies = {id(m.__dict__["_amp_policy"]): m.__dict__["_amp_policy"] for m in under}
    with_stash = [one for one in optimizers if "_amp_stash" in vars(one)]
    if under:
        keep_fp32.build_borders(under, [], session.DISABLED.policy, undo)
        cast_weights(under, None, False, False, set(), undo)
    for model in under:
        undo.callback(amp_model.put_back, amp_model.remember(model))
        amp_model.detach(model)
    for one in with_stash:
        undo.callback(optimizer.put_back, optimizer.remember(one))
        optimizer.detach(one)
    return Taken(bool(under or with_stash), list(policies.values()))


def release(taken: Taken) -> None:
    """End the casts that nothing needs any more. Idempotent; not undone."""
    for policy in taken.policies:
        if not any(model.__dict__.get("_amp_policy") is policy for model in live_models()):
            session.casting_policies().discard(policy)
    if taken.policies:
        session.release_casts()  # ambient casts stay while other models need them for their losses
