"""From an op, or a tensor that came into a forward, that gave something not finite, to the fault."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ampcompat.tools.core import HALF_DTYPES
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.call import CAST_OPS
from ampcompat.tools.explain.event import ARGUMENT, GIVEN, Event
from ampcompat.tools.explain.fault import Fault
from ampcompat.tools.explain.hints import hints
from ampcompat.tools.explain.misuse import Misuse, spoiling_misuse
from ampcompat.tools.explain.places import Place
from ampcompat.tools.explain.setting import Setting
from ampcompat.tools.explain.too_large import CAST_FUNCTIONS, in_digits, wait_for
from ampcompat.tools.explain.undefined import is_singular, stable_form
from ampcompat.tools.frames import ScriptLine
from ampcompat.tools.tensors import LARGEST
from ampcompat.tools.words import counted

#: The key of gradients that are too large, of any optimizer.
GRADIENTS = "gradients"
#: Lines that are listed where the same happened.
SHOWN_LINES = 3
#: What a cast is called, as an op or as a function; "" where amp makes it.
_CASTS = ("", *CAST_FUNCTIONS, *CAST_OPS)


def op_fault(event: Event, setting: Setting) -> Fault:
    """Describe what was born not finite. Any rank tells it: no other knows its batch."""
    misuse = _misuse_behind(event, setting)
    if misuse is not None or not _may_be_of_size(event):  # a misuse makes weights grow itself
        setting = replace(setting, growth=None)
    growth = setting.growth
    cause, key = _cause_and_key(event, setting, misuse)
    passed = "backward" if event.backward else "forward"
    return Fault(
        what=_what(event),
        where=_where(event),
        cause=cause,
        key=key,
        number=event.value,
        line=event.place.line,
        details=[("pass", passed), *_details(event, setting.scale)],
        growth=growth,
        wait=wait_for(event, setting) if misuse is None and growth is None else "",
        hints=hints(event, setting) if misuse is None else [misuse.hint],
        facts={
            "op": event.op,
            "module": event.place.module,
            "pass": passed,
            "dtype": dtype_name(event.dtype),
            "not_finite": event.not_finite,
            "elements": event.elements,
        },
        all_ranks=True,
        is_too_large=growth is None and _is_too_large_unscaled(event, setting.scale),
    )


def _misuse_behind(event: Event, setting: Setting) -> Misuse | None:
    """The mistake of the script that has made weights grow, or spoiled them, if amp has warned of one."""
    is_of_weights = event.op == "parameter" or (setting.growth is not None and _may_be_of_size(event))
    return spoiling_misuse() if is_of_weights else None


def _may_be_of_size(event: Event) -> bool:
    """Whether weights that have grown may be why."""
    return event.op not in (*GIVEN, ARGUMENT) and bool(stable_form(event) or not is_singular(event))


def _cause_and_key(event: Event, setting: Setting, misuse: Misuse | None) -> tuple[str, str]:
    """The fault in a few words, and what it has in common with others that are the same."""
    if misuse is not None:
        return misuse.cause, misuse.cause
    if setting.growth is not None and not stable_form(event):
        return setting.growth.cause, setting.growth.key
    is_too_large = _is_too_large_unscaled(event, setting.scale)
    stays_at_scale = event.depends_on_scale and not setting.comes_down and setting.scale > 1
    if stays_at_scale and not is_too_large:
        scale = f"{in_digits(setting.scale)}{', its minimum' if setting.dynamic else ''}"
        return f"the loss scale of {scale}, which is too high for {cause_of(event)}", _key(event)
    return _grown(event, setting.scale) or cause_of(event), _key(event)


def _details(event: Event, scale: float) -> list[tuple[str, str]]:
    """Labels and texts of what else is told."""
    details = [("value" if event.is_nan else "largest", _largest(event))]
    if event.spread is not None and event.spread != event.place:
        details.append(("then", f"became {event.becomes} in {_spot(event.spread)}"))
    made = event.grown_at(scale)
    grown = _grown(event, scale)
    if grown and made is not None:
        details.append(("grown", f"to {made.largest / scale:.3g} without the loss scale, in {grown}"))
    if event.alike:
        details.append(("also", _alike(event)))
    return details


def _key(event: Event) -> str:
    if event.depends_on_scale:
        return GRADIENTS
    place = event.place
    if place.is_of_torch:
        place = place._replace(line=None)  # it is the line that has called the model
    elif place.line is not None:
        place = place._replace(module=None)  # each of the layers that share this line may have its turn
    return str((event.op, place, event.backward))


def _is_too_large_unscaled(event: Event, scale: float) -> bool:
    """Whether ``event`` is a gradient that float16 does not hold at any loss scale of 1 or more."""
    return event.depends_on_scale and event.is_too_large_without(scale)


def _grown(event: Event, scale: float) -> str:
    """Where a gradient that is cast to float16 became too large for it, as in "train.py:18 (the backward of log)"."""
    made = event.grown_at(scale)
    if made is None or event.op not in CAST_OPS or not _is_too_large_unscaled(event, scale):
        return ""
    is_known = made.is_gradient and made.place.function and made.place.line is not None
    return _at(made.place.line, f"the backward of {made.place.function}") if is_known else ""


def cause_of(event: Event) -> str:
    """Name the fault in a few words, as in "train.py:18 (conv2d in conv2)"."""
    if event.op in GIVEN:
        return f"{event.op} {event.place.module} of {event.place.model}, which was not finite"
    if event.op == ARGUMENT:
        what = event.description
    else:
        inside = f" in {event.place.module}" if event.place.module else ""
        what = f"{_name(event)}{inside}"
    return _at(event.place.line, what)


def _at(line: ScriptLine | None, what: str) -> str:
    return what if line is None else f"{line.file}:{line.number} ({what})"


def _name(event: Event) -> str:
    """As in "conv2d", "the backward of conv2d", "a gradient"."""
    function = event.place.function or event.op
    if function == "_to_copy" and not event.backward:
        return f"a cast to {dtype_name(event.dtype)}"
    if not event.backward:
        return function
    if function in _CASTS and event.place.module == "":
        return "a gradient that the code after the model made"
    return "a gradient" if function in _CASTS else f"the backward of {function}"


def _what(event: Event) -> str:
    count = f"{event.not_finite} of {event.elements} values{event.rows}"
    if event.op in GIVEN:
        is_half_input = event.op == "input" and event.dtype in HALF_DTYPES
        dtype = f", which is {dtype_name(event.dtype)}," if is_half_input else ""
        return f"{event.op} {event.place.module}{dtype} was not finite before the forward: {count}"
    if event.op == ARGUMENT:
        return f"{event.description} was not finite before: {count}"
    dtype = dtype_name(event.dtype)
    if event.op in CAST_OPS and event.out_of_range:
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


def _where(event: Event) -> str:
    place = event.place
    if event.op in GIVEN:
        return place.model
    if place.module is None:
        return "outside of any module"
    if not place.module:
        return f"{place.kind} itself"
    return f"{place.module} ({place.kind}), in {place.model}"


def _spot(place: Place) -> str:
    """As in "softmax() of attn"."""
    spot = " outside of any module" if place.module is None else f" of {place.module or place.kind}"
    op = f"{place.function}()" if place.function else "an op"
    return f"{op}{spot}"


def _alike(event: Event) -> str:
    """Where else the same happened, as in "2 times more in this line, and in train.py:31"."""
    here = sum(place.line == event.place.line for place in event.alike)
    lines = {place.line: "" for place in event.alike if place.line not in (None, event.place.line)}
    found = [f"{counted(here, 'time')} more in this line"] if here else []
    found += [f"in {line.file}:{line.number}" for line in lines if line is not None][:SHOWN_LINES]
    return f"the same {', and '.join(found)}" if found else "the same in other lines"


def _largest(event: Event) -> str:
    value = event.value
    if value is None:
        return "not known: the op does not compute in float32"
    if not math.isfinite(value):
        name = _name_of(value, event.holds_mask)
        is_given = event.op in (*GIVEN, ARGUMENT)
        return name if is_given else f"{name}, in float32 too with these inputs"
    if event.dtype == torch.float16 and value <= LARGEST:
        return f"{value:.6g} in float32: something on the way left the range of float16"
    if event.dtype == torch.float16:
        return f"{value:.6g} (float16 ends at {LARGEST:g})"
    return f"{value:.6g} ({dtype_name(event.dtype)} ends at {torch.finfo(event.dtype).max:.3g})"


def _name_of(magnitude: float, is_negative: bool) -> str:
    """What torch prints for a number that is not finite."""
    if math.isnan(magnitude):
        return "NaN"
    return "-inf" if is_negative else "inf"
