"""What to do about a result that is too large for half, and that float32 holds, the surest cure first."""

from __future__ import annotations

import math

import torch

from ampcompat.tools.explain.call import CAST_OPS
from ampcompat.tools.explain.event import Beyond, Event
from ampcompat.tools.explain.in_float32 import (
    bfloat16,
    forward_in_float32,
    keep_fp32,
    lines_in_float32,
)
from ampcompat.tools.explain.made import WRITTEN
from ampcompat.tools.explain.setting import Setting
from ampcompat.tools.explain.undefined import LOGARITHMS, MOST_EXPONENT, OF_THEIR_SUM, stable_form
from ampcompat.tools.tensors import LARGEST

_MULTIPLICATIONS = ("mul", "mul_", "div", "div_", "add", "add_", "addmm", "baddbmm")
#: Functions that only change the dtype.
CAST_FUNCTIONS = ("to", "float", "half", "bfloat16", "type")
#: An exponential, or a number, that multiplies a gradient by more is what makes it large.
_LARGE_FACTOR = 1e3
_ROOT_OF_FLOAT32 = math.sqrt(torch.finfo(torch.float32).max)
#: How much less than the largest float16 a gradient is to be: there is a loss scale in it.
_SPARE = 16
#: A line that runs so often, each time with a result that is larger by so much, is a loop that grows.
_TURNS, _GROWTH = 3, 1.2
SMALLER_INPUTS = "smaller inputs: normalize what goes into the model"
_SMALLER_LOSS = "a smaller loss (a mean in place of a sum, a smaller factor on it)"


def in_forward(event: Event, setting: Setting) -> list[str]:
    """For a result of the forward, the loss included."""
    written = [number for made in event.made if made.op == WRITTEN for number in made.scalars]
    for number in written:
        if abs(number) > LARGEST:
            return [f"a smaller number than {number:g}: float16 ends at {LARGEST:g}", *bfloat16(setting)]
    function = event.place.function
    is_cast = function in CAST_FUNCTIONS and event.place.line is not None and not event.place.is_of_torch
    if is_cast and setting.casts_functions:
        return [do_not_cast(event.dtype, setting), *bfloat16(setting)]
    if is_cast:
        reaches = "" if event.value is None else f"; here it reaches {event.value:.3g}"
        early = f"cast it where it is small again: {function}() after what makes it smaller{reaches}"
        return [early, *bfloat16(setting)]
    if event.op == "_to_copy" and not event.made:
        return [_smaller(event), *forward_in_float32(event, setting)]
    is_of_parameter = all(made.largest_input is None for made in event.made)
    if event.op == "exp" and event.elements == 1 and is_of_parameter:  # a learned temperature
        return [".clamp(max=4.6) on what goes into exp: a factor of 100 at most, as in CLIP", *bfloat16(setting)]
    ways = forward_in_float32(event, setting)
    if event.op == "exp" and event.is_divided_by_sum:
        return [OF_THEIR_SUM, *ways]
    is_followed = event.at_end_of_forward != event.value  # otherwise it is what the model returns, and no more is known
    stays_large = event.op == "exp" and event.at_end_of_forward > LARGEST and is_followed  # and so is its gradient
    if stays_large or _is_barely_in_float32(event) or ways[:1] == bfloat16(setting):  # float32 is needed in many places
        ways = [*_smaller_exponent(event), *ways]
    constant, factor = _smaller_constant(event)
    multiplies_gradient = factor > _LARGE_FACTOR
    if event.at_end_of_forward > LARGEST or multiplies_gradient or not ways:
        return [*constant, *_bound(event), *ways]
    return [*_bound(event), *ways, *constant]  # it is small again, so that float32 is enough


def _smaller(event: Event) -> str:
    """For what no op has made: an input, or a tensor that the model holds."""
    if event.value is None or not event.comes_from.startswith(("buffer", "parameter")):
        return SMALLER_INPUTS
    return f"smaller numbers in {event.comes_from}: it reaches {event.value:.3g}, and float16 ends at {LARGEST:g}"


