"""The message of a fault: what happened, where, how large, and what to do."""

from __future__ import annotations

import math
from dataclasses import asdict

import torch

from ampcompat.tools.core import LossScaler, latest_call
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.growth import Grown
from ampcompat.tools.explain.hints import Setting, hints
from ampcompat.tools.explain.messages import Message, hint_lines
from ampcompat.tools.explain.probe import ARGUMENT, GIVEN, Event
from ampcompat.tools.explain.replay import Finding
from ampcompat.tools.tensors import LARGEST

_NOT_RUN_AGAIN = (
    "No forward of an initialized model could be run again: compiled models, DataParallel replicas and models with"
    " SyncBatchNorm on several ranks cannot. Start the script once with TORCHDYNAMO_DISABLE=1 in its environment, or on"
    " one device (CUDA_VISIBLE_DEVICES=0), and the op is named."
)


def fault_message(
    finding: Finding, scaler: LossScaler, what: str, step: int, made: bool, growth: Grown | None = None
) -> Message:
    """Describe what was born not finite. Any rank writes it: no other knows its batch.

    Args:
        finding: Of a replay, with an event, or of a probe in the run.
        scaler: The loss scaler of the backward pass.
        what: What was lost, as in "A step was skipped".
        step: The number of the step that the fault belongs to.
        made: Whether steps were made before, all of which left finite weights.
        growth: The weight that the last steps made many times larger, if any.
    """
    event = finding.event
    if event is None:
        return outside_message(what, [finding], step)
    line = event.place.line
    if line is None and event.op not in GIVEN:
        line = finding.called_at  # the model is made of torch's modules alone
    direction = "backward" if event.backward else "forward"
    advice = hints(event, _setting(scaler, made, growth))
    lines = [("what", _what(event)), ("where", _where(event, finding))]
    if line is not None:
        lines.append(("line", str(line)))
    lines += [("pass", direction), ("largest", _largest(event))]
    if event.spread is not None and event.spread != event.place:
        place = event.spread
        spot = " outside of any module" if place.module is None else f" of {place.module or place.kind}"
        lines.append(("then", f"became NaN in {place.function or 'an op'}{spot}"))
    if growth is not None:
        lines.append(("growth", growth.text))
    lines += hint_lines(advice)
    if finding.caveat:
        lines.append(("note", finding.caveat))
    content = {
        "step": step,
        "op": event.op,
        "function": event.place.function,
        "model": finding.model,
        "module": event.place.module,
        "type": event.place.kind,
        "file": None if line is None else line.file,
        "line": None if line is None else line.number,
        "source": None if line is None else line.source,
        "pass": direction,
        "dtype": dtype_name(event.dtype),
        "largest": event.value,
        "growth": None if growth is None else asdict(growth),
        "hints": advice,
        "note": finding.caveat,
    }
    head = f"{what or 'The loss or a gradient is not finite'}."
    return Message("fault", head, lines, content, all_ranks=True)


def outside_message(what: str, findings: list[Finding], step: int) -> Message:
    """No model did it: the code between model and ``scale_loss``, which cannot be run again."""
    if not findings:
        return Message("outside", f"{what}. {_NOT_RUN_AGAIN}", content={"step": step, "run_again": False})
    if any(finding.entered for finding in findings):
        cause = "The gradient that came into the model was not finite already: the loss function made it."
    else:
        cause = "Run again, the models stayed finite, forward and backward: the code outside of them did it"
        if len(findings) > 1:
            cause += f", or the sum of the gradients of these {len(findings)} forwards overflowed"
        cause += ", or another rank, whose gradients are added." if _has_other_ranks() else "."
    head = f"{what}. {cause} That code is watched from now on; the next time it is explained."
    return Message("outside", head, content={"step": step, "run_again": True})


def _has_other_ranks() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _setting(scaler: LossScaler, made: bool, growth: Grown | None) -> Setting:
    latest = latest_call()
    level = "" if latest is None else latest.opt_level
    half = "" if latest is None or latest.half_dtype is None else dtype_name(latest.half_dtype)
    scale = float(scaler.loss_scale())
    return Setting(level, half, 2 * scale if scaler.dynamic else scale, scaler.dynamic, made, growth)


def _what(event: Event) -> str:
    if event.op in GIVEN:
        return f"{event.op} {event.place.module or ''} was not finite before the forward"
    if event.op == ARGUMENT:
        return f"{event.given} was not finite before"
    dtype = dtype_name(event.dtype)
    is_cast = event.op in ("_to_copy", "copy_") and event.out_of_range
    made = _cast(event) if is_cast else _op(event)
    if event.out_of_range:
        return f"{made} left the range of {dtype}"
    return f"{made} gave a result that is not finite, in {dtype}"


def _op(event: Event) -> str:
    """The function that the script called, and the op where that has another name."""
    function = event.place.function
    return f"{function} (aten::{event.op})" if function not in ("", event.op) else f"aten::{event.op}"


def _cast(event: Event) -> str:
    """As in "the cast to float16 in linear of what relu made"."""
    text = f"the cast to {dtype_name(event.dtype)}"
    if event.place.function not in ("", "to", event.op):
        text += f" in {event.place.function}"
    source = next((made for made in event.made if made.largest > LARGEST), None)
    return text if source is None else f"{text} of what {source.place.function or source.op} made"


def _where(event: Event, finding: Finding) -> str:
    place = event.place
    if event.op in GIVEN:
        return finding.model
    if place.module is None:
        return f"outside of any module{f' (after {finding.model})' if finding.model else ''}"
    inside = f"{place.module} ({place.kind})" if place.module else f"{place.kind} itself"
    return f"{inside}, in {finding.model}" if place.module and finding.model else inside


def _largest(event: Event) -> str:
    if math.isnan(event.value):
        return "NaN, in float32 as well"
    if math.isinf(event.value):
        return "inf" if event.dtype == torch.float16 and event.op in GIVEN else "inf, in float32 as well"
    if event.dtype == torch.float16:
        return f"{event.value:.6g} (float16 ends at {LARGEST:g})"
    return f"{event.value:.6g} ({dtype_name(event.dtype)} ends at {torch.finfo(event.dtype).max:.3g})"
