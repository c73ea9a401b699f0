"""From what was found to what to do about it, the likeliest cure first. Pure: no tensors."""

from __future__ import annotations

import math

import torch

from ampcompat.tools.core import HALF_DTYPES
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.event import ARGUMENT, GIVEN, Event
from ampcompat.tools.explain.in_float32 import bfloat16, forward_in_float32, keep_fp32
from ampcompat.tools.explain.made import WRITTEN
from ampcompat.tools.explain.setting import Setting
from ampcompat.tools.explain.too_large import SMALLER_INPUTS, do_not_cast, in_backward, in_forward
from ampcompat.tools.explain.undefined import ends_at_one, stable_form, undefined
from ampcompat.tools.tensors import LARGEST, LEAST

#: Ops that write a number where a mask is set, and those that multiply a mask by one.
_FILLS = ("masked_fill", "masked_fill_", "full", "fill_", "where", "scalar_tensor")
_PRODUCTS = ("mul", "mul_")
_OF_MASKS = (*_FILLS, *_PRODUCTS, "add", "sub", "rsub", "_to_copy")
_ADDITIONS = ("add", "clamp", "clamp_min", "maximum", "add_")
_BOUNDS = ("clamp", "clamp_min", "clamp_max", "minimum", "maximum")
#: Float16 rounds to 1 what is below it by this or less, and float32 by this.
_NEXT_TO_ONE, _NEXT_IN_FLOAT32 = 2.0**-12, 2.0**-25
_OF_GIVEN = {
    "input": "look at what makes it (the data loader, or a state that the batch before has left); skip or clean such"
    " batches",
    "buffer": "running statistics of a batch that was not finite, or an average: look at what writes it, and reset it",
    ARGUMENT: "look at what makes that tensor",
}


def hints(event: Event, setting: Setting) -> list[str]:
    """List what to do about ``event``, the likeliest cure first."""
    if event.op in (*GIVEN, ARGUMENT):
        return _of_given(event, setting)
    cures = _of_result(event, setting)
    if event.far_rows and event.out_of_range:
        cures = [f"look at the data: {event.far_rows}", *cures]
    if setting.growth is None:
        return cures
    return [*cures, setting.growth.hint] if stable_form(event) else [setting.growth.hint, *cures]


def _of_given(event: Event, setting: Setting) -> list[str]:
    """For what came into a forward, or an op, from outside."""
    if event.op == "parameter" and event.value is not None and event.out_of_range:
        dtype = dtype_name(event.dtype)
        ways = [*keep_fp32(setting, _module_of(event)), *bfloat16(setting)] or ["smaller weights"]
        lost = f"its float32 master is finite and reaches {event.value:.6g}: the cast to {dtype} lost it"
        return [f"{ways[0]} ({lost})", *ways[1:]]
    if event.op == "parameter":
        return [setting.origin]
    is_nan_before = event.is_nan and setting.origin
    if event.op == "buffer" and event.dtype in HALF_DTYPES and not is_nan_before:
        return _of_half_buffer(event, setting)
    if event.op == "buffer" and setting.origin:
        return [setting.origin]
    is_half_input = event.op == "input" and event.dtype in HALF_DTYPES
    if is_half_input and setting.casts_functions and not event.is_nan:
        return [do_not_cast(event.dtype, setting), SMALLER_INPUTS]
    return [_OF_GIVEN[event.op]]


def _of_half_buffer(event: Event, setting: Setting) -> list[str]:
    """For a buffer with inf: what the cast lost, as the fill of a mask, or a sum that has left the range since."""
    cast = f"amp.initialize cast it to {dtype_name(event.dtype)}"
    if event.holds_mask and not setting.origin:
        return ["write -1e4 in place of its -inf"]
    if event.holds_mask:
        return [f"write -1e4 in place of its least number: {cast}, where that is -inf"]
    if setting.origin:  # it was so when amp.initialize returned
        name = f"model.{event.place.module}"
        return [
            f".clamp(max=6e4) where it is made: {cast}, which ends at {LARGEST:g}",
            f"assign it again after amp.initialize, in float32: {name} = ...",
        ]
    ways = [*keep_fp32(setting, _module_of(event)), "a mean in place of a sum"]
    return [*ways, _OF_GIVEN["buffer"]] if event.is_nan else ways


def _module_of(event: Event) -> str:
    """The module of a parameter, or buffer."""
    return (event.place.module or "").rpartition(".")[0]


def _of_result(event: Event, setting: Setting) -> list[str]:
    mask = _mask(event)
    if mask is not None and event.is_undefined:
        return [f"write -1e4 in place of {mask:g}: a row of it alone, and a product with it, then stay finite"]
    if mask is not None:
        finite = f"{mask:g} is -inf in {setting.half or 'float16'}: write -1e4 in place of it"
        return [finite, *forward_in_float32(event, setting)]
    eps = _eps_lost_in_half(event)
    if eps is not None:
        larger = f"eps={eps:g} is 0 in float16, whose least number is {LEAST:.0e}: use an eps of 1e-3 or more"
        return [larger, *keep_fp32(setting, event.place.module)]
    if event.is_undefined:
        return [*_bound_in_float32(event, setting), *undefined(event, setting)]
    if setting.growth is not None:
        return []  # no precision holds what grows so
    if event.backward:
        return in_backward(event, setting)
    return in_forward(event, setting)


def _mask(event: Event) -> float | None:
    """The fill of a mask that is beyond float16."""
    if event.op not in _OF_MASKS or event.backward:
        return None
    made_by = [(event.op, event.is_of_whole, event.scalars)]
    made_by += [(made.op, made.is_whole, made.scalars) for made in event.made]
    numbers = [
        number
        for op, is_whole, scalars in made_by
        for number in scalars
        if op in _FILLS or (op in _PRODUCTS and is_whole) or (op == WRITTEN and event.op in _FILLS)
    ]
    return next((number for number in numbers if number < -LARGEST), None)


def _bound_in_float32(event: Event, setting: Setting) -> list[str]:
    """For a bound that keeps a number from 1, or -1, and is that in half, as 1 - 1e-6 is."""
    chain = event.chains
    if not (ends_at_one(event) or any(made.op == "rsub" for made in chain)):
        return []
    for made in chain:
        bounds = made.scalars if made.op in _BOUNDS and made.dtype == torch.float16 else ()
        lost = next((number for number in bounds if _NEXT_IN_FLOAT32 < 1 - abs(number) <= _NEXT_TO_ONE), None)
        if lost is not None:
            again = f", and {setting.cast_to_half} on what comes of it before a layer takes it"
            half_again = again if setting.casts_weights and event.may_reach_layer else ""
            one = f"{lost:.9g} is {math.copysign(1, lost):g} in float16"
            return [f"{one}: .float() on what goes into {event.function_of(made)}{half_again}"]
    return []


def _eps_lost_in_half(event: Event) -> float | None:
    """A number added to, or set as the least of, the zero that ``event`` stumbled over, and itself 0 in float16."""
    if event.out_of_range and not event.backward:
        return None  # it stumbled over no zero
    is_of_all = event.op in ("log", "sqrt") or event.place.function in ("log", "sqrt")
    for source in event.made if is_of_all else [event.denominator]:
        is_half = False
        for made in () if source is None else source.chain():
            is_half = is_half or made.dtype == torch.float16  # it, or what was made of it
            numbers = made.scalars if is_half and made.op in _ADDITIONS else ()
            lost = next((number for number in numbers if 0 < abs(number) <= LEAST / 2), None)
            if lost is not None:
                return lost
    return None
