"""From what was found to what to do about it, the cheapest cure first. Pure: no tensors.

A result that float32 does not hold either is looked up in a table (``_UNDEFINED``); one that is too large for half is
made smaller, or computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ampcompat.tools.core import HALF_DTYPES, LEVELS
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.call import CAST_OPS
from ampcompat.tools.explain.event import ARGUMENT, GIVEN, Event, Made
from ampcompat.tools.explain.growth import Grown
from ampcompat.tools.explain.places import Place
from ampcompat.tools.tensors import LARGEST, LEAST

#: What a dispatcher op does to a zero.
_DIVISIONS = ("div", "div_", "reciprocal", "rsqrt", "pow", "true_divide")
_MULTIPLICATIONS = ("mul", "mul_", "div", "div_", "add", "add_", "addmm", "baddbmm")
#: Ops that put a number into a mask.
_MASKS = ("mul", "mul_", "add", "sub", "rsub", "masked_fill", "masked_fill_", "full", "fill_", "where", "_to_copy")
#: Functions of torch that are called by these names, and that casts of functions reach.
_FUNCTIONS = ("matmul", "bmm", "mm", "baddbmm", "einsum", "exp", "pow", "sum", "mean", "norm", "cumsum", "square")
#: Functions that O1 and O4 give half whatever they get, and that modules call.
_CAST_TO_HALF = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
#: What an exponential gives beyond it is not made small again by what follows.
_FAR_BEYOND_HALF = 1e8
#: Functions that only change the dtype.
CAST_FUNCTIONS = ("to", "float", "half", "bfloat16", "type")
_BFLOAT16_LEVELS = "/".join(repr(name) for name, row in LEVELS.items() if row.half_dtype == torch.bfloat16)
BFLOAT16 = f"AMPCOMPAT_DTYPE=bfloat16 (or opt_level={_BFLOAT16_LEVELS}): bfloat16 reaches as far as float32"
_SMALLER_INPUTS = "smaller inputs: normalize what goes into the model"
_SMALLER_LOSS = "a smaller loss (a mean in place of a sum, a smaller factor on it)"
_OF_GIVEN = {
    "input": "look at the data loader, or at what else computes it; skip or clean such batches",
    "buffer": "running statistics of a batch that was not finite, or an average: look at what writes it, and reset it",
    ARGUMENT: "look at what makes that tensor",
}


@dataclass(frozen=True)
class Setting:
    """What a hint depends on beside the event."""

    half: str  # the half dtype in force, as in "float16"; "" where nothing is half
    casts_functions: bool  # so that ``.float()`` before them is undone
    scale: float  # the loss scale of the backward pass
    dynamic: bool  # whether an overflow brings it down
    origin: str  # where a parameter that is not finite may come from, in words
    growth: Grown | None  # the weight that the last steps made many times larger, if any
    kept: list[str]  # names of the modules that are kept in float32 already

    @property
    def casts_weights(self) -> bool:
        """Whether weights are half, so that layers take half alone."""
        return bool(self.half) and not self.casts_functions


def hints(event: Event, setting: Setting) -> list[str]:
    """List what to do about ``event``, the cheapest cure first."""
    if event.op in (*GIVEN, ARGUMENT):
        return _of_given(event, setting)
    cures = _of_result(event, setting)
    if setting.growth is None:
        return cures
    return [*cures, setting.growth.hint] if has_stable_form(event) else [setting.growth.hint, *cures]


def _of_given(event: Event, setting: Setting) -> list[str]:
    """For what came into a forward, or an op, from outside."""
    if event.op == "parameter" and event.value is not None and event.out_of_range:
        dtype = dtype_name(event.dtype)
        larger = f"its float32 master is finite and reaches {event.value:.6g}: the cast to {dtype} lost it"
        module = event.place.module.rpartition(".")[0] if event.place.module else ""
        return [larger, *_keep_fp32(setting, module), *_bfloat16(setting)]
    if event.op == "parameter":
        return [setting.origin]
    if event.op == "buffer" and event.dtype in HALF_DTYPES and not event.is_nan:
        return _of_half_buffer(event, setting)
    is_half_input = event.op == "input" and event.dtype in HALF_DTYPES
    if is_half_input and setting.casts_functions and not event.is_nan:
        return [_do_not_cast(event, setting), _SMALLER_INPUTS]
    return [_OF_GIVEN[event.op]]


def _of_half_buffer(event: Event, setting: Setting) -> list[str]:
    """For a buffer with inf: the fill of a mask that the cast lost, or a sum that has left the range since."""
    if event.has_minus_inf:
        dtype = dtype_name(event.dtype)
        return [f"write -1e4 in place of its least number: amp.initialize cast it to {dtype}, where that is -inf"]
    return [*_keep_fp32(setting, (event.place.module or "").rpartition(".")[0]), "a mean in place of a sum"]


def _of_result(event: Event, setting: Setting) -> list[str]:
    mask = _mask(event)
    if mask is not None and event.is_undefined:
        return [f"write -1e4 in place of {mask:g}: a row in which everything is masked then stays finite"]
    if mask is not None:
        finite = f"{mask:g} is -inf in {setting.half or 'float16'}: write -1e4 in place of it"
        return [finite, *_in_float32(event, setting)]
    eps = _eps_lost_in_half(event)
    if eps is not None and setting.half == "float16":
        larger = f"eps={eps:g} is 0 in float16, whose least number is {LEAST:.0e}: use an eps of 1e-3 or more"
        return [larger, *_in_float32(event, setting)]
    if event.is_undefined:
        return _undefined(event, setting)
    if setting.growth is not None:
        return []  # no precision holds what grows so
    if event.backward:
        return _too_large_backward(event, setting)
    return _too_large(event, setting)


# -- numbers of the script's -------------------------------------------------------------------------------------------
def _mask(event: Event) -> float | None:
    """The fill of a mask that is beyond float16."""
    if event.op not in _MASKS or event.backward:
        return None
    numbers = [*event.scalars, *(number for made in event.made for number in made.scalars)]
    return next((number for number in numbers if number < -LARGEST), None)


def _eps_lost_in_half(event: Event) -> float | None:
    """A number added to, or set as the least of, the zero that ``event`` stumbled over, and itself 0 in float16."""
    if event.op not in (*_DIVISIONS, "log", "sqrt"):
        return None
    added = [made for made in _chains(event) if made.op in ("add", "clamp", "clamp_min", "maximum", "add_")]
    numbers = [number for made in added for number in made.scalars]
    return next((number for number in numbers if 0 < abs(number) <= LEAST / 2), None)


def _chains(event: Event) -> list[Made]:
    """How the inputs of ``event`` were made, each with the cheap ops before it."""
    return [made for source in event.made for made in source.chain()]


# -- what is too large for half ----------------------------------------------------------------------------------------
def _too_large(event: Event, setting: Setting) -> list[str]:
    """For a result of the forward."""
    function = event.place.function
    bfloat16 = _bfloat16(setting)
    if function in CAST_FUNCTIONS and _is_of_script(event) and setting.casts_functions:
        return [_do_not_cast(event, setting), *bfloat16]
    if function in CAST_FUNCTIONS and _is_of_script(event):
        reaches = "" if event.value is None else f"; here it reaches {event.value:.3g}"
        return [f"cast it where it is small again: {function}() after what makes it smaller{reaches}", *bfloat16]
    if event.op == "_to_copy" and not event.made:
        return [_SMALLER_INPUTS, *_in_float32(event, setting), *bfloat16]
    if event.op == "exp" and event.elements == 1:  # a learned temperature
        return [".clamp(max=4.6) on what goes into exp: a factor of 100 at most, as in CLIP", *bfloat16]
    if event.op == "exp" and event.value is not None and event.value > _FAR_BEYOND_HALF:
        exponent = math.log(event.value)
        return [
            f".clamp(max=10) on what goes into exp, where it reaches {exponent:.3g}: no float16 holds that",
            *bfloat16,
        ]
    return [*_smaller_constant(event), *_in_float32(event, setting), *bfloat16]


def _bfloat16(setting: Setting) -> list[str]:
    return [BFLOAT16] if setting.half == "float16" else []


def _do_not_cast(event: Event, setting: Setting) -> str:
    return f"do not call {_cast_to(event.dtype)} on it: casts of functions give {setting.half} to each that takes it"


def _cast_to(dtype: torch.dtype) -> str:
    return ".bfloat16()" if dtype == torch.bfloat16 else ".half()"


def _smaller_constant(event: Event) -> list[str]:
    """Name the number without which the result would not have been too large."""
    if event.op not in _MULTIPLICATIONS or event.value is None:
        return []
    for number in event.scalars:
        factor = 1 / number if event.op.startswith("div") else number
        if abs(factor) > 1 and event.value / abs(factor) <= LARGEST:
            word = "a larger divisor" if event.op.startswith("div") else "a smaller constant"
            return [f"{word} than {number:g}: the result is {event.value:.3g}, and float16 ends at {LARGEST:g}"]
    return []


def _too_large_backward(event: Event, setting: Setting) -> list[str]:
    if event.value is None:
        return [_SMALLER_LOSS, *_in_float32(event, setting), *_bfloat16(setting)]
    plain = event.value / setting.scale
    if plain > LARGEST:
        smaller = f"{_SMALLER_LOSS}: even without the loss scale the gradient is {plain:.3g}"
        return [*_larger_eps(event), smaller, *_in_float32(event, setting), *_bfloat16(setting)]
    if not setting.dynamic:
        dynamic = "loss_scale='dynamic': it finds the highest that works, and follows the gradients"
        return [dynamic, *_in_float32(event, setting)]
    fits = 2.0 ** math.floor(math.log2(LARGEST / plain)) if plain else setting.scale
    wait = (
        f"wait: without the loss scale of {in_digits(setting.scale)} the gradient is {plain:.3g}, and the scale is on"
        f" its way down to {in_digits(fits)}; amp.initialize(..., max_loss_scale={in_digits(fits)}) starts there"
    )
    return [wait, _SMALLER_LOSS, *_in_float32(event, setting)]


def _larger_eps(event: Event) -> list[str]:
    """For a gradient that a tensor has divided: mean and the like divide by numbers."""
    if not any(made.op == "div" and not made.scalars and made.largest > LARGEST for made in event.made):
        return []
    return [
        "a larger eps in this denominator, as in / (... + 1e-3), or F.cosine_similarity: the gradient is divided by"
        " what is next to 0"
    ]


def in_digits(scale: float) -> str:
    """As in "16777216"."""
    return f"{scale:.0f}" if scale >= 1 else f"{scale:g}"


# -- computing something in float32 ------------------------------------------------------------------------------------
def _in_float32(event: Event, setting: Setting) -> list[str]:
    """Ways to compute the op, or the module around it, in float32."""
    of_op = [] if event.is_undefined else _op_in_float32(event, setting)
    return [*of_op, *_module_in_float32(event, setting)]


def _op_in_float32(event: Event, setting: Setting) -> list[str]:
    function = event.place.function
    if setting.casts_functions and function in _FUNCTIONS:
        return [f"amp.register_float_function(torch, '{function}') before amp.initialize"]
    if not setting.half or not _is_of_script(event):
        return []
    wide = f"compute it in float32: .float() on what goes into {function or event.op}"
    if setting.casts_weights:
        short = ".half()" if setting.half == "float16" else ".bfloat16()"
        wide += f", and {short} on what comes of it, once that is small again, before a layer takes it"
    return [wide]


def _module_in_float32(event: Event, setting: Setting) -> list[str]:
    module = event.place.module
    if not module:
        return []
    layers = _layers_around(module)
    if layers and not event.backward and _is_hardly_larger(event):
        return _keep_fp32(setting, f"{layers}.*")
    if setting.casts_weights and not event.backward:
        # At the boundary the result becomes half again: what consumes it must be inside.
        return _keep_fp32(setting, module.rpartition(".")[0])
    return _keep_fp32(setting, module, *_consumer(event, setting))


def _layers_around(module: str) -> str:
    """The name of the list of layers that ``module`` is in, as "blocks" for "blocks.18.fc1"; "" where it is in none."""
    names = module.split(".")
    numbers = [place for place, name in enumerate(names) if name.isdecimal()]
    return ".".join(names[: numbers[0]]) if numbers else ""


def _is_hardly_larger(event: Event) -> bool:
    """Whether a layer was given what is nearly too large, so that the layers after it leave the range too."""
    if event.value is None or not event.out_of_range:
        return False
    return any(event.value <= 8 * made.largest for made in event.made)


def _consumer(event: Event, setting: Setting) -> list[str]:
    """The module that would cast a result beyond half again, if that is known."""
    spread = event.spread
    is_result = event.out_of_range and not event.backward and event.op != "_to_copy"
    if not is_result or setting.casts_weights or spread is None:
        return []
    return [spread.module] if spread.module and spread.function in _CAST_TO_HALF else []


def _keep_fp32(setting: Setting, *modules: str) -> list[str]:
    """A hint, unless the modules are the model itself: at O0 all of it is float32."""
    if "" in modules:
        return []
    names = list(dict.fromkeys([*setting.kept, *modules]))
    return [f"amp.initialize(..., keep_fp32={names})   or   AMPCOMPAT_KEEP_FP32={','.join(names)}"]


def _is_of_script(event: Event) -> bool:
    """Whether the script itself calls the op."""
    return event.place.line is not None and not event.backward and not is_module_of_torch(event.place)


def is_module_of_torch(place: Place) -> bool:
    """Whether ``place`` is in a module that torch has."""
    return hasattr(torch.nn, place.kind or " ")


# -- what float32 does not hold either, with the same inputs -----------------------------------------------------------
class _Cure(NamedTuple):
    """What to do about such a result."""

    is_for: Callable[[Event], bool]
    text: str
    is_sure: bool = False  # whatever the precision of the inputs
    is_stable_form: bool = False  # another function computes the same without the loss of range


def _is_root(event: Event) -> bool:
    return event.backward and event.node.startswith(("Sqrt", "LinalgVectorNorm", "Norm", "Pow"))


def _is_end_of_range(event: Event) -> bool:
    return event.backward and event.node.startswith(("Acos", "Asin", "Atanh", "Acosh"))


def _is_written(event: Event) -> bool:
    """Whether the script wrote a NaN, or an inf, as a number of its own."""
    return event.op == "lift_fresh" or not all(map(math.isfinite, event.scalars))


def _is_logarithm(event: Event, of: str = "") -> bool:
    is_logarithm = event.op.startswith("log") or event.place.function.startswith("log")
    return is_logarithm and (not of or any(of in made.op for made in _chains(event)))


def _is_nan_of(*ops: str) -> Callable[[Event], bool]:
    """Whether one of ``ops`` is NaN because there is too little to compute it from."""
    return lambda event: event.is_nan and not event.backward and event.op in ops


#: The first row that is for an event is told.
_UNDEFINED = (
    _Cure(
        _is_nan_of("std", "var", "std_mean", "var_mean"),
        "{op} of a single value is NaN: leave such a batch out (drop_last=True), or pass correction=0",
        is_sure=True,
    ),
    _Cure(
        lambda event: event.is_nan and not event.backward and event.is_of_nothing,
        "{op} of nothing is NaN: leave out a batch of which nothing is left, or sum and divide by max(count, 1)",
        is_sure=True,
    ),
    _Cure(
        _is_nan_of("mean"),
        "the mean of nothing is NaN: leave out a batch of which nothing is left",
        is_sure=True,
    ),
    _Cure(
        _is_nan_of("nll_loss_forward", "nll_loss2d_forward"),
        "every label of this batch is ignore_index, or of weight 0: leave such a batch out, or divide a loss of"
        " reduction='sum' by max(count, 1)",
        is_sure=True,
    ),
    _Cure(
        lambda event: event.op in ("_ctc_loss", "_cudnn_ctc_loss"),
        "a target that is longer than its input has no alignment: zero_infinity=True, or leave such samples out",
        is_sure=True,
    ),
    _Cure(
        lambda event: event.op == "pow" and event.is_nan,
        "a root of a negative number is NaN: .clamp_min({eps}) on what goes into it (torch.where lets its gradient"
        " through)",
    ),
    _Cure(
        lambda event: _is_root(event) or (event.backward and "norm" in event.place.function),
        "the gradient of {function} at 0 is not finite: add an eps inside, as in (... + 1e-6).sqrt()",
    ),
    _Cure(
        _is_end_of_range,
        "the gradient of {function} at the end of its range is not finite: {inside} on what goes into it",
    ),
    _Cure(_is_written, "this line writes a number that is not finite: look at where it comes from"),
    _Cure(
        lambda event: _is_logarithm(event, of="softmax"),
        "F.log_softmax(x, dim) in place of log(softmax(x)), or F.cross_entropy, which takes logits",
        is_stable_form=True,
    ),
    _Cure(
        lambda event: _is_logarithm(event, of="sigmoid"),
        "F.logsigmoid(x) in place of log(sigmoid(x)), or F.binary_cross_entropy_with_logits, which takes logits",
        is_stable_form=True,
    ),
    _Cure(_is_logarithm, "the logarithm of 0 (or of less): {wide}.clamp_min(1e-6) on what goes into it"),
    _Cure(
        lambda event: event.is_by_number_zero,
        "a division by the number 0: look at what makes it, such as a count that nothing has counted",
    ),
    _Cure(  # of something other than 0: with an eps it is as many times too large
        lambda event: event.op.startswith(("div", "reciprocal")) and not event.backward and not event.is_nan,
        "a division by zero{zeros}: .clamp_min() on the denominator with what it is at least, as 1 for a count",
    ),
    _Cure(
        lambda event: event.op == "rsqrt" and event.is_nan,
        "the root of a negative number: .clamp_min({eps}) on what goes into it",
    ),
    _Cure(
        lambda event: event.op in _DIVISIONS and any(made.op == "sqrt" for made in _chains(event)),
        "a division by zero{zeros}: add an eps under the root, as in / (... + {eps}).sqrt(), whose gradient is not"
        " finite at 0 either",
    ),
    _Cure(
        lambda event: event.op in _DIVISIONS,
        "a division by zero{zeros}: add an eps to the denominator, as in / (... + {eps})",
    ),
    _Cure(
        lambda event: event.op == "sqrt",
        "the root of a negative number: clamp it at 0 before",
    ),
    _Cure(
        lambda event: event.op in ("exp", "expm1", "sinh", "cosh"),
        "{op} of more than 88 is beyond float32 too: torch.logsumexp(x, dim) or F.log_softmax(x, dim) where a logarithm"
        " follows, else .clamp(max=20) on what goes into it",
    ),
    _Cure(
        lambda event: "batch_norm" in event.op and event.is_nan and not event.backward,
        "running_var of this module is below 0: look at what loads or writes it, such as a damaged checkpoint",
        is_sure=True,
    ),
    _Cure(
        lambda event: "softmax" in event.op,
        "a row of -inf alone (everything is masked): mask with -1e4 in place of -inf",
    ),
)


def _cure_of(event: Event) -> _Cure | None:
    return next((cure for cure in _UNDEFINED if cure.is_for(event)), None)


def _undefined(event: Event, setting: Setting) -> list[str]:
    found = []
    cure = _cure_of(event)
    if cure is not None:
        count = event.denominators
        text = cure.text.format(
            op=event.op,
            function=event.place.function or "this",
            wide=".float()" if event.dtype in HALF_DTYPES else "",
            inside=".clamp_min(1.001)" if event.node.startswith("Acosh") else ".clamp(-0.999, 0.999)",
            zeros=f" ({count} zero{'s' if count > 1 else ''})" if count else "",
            eps="1e-3" if setting.half == "float16" else "1e-6",  # the gradient is multiplied by its reciprocal
        )
        found.append(text)
        if cure.is_sure:
            return found
    was_half = event.dtype in HALF_DTYPES or any(made.op in CAST_OPS for made in _chains(event))
    if setting.half and was_half and not event.backward and not _is_written(event):
        found.append(
            f"if it is finite with --opt-level O0, {setting.half} rounded its inputs: keep in float32 what makes them"
        )
    return found


def has_stable_form(event: Event) -> bool:
    """Whether another function computes the same without the loss of range, whatever the weights are."""
    cure = _cure_of(event)
    return event.is_undefined and cure is not None and cure.is_stable_form


def is_singular(event: Event) -> bool:
    """Whether an op was asked for what it does not have, such as the root of -1: not a matter of large weights."""
    if not event.is_undefined:
        return False
    if event.backward:
        return _is_root(event) or _is_end_of_range(event)
    is_by_zero = event.op in _DIVISIONS and event.denominators > 0
    is_beyond_domain = event.op in ("sqrt", "rsqrt", "acos", "asin", "acosh", "atanh")
    return is_by_zero or is_beyond_domain or _is_written(event) or _is_logarithm(event)
