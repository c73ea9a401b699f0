"""The message of a fault: what happened, where, how large, and what to do."""

from __future__ import annotations

import math
from dataclasses import asdict

import torch

from ampcompat.tools.core import LEVELS, LossScaler, latest_call
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.growth import Grown
from ampcompat.tools.explain.hints import Setting, hints
from ampcompat.tools.explain.messages import Message, hint_lines
from ampcompat.tools.explain.probe import ARGUMENT, GIVEN, Event
from ampcompat.tools.explain.replay import Finding
from ampcompat.tools.frames import ScriptLine
from ampcompat.tools.tensors import LARGEST

#: Functions that only change the dtype.
_CASTS = ("", "to", "float", "half", "bfloat16", "type", "_to_copy", "copy_")
_NOT_RUN_AGAIN = (
    "No forward of an initialized model could be run again: compiled models, DataParallel replicas and models with"
    " SyncBatchNorm on several ranks cannot. Start the script once with TORCHDYNAMO_DISABLE=1 in its environment, or on"
    " one device (CUDA_VISIBLE_DEVICES=0), and the op is named."
)


def fault_message(
    finding: Finding, event: Event, scaler: LossScaler, head: str, step: int, made: bool, growth: Grown | None = None
) -> Message:
    """Describe what was born not finite. Any rank writes it: no other knows its batch.

    Args:
        finding: Of a replay, or of a probe in the run.
        event: Its event.
        scaler: The loss scaler of the backward pass.
        head: What was lost, as in "Step 3 was skipped: the loss is nan.".
        step: The number of the step that the fault belongs to.
        made: Whether steps were made before, all of which left finite weights.
        growth: The weight that the last steps made many times larger, if any.
    """
    line = _line(event, finding)
    direction = "backward" if event.backward else "forward"
    advice = hints(event, _setting(scaler, made, growth))
    lines = [("what", _what(event)), ("where", _where(event, finding))]
    if line is not None:
        lines.append(("line", str(line)))
    lines += [("pass", direction), ("largest", _largest(event))]
    if event.spread is not None and event.spread != event.place:
        place = event.spread
        spot = " outside of any module" if place.module is None else f" of {place.module or place.kind}"
        op = f"{place.function}()" if place.function else "an op"
        lines.append(("then", f"became NaN in {op}{spot}"))
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
        "not_finite": event.not_finite,
        "elements": event.elements,
        "growth": None if growth is None else asdict(growth),
        "hints": advice,
        "note": finding.caveat,
    }
    return Message("fault", head, lines, content, all_ranks=True)


def place_of(finding: Finding, event: Event) -> str:
    """Name the fault in a few words, as in "train.py:18 (conv2d in conv2)"."""
    if event.op in GIVEN:
        return f"{event.op} {event.place.module} of {finding.model}, which was not finite"
    if event.op == ARGUMENT:
        what = event.given
    else:
        inside = f" in {event.place.module}" if event.place.module else ""
        what = f"{_name(event)}{inside}"
    line = _line(event, finding)
    return what if line is None else f"{line.file}:{line.number} ({what})"


def is_too_large_unscaled(event: Event, scaler: LossScaler) -> bool:
    """Whether ``event`` is a gradient that float16 does not hold at any loss scale of 1 or more."""
    if not event.backward or not event.out_of_range or event.value is None:
        return False
    return event.value / _scale_of_backward(scaler) > LARGEST


def _name(event: Event) -> str:
    """As in "conv2d", "the backward of conv2d", "a gradient"."""
    function = event.place.function or event.op
    if not event.backward:
        return function
    return "a gradient" if function in _CASTS else f"the backward of {function}"


def _line(event: Event, finding: Finding) -> ScriptLine | None:
    """The script's line; where the model is made of torch's modules alone, the one that called the model."""
    if event.place.line is not None or event.op in GIVEN:
        return event.place.line
    return finding.called_at