def _is_barely_in_float32(event: Event) -> bool:
    """Whether float32 has no square of an exponential: a batch in which it is larger is likely to come."""
    return event.op == "exp" and event.value is not None and event.value > _ROOT_OF_FLOAT32


def _smaller_exponent(event: Event) -> list[str]:
    """For what an exponential made too large."""
    made = event.grown_at()
    is_exponential = event.op == "exp" or (made is not None and made.op == "exp")
    reached = event.value if made is None else made.largest
    if not is_exponential or reached is None:
        return []
    line = None if made is None else made.place.line
    where = "" if line is None else f" in {line.file}:{line.number}"
    if line is not None or event.alike:
        where += ", best where that is made"
    reaches = f"it reaches {math.log(reached):.3g}, and float16 ends at e ** 11"
    return [f".clamp(max={MOST_EXPONENT}) on what goes into exp{where}: {reaches}"]


def do_not_cast(dtype: torch.dtype, setting: Setting) -> str:
    """A hint for a cast to half where functions are cast."""
    cast = ".bfloat16()" if dtype == torch.bfloat16 else ".half()"
    return f"do not call {cast} on it: casts of functions give {setting.half} to each that takes it"


def _smaller_constant(event: Event) -> tuple[list[str], float]:
    """Name the number without which the result would not have been too large, and by how much it multiplies."""
    if event.op not in _MULTIPLICATIONS or event.value is None:
        return [], 1.0
    for number in event.scalars:
        factor = 1 / number if event.op.startswith("div") else number
        most = max([event.value, *(max(one.takes, one.gives) for one in event.beyond if not one.backward)])
        if abs(factor) > 1 and most / abs(factor) <= LARGEST:
            word = "a larger divisor" if event.op.startswith("div") else "a smaller constant"
            hint = f"{word} than {number:g}: the result is {event.value:.3g}, and float16 ends at {LARGEST:g}"
            return [hint], abs(factor)
    return [], 1.0


def _bound(event: Event) -> list[str]:
    """For a loop in which a value grows with each turn: what follows is too large at any precision."""
    turns = [event.value or 0.0]
    for one in event.beyond:
        is_turn = not one.backward and (one.op, one.place) == (event.op, event.place)
        if is_turn and not one.gives < _GROWTH * turns[-1]:  # nor where float32 does not hold it
            turns.append(one.gives)
    if sum(map(math.isfinite, turns)) < _TURNS:  # an inf may be the script's own
        return []
    return [
        f"bound what goes round in this loop, by torch.tanh, a LayerNorm or .clamp: it is multiplied in each turn, from"
        f" {turns[0]:.3g} to {turns[-1]:.3g} in {len(turns)} of them"
    ]


# -- gradients ---------------------------------------------------------------------------------------------------------
def in_backward(event: Event, setting: Setting) -> list[str]:
    """For a gradient."""
    stable = stable_form(event)
    if stable:
        return [stable, *_gradient_in_float32(event, setting)]
    if event.value is None:
        return [_SMALLER_LOSS, *_gradient_in_float32(event, setting), *bfloat16(setting)]
    if event.is_of_forward:
        first = _smaller_exponent(event) if _is_barely_in_float32(event) else []
        return [*first, *_gradient_in_float32(event, setting), *bfloat16(setting)]
    plain = event.value / setting.scale
    if plain > LARGEST:
        factor = 10.0 ** math.floor(math.log10(LARGEST / (_SPARE * plain)))
        loss = f"a smaller loss (a mean in place of a sum, or a factor of {factor:g} on it)"
        smaller = f"{loss}: even without the loss scale the gradient is {plain:.3g}"
        ways = [smaller, *_gradient_in_float32(event, setting)]
        if _is_all_in_loss(event, setting):
            ways = ways[1:] + ways[:1]
        return [*_smaller_exponential(event, plain), *_larger_denominator(event, setting), *ways, *bfloat16(setting)]
    if setting.dynamic and not setting.comes_down:
        fits = f"this gradient needs {in_digits(_fits(plain))}, and others may need less"
        lower = f"no min_loss_scale, or one far below {in_digits(setting.floor)}: {fits}"
        return [lower, *_gradient_in_float32(event, setting)]
    if not setting.dynamic:
        dynamic = "loss_scale='dynamic': it finds the highest that works, and follows the gradients"
        return [dynamic, *_gradient_in_float32(event, setting)]
    return [_SMALLER_LOSS, *_gradient_in_float32(event, setting)]


