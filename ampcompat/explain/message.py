"""The one message of an autopsy."""

from __future__ import annotations

import math
from typing import Any

import torch

from ampcompat._state import state
from ampcompat.explain.cure import Setting, cures
from ampcompat.explain.probe import Event
from ampcompat.explain.replay import Finding
from ampcompat.explain.tensors import LARGEST

_NOT_RUN_AGAIN = (
    "No forward of an initialized model could be run again: compiled models, DataParallel replicas and models with"
    " SyncBatchNorm on several ranks cannot. Start the script once with TORCHDYNAMO_DISABLE=1 in its environment, or on"
    " one device (CUDA_VISIBLE_DEVICES=0), and the autopsy names the op."
)


def explain(finding: Finding, scaler: Any, what: str) -> str:
    """What happened, where, how large, and what to do."""
    event = finding.event
    if event is None:
        return elsewhere(what, [finding])
    setting = _setting(scaler)
    lines = [f"ampcompat explain: {what or 'The loss or a gradient is not finite'}."]
    lines.append(f"  {'what':9} {_what(event)}")
    lines.append(f"  {'where':9} {_where(event, finding)}")
    if event.place.line:
        lines.append(f"  {'line':9} {event.place.line}")
    lines.append(f"  {'pass':9} {'backward' if event.backward else 'forward'}")
    lines.append(f"  {'largest':9} {_largest(event)}")
    if event.spread is not None and event.spread != event.place:
        place = event.spread
        lines.append(
            f"  {'then':9} became NaN in {place.function or 'an op'} of {place.module or place.kind or 'the model'}"
        )
    label = "cure"
    for cure in cures(event, setting):
        lines.append(f"  {label:9} {cure}")
        label = "or"
    if finding.caveat:
        lines.append(f"  {'note':9} {finding.caveat}")
    return "\n".join(lines)


def elsewhere(what: str, findings: list[Finding]) -> str:
    """No model did it: the code between model and ``scale_loss``, which cannot be run again."""
    head = f"ampcompat explain: {what}."
    if any(finding.entered for finding in findings):
        cause = "The gradient that came into the model was not finite already: the loss function made it."
    elif findings:
        cause = "Run again, the models stayed finite, forward and backward: the code outside of them did it."
    else:
        return f"{head} {_NOT_RUN_AGAIN}"
    return f"{head} {cause} That code is watched from now on; the next time it is explained."


def _setting(scaler: Any) -> Setting:
    latest = state.session
    level = "" if latest is None else latest.policy.opt_level
    half = ""
    if latest is not None and (latest.policy.half is not None or latest.policy.casts.enabled):
        half = str(latest.half).removeprefix("torch.")
    scale = float(scaler.loss_scale())
    return Setting(level, half, 2 * scale if scaler.dynamic else scale)


def _what(event: Event) -> str:
    if event.op in ("input", "parameter"):
        return f"{event.op} {event.place.module or ''} was not finite before the forward"
    name = event.place.function
    shown = name if name and name != event.op else ""
    made = f"{shown} (aten::{event.op})" if shown else f"aten::{event.op}"
    if event.op in ("_to_copy", "copy_") and event.out_of_range:
        made = f"the cast to {_dtype(event.dtype)}" + (f" in {shown}" if shown and shown != "to" else "")
        source = next((m for m in event.made if m.largest > LARGEST), None)
        if source is not None:
            made += f" of what {source.place.function or source.op} made"
    result = f"{made} left the range of {_dtype(event.dtype)}"
    return result if event.out_of_range else f"{made} gave a result that is not finite, in {_dtype(event.dtype)}"


def _where(event: Event, finding: Finding) -> str:
    place = event.place
    if event.op in ("input", "parameter"):
        return finding.model
    if place.module is None:
        return f"outside of any module{f' (after {finding.model})' if finding.model else ''}"
    inside = f"{place.module} ({place.kind})" if place.module else f"{place.kind} itself"
    return f"{inside}, in {finding.model}" if place.module and finding.model else inside


def _largest(event: Event) -> str:
    if math.isnan(event.value):
        return "NaN, in float32 as well"
    if math.isinf(event.value):
        return (
            "inf" if event.dtype == torch.float16 and event.op in ("input", "parameter") else "inf, in float32 as well"
        )
    if event.dtype == torch.float16:
        return f"{event.value:.6g} (float16 ends at {LARGEST:g})"
    return f"{event.value:.6g} ({_dtype(event.dtype)} ends at {torch.finfo(event.dtype).max:.3g})"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
