"""From what was found to a hint at what to do. Pure: no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from ampcompat.tools.explain.growth import Grown
from ampcompat.tools.explain.probe import ARGUMENT, Event
from ampcompat.tools.tensors import LARGEST, LEAST

#: What a dispatcher op does to a zero.
_DIVISIONS = ("div", "div_", "reciprocal", "rsqrt", "pow", "true_divide")
_FUNCTIONS = ("matmul", "bmm", "mm", "baddbmm", "einsum", "exp", "pow", "sum", "mean", "norm", "cumsum", "square")
#: Hints at what came into a forward, or an op, from outside.
_OF_GIVEN = {
    "input": "precision is not the cause: look at the data loader; skip or clean such batches",
    "buffer": "running statistics of a batch that was not finite, or an average: look at what writes it, and reset it",
    ARGUMENT: "precision is not the cause: look at what makes that tensor",
}
BFLOAT16 = "AMPCOMPAT_DTYPE=bfloat16 (or opt_level='O4'/'O5'): bfloat16 reaches as far as float32"


@dataclass(frozen=True)
class Setting:
    """Hold what a hint depends on beside the event.

    Attributes:
        opt_level: Of the latest ``initialize``.
        half: Its half dtype, as in "float16"; "" where nothing is half.
        scale: The loss scale of the backward pass.
        dynamic: Whether an overflow brings it down.
        made: Whether steps were made, all of which left finite weights.
        growth: The weight that the last steps made many times larger, if any.
    """

    opt_level: str
    half: str
    scale: float
    dynamic: bool = True
    made: bool = False
    growth: Grown | None = None


def hints(event: Event, setting: Setting) -> list[str]:
    """List what to do about ``event``, the likeliest first."""
    if event.op in _OF_GIVEN:
        return [_OF_GIVEN[event.op]]
    if event.op == "parameter":
        if setting.made:
            return ["no step is known to have written it: look at what else writes weights, such as load_state_dict"]
        return ["no step was made yet: look at how the model is initialized, or at the checkpoint it came from"]
    mask = _mask(event)
    if mask is not None:
        return [
            f"{mask:g} is -inf in {setting.half or 'float16'}: write torch.finfo(scores.dtype).min in place of it",
            *_keep(event, setting),
        ]
    eps = _tiny(event)
    if eps is not None and setting.half == "float16":
        return [
            f"eps={eps:g} is 0 in float16, whose least number is {LEAST:.0e}: use an eps of 1e-6 or more",
            *_keep(event, setting),
        ]
    diverges = [] if setting.growth is None else [setting.growth.hint]
    if not event.out_of_range or event.value <= LARGEST:
        return [*diverges, _undefined(event)]
    if event.backward:
        return [*diverges, *_too_large_backward(event, setting)]
    return diverges or [*_keep(event, setting), BFLOAT16]


def _tiny(event: Event) -> float | None:
    """A number added to, or set as the least of, the zero that ``event`` stumbled over, and itself 0 in float16."""
    if event.op not in (*_DIVISIONS, "log", "sqrt"):
        return None
    for made in (m for one in event.made for m in one.chain()):
        if made.op in ("add", "clamp", "clamp_min", "maximum", "add_"):
            for number in made.scalars:
                if 0 < abs(number) <= LEAST / 2:
                    return number
    return None


def _mask(event: Event) -> float | None:
    """The fill of a mask that is beyond float16."""
    ops = ("mul", "mul_", "add", "sub", "rsub", "masked_fill", "masked_fill_", "full", "fill_", "where", "_to_copy")
    if event.op not in ops or event.backward:
        return None
    numbers = [*event.scalars, *(n for made in event.made for n in made.scalars)]
    beyond = [n for n in numbers if n < -LARGEST]
    return beyond[0] if beyond else None


def _keep(event: Event, setting: Setting) -> list[str]:
    place = event.place
    function = place.function if place.function in _FUNCTIONS else None  # what is called by that name can be registered
    found = []
    if place.module:
        name = place.module
        if setting.opt_level in ("O2", "O3", "O5") and event.value > LARGEST and not event.backward:
            # At the boundary the result becomes half again: what consumes it must be inside.
            name = place.module.rpartition(".")[0]
        if name:
            found.append(f"amp.initialize(..., keep_fp32=['{name}'])   or   AMPCOMPAT_KEEP_FP32={name}")
    if function is not None and setting.opt_level in ("O1", "O4"):
        found.append(f"amp.register_float_function(torch, '{function}') before amp.initialize")
    return found


def _too_large_backward(event: Event, setting: Setting) -> list[str]:
    plain = event.value / setting.scale
    if plain > LARGEST:
        return [
            f"even without the loss scale it is {plain:.3g}: no scale helps; {BFLOAT16}",
            *_keep(event, setting),
            "clip activations or lower the learning rate, so that gradients stay small",
        ]
    if not setting.dynamic:
        return [
            f"a loss_scale below {setting.scale:g}: without it, it is {plain:.3g}; loss_scale='dynamic' finds one",
            *_keep(event, setting),
        ]
    return [
        f"none, if it is rare: without the loss scale of {setting.scale:g} it is {plain:.3g}; the scale comes down",
        *_keep(event, setting),
        "if it happens at every step: amp.initialize(..., max_loss_scale=...) or a static loss_scale= below",
    ]


def _undefined(event: Event) -> str:
    """Float32 would not have held it either."""
    function = event.place.function
    node = event.node
    if event.backward and (node.startswith(("Sqrt", "LinalgVectorNorm", "Norm", "Pow")) or "norm" in function):
        return f"the gradient of {function or 'this'} at 0 is not finite: add an eps inside, as in (x + 1e-6).sqrt()"
    if event.op.startswith("log") or function.startswith("log"):
        return "the logarithm of 0 (or of less): log(x.clamp_min(1e-6)), or a loss that takes logits"
    if event.op in _DIVISIONS:
        count = f" ({event.denominators} zeros)" if event.denominators else ""
        return f"a division by zero{count}: add an eps to the denominator, or F.normalize(x, eps=1e-6)"
    if event.op in ("sqrt", "rsqrt"):
        return "the root of a negative number: clamp it at 0 before"
    if event.op in ("exp", "expm1", "sinh", "cosh"):
        return "exp of more than 88 is beyond float32 too: subtract the maximum before, or clamp"
    if "softmax" in event.op:
        return "a row of -inf alone (everything is masked): mask with torch.finfo(x.dtype).min"
    return "float32 does not hold it either: precision is not the cause; look at the values that go in"