def wait_for(event: Event, setting: Setting) -> str:
    """For a gradient that a lower loss scale holds, while the scale comes down; "" for anything else."""
    if not event.depends_on_scale or not setting.comes_down or event.value is None or stable_form(event):
        return ""
    plain = event.value / setting.scale
    if plain > LARGEST:
        return ""
    fits = _fits(plain) if plain else setting.scale
    return (
        f"wait: without the loss scale of {in_digits(setting.scale)} the gradient is {plain:.3g}, and the scale is on"
        f" its way down to {in_digits(fits)}; amp.initialize(..., max_loss_scale={in_digits(fits)}) starts there"
    )


def _fits(gradient: float) -> float:
    """The highest loss scale at which float16 holds ``gradient``."""
    return 2.0 ** math.floor(math.log2(LARGEST / gradient))


def _gradient_in_float32(event: Event, setting: Setting) -> list[str]:
    if event.op in CAST_OPS:  # into a tensor that is half: the line does not make it so
        return keep_fp32(setting, event.place.module)
    return [*lines_in_float32(event, setting, [event.place]), *keep_fp32(setting, event.place.module)]


def _is_all_in_loss(event: Event, setting: Setting) -> bool:
    """Whether the gradient is small again when it comes to the model: float32 holds what is before."""

    def is_too_large_there(one: Beyond) -> bool:
        is_in_model = not one.place.is_outside or one.op in CAST_OPS
        return one.backward and is_in_model and one.takes / setting.scale > LARGEST

    is_of_loss = event.place.is_outside and event.op not in CAST_OPS
    return is_of_loss and not any(map(is_too_large_there, event.beyond))


def _smaller_exponential(event: Event, plain: float) -> list[str]:
    """For a gradient that is multiplied by what an exponential gave."""
    for made in event.chains:
        if made.op == "exp" and _LARGE_FACTOR < made.largest < math.inf:
            exponent = math.log(made.largest)
            most = math.floor(exponent - math.log(_SPARE * plain / LARGEST))
            reaches = f"where it reaches {exponent:.3g}: the gradient is multiplied by the result"
            return [f".clamp(max={most}) on what goes into exp, {reaches}"]
    return []


def _larger_denominator(event: Event, setting: Setting) -> list[str]:
    """For a gradient that a tensor has divided: mean and the like divide by numbers."""
    made = event.grown_at(setting.scale)
    place = None if made is None or made.op != "div" or made.scalars else made.place
    if made is None and event.op == "div" and event.zeros is not None:
        place = event.place
    if place is None:
        return []
    where = "" if place.line is None else f" in {place.line.file}:{place.line.number}"
    function = place.function
    if function in LOGARITHMS:
        return [f".clamp_min(1e-2) on what goes into {function}{where}: the gradient is divided by that"]
    if function == "normalize":
        return [f"eps=1e-2 in normalize{where}, where 1e-12 is usual: the gradient is divided by the norm"]
    return [
        f"bound the denominator{where} where it is made, as by .clamp_min(1e-2), or take F.cosine_similarity: the"
        " gradient is divided by what is next to 0"
    ]


def in_digits(scale: float) -> str:
    """As in "16777216"."""
    return f"{scale:.0f}" if scale >= 1 else f"{scale:g}"