def outside_message(head: str, findings: list[Finding], step: int, is_watched: bool = True) -> Message:
    """No model did it: the code between model and ``scale_loss``, which cannot be run again.

    Args:
        head: What was lost.
        findings: Of the replays.
        step: The number of the step.
        is_watched: Whether to say that the code is watched from now on.
    """
    if not findings:
        return Message("outside", f"{head} {_NOT_RUN_AGAIN}", content={"step": step, "run_again": False})
    if any(finding.entered for finding in findings):
        cause = "The gradient that came into the model was not finite already: the loss function made it."
    else:
        cause = "Run again, the models stayed finite, forward and backward: the code outside of them did it"
        if len(findings) > 1:
            cause += f", or the sum of the gradients of these {len(findings)} forwards overflowed"
        cause += ", or another rank, whose gradients are added." if _has_other_ranks() else "."
    watched = " That code is watched from now on; the next time it is explained." if is_watched else ""
    return Message("outside", f"{head} {cause}{watched}", content={"step": step, "run_again": True})


def _has_other_ranks() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _setting(scaler: LossScaler, made: bool, growth: Grown | None) -> Setting:
    latest = latest_call()
    half_dtype = None if latest is None else latest.half_dtype
    level = None if latest is None or half_dtype is None else LEVELS.get(latest.opt_level)
    return Setting(
        half="" if half_dtype is None else dtype_name(half_dtype),
        casts_functions=level is not None and level.patch_torch_functions,
        casts_weights=level is not None and not level.patch_torch_functions,
        scale=_scale_of_backward(scaler),
        dynamic=scaler.dynamic,
        made=made,
        growth=growth,
    )


def _scale_of_backward(scaler: LossScaler) -> float:
    """The loss scale before the overflow, which has halved a dynamic one."""
    scale = float(scaler.loss_scale())
    return 2 * scale if scaler.dynamic else scale


def _what(event: Event) -> str:
    count = f"{event.not_finite} of {event.elements} values"
    if event.op in GIVEN:
        return f"{event.op} {event.place.module or ''} was not finite before the forward: {count}"
    if event.op == ARGUMENT:
        return f"{event.given} was not finite before: {count}"
    dtype = dtype_name(event.dtype)
    if event.op in ("_to_copy", "copy_") and event.out_of_range:
        return f"{_cast(event)}: {count}"
    if event.out_of_range:
        return f"{_op(event)} left the range of {dtype}: {count}"
    return f"{_op(event)} gave a result that is not finite, in {dtype}: {count}"


def _op(event: Event) -> str:
    """The function that the script called, and the op where that has another name."""
    function = event.place.function
    return f"{function} (aten::{event.op})" if function not in ("", event.op) else f"aten::{event.op}"


def _cast(event: Event) -> str:
    """As in "what relu returned is too large for float16, to which linear casts it"."""
    source = next((made for made in event.made if made.largest > LARGEST), None)
    maker = "" if source is None else source.place.function or source.op
    if event.backward:
        what = "a gradient"
    else:
        what = f"what {maker} returned" if maker else "a value"
    text = f"{what} is too large for {dtype_name(event.dtype)}"
    function = event.place.function
    if event.backward or function in (*_CASTS, maker):
        return text
    return f"{text}, to which {function} casts it"


def _where(event: Event, finding: Finding) -> str:
    place = event.place
    if event.op in GIVEN:
        return finding.model
    if place.module is None:
        return f"outside of any module{f' (after {finding.model})' if finding.model else ''}"
    inside = f"{place.module} ({place.kind})" if place.module else f"{place.kind} itself"
    return f"{inside}, in {finding.model}" if place.module and finding.model else inside


def _largest(event: Event) -> str:
    value = event.value
    if value is None:
        return "not known: the op does not compute in float32"
    if not math.isfinite(value):
        is_given = event.op in (*GIVEN, ARGUMENT)
        name = "NaN" if math.isnan(value) else "inf"
        return name if is_given else f"{name}, in float32 too with these inputs"
    if event.dtype == torch.float16 and value <= LARGEST:
        return f"{value:.6g} in float32: something on the way left the range of float16"
    if event.dtype == torch.float16:
        return f"{value:.6g} (float16 ends at {LARGEST:g})"
    return f"{value:.6g} ({dtype_name(event.dtype)} ends at {torch.finfo(event.dtype).max:.3g})"
