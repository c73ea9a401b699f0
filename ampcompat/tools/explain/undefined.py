"""What float32 does not hold either, with the same inputs: a table of such results, and what to do about each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from ampcompat.tools.core import HALF_DTYPES
from ampcompat.tools.explain.call import CAST_OPS
from ampcompat.tools.explain.event import Event
from ampcompat.tools.explain.in_float32 import without_casts
from ampcompat.tools.explain.made import WRITTEN
from ampcompat.tools.explain.setting import Setting
from ampcompat.tools.words import counted

LOGARITHMS = ("log", "log_", "log2", "log10", "log1p", "logit")
_OF_SOFTMAX = "F.log_softmax(x, dim) in place of log(softmax(x)), or F.cross_entropy, which takes logits"
_OF_SIGMOID = (
    "F.logsigmoid(x) in place of log(sigmoid(x)), F.logsigmoid(-x) in place of log(1 - sigmoid(x)), or"
    " F.binary_cross_entropy_with_logits, which takes logits"
)
OF_THEIR_SUM = "exp(x - x.amax(dim, keepdim=True)) in place of exp(x), which is divided by its sum over dim"
_BOUND = ".float().clamp_min(1e-6)"
#: What an exponential in a model may be given: layers multiply the result, and float16 ends at e ** 11.
MOST_EXPONENT = 5
#: And in a loss, whose gradient has the result as a factor.
_MOST_EXPONENT_IN_LOSS = 10


class _Cure(NamedTuple):
    """What to do about such a result."""

    is_for: Callable[[Event], bool]
    text: str
    is_sure: bool = False  # whatever the precision of the inputs
    is_in_float32: bool = False  # what comes of it, in ``wide``


def _is_backward_of(event: Event, *functions: str) -> bool:
    """Whether it is in the backward of a function of torch's: that of a script's own ends without a number."""
    return event.backward and re.match(rf"({'|'.join(functions)})\w*Backward\d", event.node) is not None


def _is_root(event: Event) -> bool:
    return _is_backward_of(event, "Sqrt", "LinalgVectorNorm", "Norm", "Pow")


def _is_end_of_domain(event: Event) -> bool:
    if event.backward:
        return _is_backward_of(event, "Acos", "Acosh", "Asin", "Atanh")
    return event.op in ("acos", "acosh", "asin", "atanh")


def ends_at_one(event: Event) -> bool:
    """Whether it is of a function whose domain ends at 1, or at -1."""
    return "log1p" in (event.op, event.place.function) or _is_end_of_domain(event)


def _divides(event: Event) -> bool:
    """Whether it divides by a tensor."""
    return event.zeros is not None


def _is_cast_away(event: Event) -> bool:
    """Whether a function that casts its inputs to half made them 0."""
    return event.underflowed_at is not None and event.underflowed_at.op == "_to_copy"


def _is_written(event: Event) -> bool:
    """Whether the script wrote a NaN, or an inf, as a number of its own."""
    return event.op == WRITTEN or not all(map(math.isfinite, event.scalars))


def _is_logarithm(event: Event) -> bool:
    return event.op in LOGARITHMS or event.place.function in LOGARITHMS


def _is_logarithm_of_masked(event: Event) -> bool:
    """Whether it is of a probability that a mask of -inf has made 0."""
    return _is_logarithm(event) and any("softmax" in made.op and made.hides is not None for made in event.chains)


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
        lambda event: event.op in ("pow", "sqrt", "rsqrt") and event.is_nan,
        "a root of a negative number is NaN: .clamp_min({eps}) on what goes into it (torch.where lets its gradient"
        " through)",
    ),
    _Cure(
        lambda event: event.backward and event.place.function == "kl_div",
        "the gradient of kl_div to a target of 0 is not finite: .detach() the target, or .clamp_min(1e-6) on it",
    ),
    _Cure(
        lambda event: _is_backward_of(event, r"\w*Norm"),
        "the gradient of {function} at 0 is not finite: (x.pow(2).sum(dim) + 1e-6).sqrt() in place of it",
    ),
    _Cure(
        lambda event: _is_root(event) and _is_cast_away(event),
        "the gradient of {function} at 0 is not finite, and what goes into {underflowed} has underflowed in its cast:"
        " {cast}, and .clamp_min(1e-12) on what goes into {function}",
    ),
    _Cure(
        lambda event: _is_root(event) and event.underflowed_at is not None,
        "the gradient of {function} at 0 is not finite, and {underflowing} has underflowed in float16: .float() on what"
        " goes into {underflowed}, and .clamp_min(1e-12) on what goes into {function}",
        is_in_float32=True,
    ),
    _Cure(_is_root, "the gradient of {function} at 0 is not finite: .clamp_min(1e-6) on what goes into it"),
    _Cure(
        _is_end_of_domain,
        "{gradient}{function} at the end of its domain, or outside, is not finite: {inside} on what goes into it",
    ),
    _Cure(_is_written, "this line writes a number that is not finite: look at where it comes from"),
    _Cure(
        _is_logarithm_of_masked,
        "the logarithm of a probability that a mask of -inf makes 0: {wide}.clamp_min(1e-6) on what goes into it, after"
        " which 0 * log(p) is 0",
        is_in_float32=True,
    ),
    _Cure(
        _is_logarithm,
        "the logarithm of {zero} (or of less): {wide}.clamp_min({least_of_log}) on what goes into it",
        is_in_float32=True,
    ),
    _Cure(
        lambda event: event.is_by_number_zero,
        "a division by the number 0: look at what makes it, such as a count that nothing has counted",
    ),
    _Cure(
        lambda event: any(made.op == "sqrt" for made in event.chain_of_denominator),
        "a division by zero{zeros}: add an eps under the root, as in / (... + {eps}).sqrt(), whose gradient is not"
        " finite at 0 either",
    ),
    _Cure(
        lambda event: _divides(event) and _is_cast_away(event),
        "a division by zero{zeros}, to which what goes into {underflowed} has underflowed in its cast: {cast}",
    ),
    _Cure(
        lambda event: _divides(event) and event.underflowed_at is not None,
        "a division by zero{zeros}, to which {underflowing} has underflowed in float16: .float() on what goes into"
        " {underflowed}",
        is_in_float32=True,
    ),
    _Cure(  # of something other than 0: with an eps it is as many times too large
        lambda event: _divides(event) and event.op != "rsqrt" and not event.backward and not event.is_nan,
        "a division by zero{zeros}: .clamp_min({least}) on the denominator",
    ),
    _Cure(
        lambda event: event.op == "rsqrt",
        "a division by zero{zeros}: add an eps inside, as in torch.rsqrt(... + {eps})",
    ),
    _Cure(
        _divides,
        "a division by zero{zeros}: add an eps to the denominator, as in / (... + {eps})",
    ),
    _Cure(
        lambda event: event.op == "exp" and event.is_divided_by_sum,
        f"exp of more than 88 is beyond float32 too: {OF_THEIR_SUM}",
    ),
    _Cure(
        lambda event: event.op in ("exp", "expm1", "sinh", "cosh"),
        "{op} of more than 88 is beyond float32 too: torch.logsumexp(x, dim) or F.log_softmax(x, dim) where a logarithm"
        " follows, else .clamp(max={exponent}) on what goes into it",
    ),
    _Cure(
        lambda event: "batch_norm" in event.op and event.is_nan and not event.backward,
        "running_var of this module is below 0: look at what loads or writes it, such as a damaged checkpoint",
        is_sure=True,
    ),
)


def _cure_of(event: Event) -> _Cure | None:
    return next((cure for cure in _UNDEFINED if cure.is_for(event)), None)


def stable_form(event: Event) -> str:
    """The function that computes the same without the loss of range, whatever the weights are; "" where none does."""
    if not _is_logarithm(event) or _is_logarithm_of_masked(event):
        return ""
    made = [one.op for one in event.chains]
    if any("sigmoid" in op for op in made):
        return _OF_SIGMOID
    if not any("softmax" in op for op in made) or "rsub" in made:  # of 1 - p there is none
        return ""
    others = f", and {_BOUND} on what goes into the other logarithms" if event.alike else ""
    return f"{_OF_SOFTMAX}{others}"


def undefined(event: Event, setting: Setting) -> list[str]:
    """What to do about ``event``, the likeliest first."""
    found = [form for form in [stable_form(event)] if form]
    cure = _cure_of(event)
    if cure is not None and not found:
        underflowed = event.underflowed_at
        is_acosh = event.op == "acosh" or event.node.startswith("Acosh")  # arccosh is the same
        is_log1p = "log1p" in (event.op, event.place.function)
        eps = "1e-3" if setting.half == "float16" else "1e-6"  # the gradient is multiplied by its reciprocal
        text = cure.text.format(
            op=event.op,
            function=_function(event),
            underflowed="" if underflowed is None else event.function_of(underflowed),
            cast="" if underflowed is None else without_casts([underflowed.place]),
            underflowing="" if underflowed is None else underflowed.op,
            wide=".float()" if event.dtype in HALF_DTYPES else "",
            gradient="the gradient of " if event.backward else "",
            inside=".clamp_min(1.001)" if is_acosh else ".clamp(-0.999, 0.999)",
            zeros=f" ({counted(event.zeros, 'zero')})" if event.zeros else "",
            eps=eps,
            least="1" if event.is_of_whole else eps,
            zero="1 - 1" if is_log1p else "0",
            least_of_log="1e-6 - 1" if is_log1p else "1e-6",
            exponent=_MOST_EXPONENT_IN_LOSS if event.place.is_outside else MOST_EXPONENT,
        )
        reaches_layer = event.may_reach_layer or (event.backward and not event.place.is_outside)
        if cure.is_in_float32 and setting.casts_weights and reaches_layer:
            text += f", and {setting.cast_to_half} on what comes of it before a layer takes it"
        found.append(text)
        if cure.is_sure:
            return found
        if any(place.line != event.place.line for place in event.alike):
            found[-1] += "; so in the other lines"
    was_half = event.dtype in HALF_DTYPES or any(made.op in CAST_OPS for made in event.chains)
    if setting.half and was_half and not event.backward and not _is_written(event):
        found.append(
            f"if it is finite with --opt-level O0, {setting.half} rounded its inputs: keep in float32 what makes them"
        )
    return found


def _function(event: Event) -> str:
    """As in "sqrt"; of a power with its exponent, since a line may have several."""
    if event.op == "pow" and event.backward and event.scalars:
        return f"pow(x, {event.scalars[0] + 1:.3g})"
    return event.place.function or "this"


def is_singular(event: Event) -> bool:
    """Whether an op was asked for what it does not have, such as the root of -1: not a matter of large weights."""
    if not event.is_undefined:
        return False
    if event.backward:
        return _is_root(event) or _is_end_of_domain(event)
    is_beyond_domain = event.op in ("sqrt", "rsqrt") or _is_end_of_domain(event)
    return bool(event.zeros) or is_beyond_domain or _is_written(event) or _is_logarithm(event)
