"""Ways to compute in float32, or in bfloat16, what float16 does not hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from ampcompat.tools.core import LEVELS
from ampcompat.tools.explain.call import CAST_OPS, HALF_FUNCTIONS
from ampcompat.tools.explain.event import Beyond, Event
from ampcompat.tools.explain.made import Made
from ampcompat.tools.explain.places import Place
from ampcompat.tools.explain.setting import Setting
from ampcompat.tools.tensors import LARGEST

_BFLOAT16_LEVELS = "/".join(repr(name) for name, row in LEVELS.items() if row.half_dtype == torch.bfloat16)
BFLOAT16 = f"AMPCOMPAT_DTYPE=bfloat16 (or opt_level={_BFLOAT16_LEVELS}): bfloat16 reaches as far as float32"
#: The ops of these functions.
_HALF_OPS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "convolution", "linear")
#: More modules than a reader would list.
_MANY = 3


def bfloat16(setting: Setting) -> list[str]:
    """A hint, where float16 is used."""
    return [BFLOAT16] if setting.half == "float16" else []


def keep_fp32(setting: Setting, *modules: str | None) -> list[str]:
    """A hint, unless one of them is the model itself: at O0 all of it is float32."""
    if not modules or not all(modules):
        return []
    names = list(dict.fromkeys([*setting.kept, *map(str, modules)]))
    return [f"amp.initialize(..., keep_fp32={names})   or   AMPCOMPAT_KEEP_FP32={','.join(names)}"]


def forward_in_float32(event: Event, setting: Setting) -> list[str]:
    """Ways to hold ``event``, a result of the forward, and what it reaches; the surest first."""
    reached = [one for one in event.beyond if not one.backward]
    needed = [event.place, *event.alike]
    needed += [one.place for one in reached if _leaves_range(one) or _is_cast_to_half(one, setting)]
    own = [place for place in needed if not place.is_of_torch]
    names = _modules_around(needed, reached, setting)
    patterns = _patterns(names)
    modules = keep_fp32(setting, *patterns)
    if len(own) == len(needed):
        lines = lines_in_float32(event, setting, own)
        is_one_line = all(place.line == event.place.line for place in event.alike)
        if is_one_line and not setting.casts_weights:
            return [*lines, *modules, *bfloat16(setting)]
        return [*modules, *lines, *bfloat16(setting)]  # the lines around it are likely to be next
    are_whole_lists = any(name and name.endswith("*") for name in patterns)
    are_few = len(names) <= _MANY and not are_whole_lists
    return [*modules, *bfloat16(setting)] if are_few else [*bfloat16(setting), *modules]


def _leaves_range(one: Beyond) -> bool:
    """Whether the op makes what half does not hold of what it does."""
    return one.takes <= LARGEST < one.gives


def _is_cast_to_half(one: Beyond, setting: Setting) -> bool:
    """Whether the op is computed in half although it is given what half does not hold."""
    if one.takes <= LARGEST:
        return False
    is_of_layer = setting.casts_weights and one.place.is_of_torch
    return is_of_layer or one.op in (*_HALF_OPS, *CAST_OPS)


def lines_in_float32(event: Event, setting: Setting, places: Sequence[Place]) -> list[str]:
    """How the script computes ``event`` in float32; other ``places`` follow, but for functions that are cast."""
    place = event.place
    if not setting.half or place.line is None or place.is_of_torch:
        return []
    cast = [one for one in places if one.function in HALF_FUNCTIONS] if setting.casts_functions else []
    if place.is_outside and any(made.is_of_model for made in event.made):
        return [_loss_in_float32(event, "model", cast or (setting.casts_functions and _is_made_of_cast(event)))]
    if setting.casts_weights and not event.backward and not event.may_reach_layer:
        return [_loss_in_float32(event, "layers", False)]
    if not cast:
        return [_line_in_float32(event, setting)]
    names = {one.function for one in cast}
    is_of_these = place in cast or any(made.place.function in names for made in event.chains)
    is_first = all(map(_is_called_by_name, cast)) and not is_of_these
    first = f".float() on what goes into {place.function or event.op}, and " if is_first else ""
    return [f"{first}{without_casts(cast)}"]


def without_casts(places: Sequence[Place]) -> str:
    """How the script keeps float32 in ``places`` where it calls functions that are cast."""
    names = dict.fromkeys(one.function for one in places)
    if all(map(_is_called_by_name, places)):
        calls = [f"amp.register_float_function(torch, '{name}')" for name in names]
        return f"{' and '.join(calls)} before amp.initialize"
    functions = " and ".join(names)
    return f"compute it in float32: `with amp.disable_casts():`, and in it .float() on what goes into {functions}"


def _is_made_of_cast(event: Event) -> bool:
    """Whether code after the model has called a function that casts give half, as the convolution of an SSIM."""
    for made in event.chains:
        one: Made | None = made
        while one is not None and one.place.is_outside:
            if one.op in _HALF_OPS:
                return True
            one = one.largest_input
    return False


def _is_called_by_name(place: Place) -> bool:
    """Whether the script calls the function of that name in torch: an operator, or a method, is another."""
    source = None if place.line is None else place.line.source
    return source is not None and f"torch.{place.function}(" in source


def _loss_in_float32(event: Event, of: str, casts_inside: object) -> str:
    """For what no layer takes: all that follows is in float32 then, in other lines too."""
    if casts_inside:
        around = "`with amp.disable_casts():` around it"
        return f"compute the loss in float32: {around}, and .float() on what the {of} returned"
    function = event.place.function or event.op
    return f"compute the loss in float32: .float() on what the {of} returned, before it goes into {function}"


def _line_in_float32(event: Event, setting: Setting) -> str:
    too = "" if all(other.line == event.place.line for other in event.alike) else ", and in the other lines too"
    wide = f"compute it in float32: .float() on what goes into {event.place.function or event.op}{too}"
    if not setting.casts_weights:
        return wide
    short = setting.cast_to_half
    once = "" if event.backward else ", once that is small again,"
    return f"{wide}, and {short} on what comes of it{once} before a layer takes it"


def _modules_around(places: Sequence[Place], reached: Sequence[Beyond], setting: Setting) -> list[str | None]:
    """The modules around ``places``, to be kept; a level that casts weights casts what leaves these to half."""
    if not setting.casts_weights:
        return _listed(place.module for place in places)
    inside = [_parent(place.module) if place.is_of_torch else place.module for place in places]
    inside += [one.place.module for one in reached if one.takes > LARGEST]
    if None in inside:
        return []  # what the model returns is too large for half
    names = [str(name).split(".") for name in inside]
    shared = itertools.takewhile(lambda words: len(set(words)) == 1, zip(*names, strict=False))
    return [".".join(words[0] for words in shared)]


def _parent(module: str | None) -> str | None:
    return None if module is None else module.rpartition(".")[0]


def _listed(modules: Iterable[str | None]) -> list[str | None]:
    """``modules`` without those inside of another."""
    names = list(dict.fromkeys(modules))
    return [name for name in names if not any(_is_inside(name, other) for other in names)]


def _is_inside(name: str | None, other: str | None) -> bool:
    return bool(name and other) and str(name).startswith(f"{other}.")


def _patterns(names: Sequence[str | None]) -> list[str | None]:
    """The same, as "blocks.*.fc1" where several layers of one list have it."""
    patterns = [_of_any_layer(name) for name in names]
    return list(
        dict.fromkeys(
            name if patterns.count(pattern) == 1 else pattern for name, pattern in zip(names, patterns, strict=True)
        )
    )


def _of_any_layer(name: str | None) -> str | None:
    """As "blocks.*.fc1" for "blocks.18.fc1"; a name that begins with its number is left alone."""
    words = (name or "").split(".")
    number = next((place for place, word in enumerate(words) if word.isdecimal()), 0)
    return ".".join([*words[:number], "*", *words[number + 1 :]]) if number else name
