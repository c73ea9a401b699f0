"""From what was found to what to do about it, the cheapest cure first. Pure: no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ampcompat.tools.core import HALF_DTYPES, LEVELS
from ampcompat.tools.dtypes import dtype_name
from ampcompat.tools.explain.growth import Grown
from ampcompat.tools.explain.places import Place
from ampcompat.tools.explain.probe import ARGUMENT, Event, Made
from ampcompat.tools.tensors import LARGEST, LEAST

#: What a dispatcher op does to a zero.
_DIVISIONS = ("div", "div_", "reciprocal", "rsqrt", "pow", "true_divide")
#: Functions of torch that are called by these names, and that casts of functions reach.
_FUNCTIONS = ("matmul", "bmm", "mm", "baddbmm", "einsum", "exp", "pow", "sum", "mean", "norm", "cumsum", "square")
#: Functions that O1 and O4 give half whatever they get, and that modules call.
_CAST_TO_HALF = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
#: Functions that only change the dtype.
CASTS = ("to", "float", "half", "bfloat16", "type")
_MASKS = ("mul", "mul_", "add", "sub", "rsub", "masked_fill", "masked_fill_", "full", "fill_", "where", "_to_copy")
_MULTIPLICATIONS = ("mul", "mul_", "div", "div_", "add", "add_", "addmm", "baddbmm")
#: Nodes of functions whose gradient is infinite at the ends of their range.
_ENDS = ("Acos", "Asin", "Atanh", "Acosh")
_ROOTS = ("Sqrt", "LinalgVectorNorm", "Norm", "Pow")
#: Hints at what came into a forward, or an op, from outside.
_OF_GIVEN = {
    "input": "look at the data loader, or at what else computes it; skip or clean such batches",
    "buffer": "running statistics of a batch that was not finite, or an average: look at what writes it, and reset it",
    ARGUMENT: "look at what makes that tensor",
}
#: How many times larger the gradients of other batches may be, at a static scale.
HEADROOM = 4
_BFLOAT16_LEVELS = "/".join(repr(name) for name, row in LEVELS.items() if row.half_dtype == torch.bfloat16)
BFLOAT16 = f"AMPCOMPAT_DTYPE=bfloat16 (or opt_level={_BFLOAT16_LEVELS}): bfloat16 reaches as far as float32"


@dataclass(frozen=True)
class Setting:
    """Hold what a hint depends on beside the event.

    Attributes:
        half: The half dtype in force, as in "float16"; "" where nothing is half.
        casts_functions: Whether functions are cast, so that ``.float()`` before them is undone.
        casts_weights: Whether weights are half.
        scale: The loss scale of the backward pass.
        dynamic: Whether an overflow brings it down.
        origin: Where a parameter that is not finite may come from, in words.
        growth: The weight that the last steps made many times larger, if any.
        kept: Names of the modules that are kept in float32 already.
    """

    half: str
    casts_functions: bool
    casts_weights: bool
    scale: float
    dynamic: bool = True
    origin: str = ""
    growth: Grown | None = None
    kept: list[str] = field(default_factory=list)


def hints(event: Event, setting: Setting) -> list[str]:
    """List what to do about ``event``, the cheapest cure first."""
    if event.op == "input" and event.dtype in HALF_DTYPES and setting.casts_functions and not event.is_nan:
        return [_do_not_cast(event, setting), "smaller inputs: normalize what goes into the model"]
    if event.op in _OF_GIVEN:
        return [_OF_GIVEN[event.op]]
    if event.op == "parameter":
        return _of_parameter(event, setting)
    cures = _cures(event, setting)
    if setting.growth is None:
        return cures
    return [*cures, setting.growth.hint] if has_stable_form(event) else [setting.growth.hint, *cures]


def has_stable_form(event: Event) -> bool:
    """Whether another function computes the same without the loss of range, whatever the weights are."""
    return event.is_undefined and _stable_form(event) is not None


def is_singular(event: Event) -> bool:
    """Whether an op was asked for what it does not have, such as the root of -1: not a matter of large weights."""
    if not event.is_undefined:
        return False
    if event.backward:
        return event.node.startswith((*_ROOTS, *_ENDS))
    is_by_zero = event.op in _DIVISIONS and event.denominators > 0
    is_beyond_domain = event.op in ("sqrt", "rsqrt", "acos", "asin", "acosh", "atanh")
    return is_by_zero or is_beyond_domain or _is_written(event) or _is_logarithm(event)


def _of_parameter(event: Event, setting: Setting) -> list[str]:
    if event.value is None or not event.out_of_range:
        return [setting.origin]
    larger = (
        f"its float32 master is finite and reaches {event.value:.6g}: the cast to {dtype_name(event.dtype)} lost it"
    )
    module = event.place.module.rpartition(".")[0] if event.place.module else ""
    return [larger, *(_keep_fp32([module], setting) if module else []), BFLOAT16]


def _cures(event: Event, setting: Setting) -> list[str]:
    mask = _mask(event)
    if mask is not None:
        return _of_mask(mask, event, setting)
    eps = _eps_lost_in_half(event)
    if eps is not None and setting.half == "float16":
        larger = f"eps={eps:g} is 0 in float16, whose least number is {LEAST:.0e}: use an eps of 1e-4 or more"
        return [larger, *_in_float32(event, setting)]
    if event.is_undefined:
        return _undefined(event, setting)
    if setting.growth is not None:
        return []  # no precision holds what grows so
    if event.backward:
        return _too_large_backward(event, setting)
    bfloat16 = [BFLOAT16] if setting.half == "float16" else []
    if event.place.function in CASTS and _is_of_script(event):
        here = _do_not_cast(event, setting) if setting.casts_functions else _cast_later(event)
        return [here, *bfloat16]
    return [*_smaller_inputs(event), *_smaller_constant(event), *_in_float32(event, setting), *bfloat16]


def _do_not_cast(event: Event, setting: Setting) -> str:
    cast = ".bfloat16()" if event.dtype == torch.bfloat16 else ".half()"
    return f"do not call {cast} on it: casts of functions give {setting.half} to each that takes it"


def _cast_later(event: Event) -> str:
    largest = "" if event.value is None else f"; here it reaches {event.value:.3g}"
    return f"cast it where it is small again: {event.place.function}() after what makes it smaller{largest}"


def _of_mask(fill: float, event: Event, setting: Setting) -> list[str]:
    if event.is_undefined:
        return [f"write -1e4 in place of {fill:g}: a row in which everything is masked then stays finite"]
    finite = f"{fill:g} is -inf in {setting.half or 'float16'}: write -1e4 in place of it"
    return [finite, *_in_float32(event, setting)]


# -- constants ---------------------------------------------------------------------------------------------------------
def _mask(event: Event) -> float | None:
    """The fill of a mask that is beyond float16."""
    if event.op not in _MASKS or event.backward:
        return None
    numbers = [*event.scalars, *(n for made in event.made for n in made.scalars)]
    beyond = [n for n in numbers if n < -LARGEST]
    return beyond[0] if beyond else None


def _eps_lost_in_half(event: Event) -> float | None:
    """A number added to, or set as the least of, the zero that ``event`` stumbled over, and itself 0 in float16."""
    if event.op not in (*_DIVISIONS, "log", "sqrt"):
        return None
    for made in _chains(event):
        if made.op in ("add", "clamp", "clamp_min", "maximum", "add_"):
            for number in made.scalars:
                if 0 < abs(number) <= LEAST / 2:
                    return number
    return None


def _smaller_inputs(event: Event) -> list[str]:
    """For a cast of what no op has made."""
    return [] if event.made or event.op != "_to_copy" else ["smaller inputs: normalize what goes into the model"]


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


def _chains(event: Event) -> list[Made]:
    """How the inputs of ``event`` were made, each with the cheap ops before it."""
    return [made for source in event.made for made in source.chain()]


# -- computing something in float32 ------------------------------------------------------------------------------------
def _in_float32(event: Event, setting: Setting) -> list[str]:
    """Ways to compute the op, or the module around it, in float32."""
    of_op = [] if event.is_undefined else _op_in_float32(event, setting)
    return [*of_op, *_module_in_float32(event, setting)]


def _op_in_float32(event: Event, setting: Setting) -> list[str]:
    function = event.place.function
    is_cast_function = setting.casts_functions and function in _FUNCTIONS
    if is_cast_function:
        return [f"amp.register_float_function(torch, '{function}') before amp.initialize"]
    if _is_of_script(event) and setting.half:
        wide = f"compute it in float32: .float() on what goes into {function or event.op}"
        if setting.casts_weights:  # a layer with half weights takes half alone
            short = ".half()" if setting.half == "float16" else ".bfloat16()"
            wide += f", and {short} on what comes of it, once that is small again, before a layer takes it"
        return [wide]
    return []


def _module_in_float32(event: Event, setting: Setting) -> list[str]:
    module = event.place.module
    if module and setting.casts_weights and not event.backward:
        # At the boundary the result becomes half again: what consumes it must be inside.
        module = module.rpartition(".")[0]
    return _keep_fp32([module, *_consumer(event, setting)], setting) if module else []


def _consumer(event: Event, setting: Setting) -> list[str]:
    """The module that would cast a result beyond half again, if that is known."""
    spread = event.spread
    is_result = event.out_of_range and not event.backward and event.op != "_to_copy"
    if not is_result or setting.casts_weights or spread is None:
        return []
    return [spread.module] if spread.module and spread.function in _CAST_TO_HALF else []


def _keep_fp32(modules: list[str], setting: Setting) -> list[str]:
    names = list(dict.fromkeys([*setting.kept, *modules]))
    return [f"amp.initialize(..., keep_fp32={names})   or   AMPCOMPAT_KEEP_FP32={','.join(names)}"]


def _is_of_script(event: Event) -> bool:
    """Whether the script itself calls the op."""
    return event.place.line is not None and not event.backward and not is_module_of_torch(event.place)


def is_module_of_torch(place: Place) -> bool:
    """Whether ``place`` is in a module that torch has."""
    return hasattr(torch.nn, place.kind or " ")


# -- the backward pass -------------------------------------------------------------------------------------------------
def _too_large_backward(event: Event, setting: Setting) -> list[str]:
    smaller_loss = "a smaller loss (a mean in place of a sum, a smaller factor on it)"
    if event.value is None:
        return [smaller_loss, *_in_float32(event, setting), BFLOAT16]
    plain = max(event.value / setting.scale, event.largest_gradient or 0.0)
    if plain > LARGEST:
        return [
            *_larger_eps(event),
            f"{smaller_loss}: {_too_large_at_any_scale(plain)}",
            "clipped activations, or a lower learning rate, if gradients have grown",
            *_in_float32(event, setting),
            BFLOAT16,
        ]
    fits = 2.0 ** math.floor(math.log2(LARGEST / plain)) if plain else setting.scale
    if not setting.dynamic:
        found = ["loss_scale='dynamic': it finds the highest that works, and follows the gradients"]
        if event.largest_gradient is not None:
            found.append(
                f"loss_scale={_plain(fits / HEADROOM)} or less: without {_plain(setting.scale)}, the largest gradient"
                f" of this step is {plain:.3g}"
            )
        return [*found, *_in_float32(event, setting)]
    return [
        f"wait: without the loss scale of {_plain(setting.scale)} the gradient is {plain:.3g}, and the scale is on its"
        f" way down to {_plain(fits)}; amp.initialize(..., max_loss_scale={_plain(fits)}) starts there",
        smaller_loss,
        *_in_float32(event, setting),
    ]


def _larger_eps(event: Event) -> list[str]:
    """For a gradient that a tensor has divided: mean and the like divide by numbers."""
    if not any(made.op == "div" and not made.scalars and made.largest > LARGEST for made in event.made):
        return []
    return [
        "a larger eps in this denominator, as in / (... + 1e-3), or F.cosine_similarity: the gradient is divided by"
        " what is next to 0"
    ]


def _too_large_at_any_scale(plain: float) -> str:
    if math.isfinite(plain):
        return f"even without the loss scale the gradient is {plain:.3g}"
    return "float16 does not hold the gradient without the loss scale either"


def _plain(scale: float) -> str:
    """``scale`` with all its digits."""
    return f"{scale:.0f}" if scale >= 1 else f"{scale:g}"


# -- what float32 does not hold either, with the same inputs -----------------------------------------------------------
def _undefined(event: Event, setting: Setting) -> list[str]:
    sure = _of_few_values(event)
    if sure:
        return [sure]
    cure = _undefined_cure(event, setting)
    found = [cure] if cure else []
    if setting.half and not event.backward and not _is_written(event):
        found.append(
            f"if it is finite with --opt-level O0, {setting.half} rounded its inputs: keep in float32 what makes them"
        )
    return found


def _undefined_cure(event: Event, setting: Setting) -> str:
    function = event.place.function
    node = event.node
    if event.backward and (node.startswith(_ROOTS) or "norm" in function):
        return f"the gradient of {function or 'this'} at 0 is not finite: add an eps inside, as in (... + 1e-6).sqrt()"
    if event.backward and node.startswith(_ENDS):
        return f"the gradient of {function} at the end of its range is not finite: clamp its input a little inside"
    if _is_written(event):
        return "this line writes a number that is not finite: look at where it comes from"
    if _is_logarithm(event):
        wide = ".float()" if event.dtype in HALF_DTYPES else ""
        return _stable_form(event) or f"the logarithm of 0 (or of less): {wide}.clamp_min(1e-6) on what goes into it"
    if event.op in _DIVISIONS:
        zeros = event.denominators
        count = f" ({zeros} zero{'s' if zeros > 1 else ''})" if zeros else ""
        eps = "1e-3" if setting.half == "float16" else "1e-6"  # the gradient is multiplied by its reciprocal
        return f"a division by zero{count}: add an eps to the denominator, as in / (... + {eps})"
    if event.op in ("sqrt", "rsqrt"):
        return "the root of a negative number: clamp it at 0 before"
    if event.op in ("exp", "expm1", "sinh", "cosh"):
        return (
            f"{event.op} of more than 88 is beyond float32 too: .clamp(max=20) on what goes into it; for a softmax,"
            " subtract the maximum"
        )
    if "softmax" in event.op:
        return "a row of -inf alone (everything is masked): mask with -1e4 in place of -inf"
    return ""


def _of_few_values(event: Event) -> str:
    """For what is NaN because there is nothing to compute it from."""
    if event.backward or not event.is_nan:
        return ""
    if event.op in ("std", "var", "std_mean", "var_mean"):
        return f"{event.op} of a single value is NaN: leave such a batch out (drop_last=True), or pass correction=0"
    if event.op == "mean":
        return "the mean of nothing is NaN: leave out a batch of which nothing is left"
    if event.op.startswith("nll_loss"):
        return (
            "every label of this batch is ignore_index, or of weight 0: leave such a batch out, or divide a loss of"
            " reduction='sum' by max(count, 1)"
        )
    return ""


def _is_written(event: Event) -> bool:
    """Whether the script wrote a NaN, or an inf, as a number of its own."""
    return event.op == "lift_fresh" or not all(map(math.isfinite, event.scalars))


def _is_logarithm(event: Event) -> bool:
    return event.op.startswith("log") or event.place.function.startswith("log")


def _stable_form(event: Event) -> str | None:
    """The function that takes the logarithm of a softmax or sigmoid without computing that first."""
    if not _is_logarithm(event):
        return None
    before = [made.op for made in _chains(event)]
    if any("softmax" in op for op in before):
        return "F.log_softmax(x, dim) in place of log(softmax(x)), or F.cross_entropy, which takes logits"
    if any(op.startswith("sigmoid") for op in before):
        return "F.logsigmoid(x) in place of log(sigmoid(x)), or F.binary_cross_entropy_with_logits, which takes logits"
    return None
