"""Say of a lost step what is known where its cause was not found."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ampcompat.tools.core import LossScaler
from ampcompat.tools.explain.messages import Message
from ampcompat.tools.explain.replay import Finding

_NOT_RUN_AGAIN = (
    "No forward of an initialized model could be run again: compiled models, DataParallel replicas and models with"
    " SyncBatchNorm on several ranks cannot. Start the script once with TORCHDYNAMO_DISABLE=1 in its environment, or on"
    " one device (CUDA_VISIBLE_DEVICES=0), and the op is named."
)


def unknown_message(
    head: str,
    findings: Sequence[Finding],
    step: int,
    scaler: LossScaler,
    *,
    backward: bool = True,
    is_watched: bool = True,
) -> Message:
    """Say what the forwards that were run again have shown: none of them is known to be the cause.

    Args:
        head: What was lost.
        findings: Of the replays.
        step: The number of the step.
        scaler: The loss scaler.
        backward: Whether their backward passes were run again too.
        is_watched: Whether the code between the models and ``scale_loss`` is watched from now on.
    """
    if not findings:
        return Message("unknown", f"{head} {_NOT_RUN_AGAIN}", content={"step": step, "run_again": False})
    if any(finding.entered for finding in findings):
        known = "The gradient that came into the model was not finite already: the code after the model made it."
        if not scaler.dynamic and not scaler.is_one:
            known += f" The loss scale of {scaler.loss_scale():g} may be too high for it: a lower one shows."
    elif any(finding.has_moved for finding in findings):
        known = (
            "The models were run again and stayed finite, but their weights were written since: they may be the cause."
        )
    elif not backward:
        known = "The models that amp.initialize was given were run again and stayed finite."
    else:
        known = f"The models were run again and stayed finite, so the cause is not known: {_suspects(len(findings))}."
    watched = " The code after the models is watched from now on; the next time it is explained."
    text = f"{head} {known}{watched if is_watched else ''}"
    return Message("unknown", text, content={"step": step, "run_again": True})


def _suspects(forwards: int) -> str:
    """What was not run again, as in "it may be the code outside of them, or another rank"."""
    suspects = ["it may be the code outside of them"]
    if forwards > 1:
        suspects.append(f"the sum of the gradients of these {forwards} forwards")
    if has_other_ranks():
        suspects.append("another rank, whose gradients are added")
    return ", or ".join(suspects)


def has_other_ranks() -> bool:
    """Whether other processes add to the gradients."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
