"""Read the op lists: which rule has each public name, and which overloads need a kernel of ours to follow it.

A listed name stands for one or more aten overloads. An op made of other ops needs a kernel only where its own
arithmetic would run in the wrong dtype; one on the innermost op serves all callers, ``torch.func.vmap`` included.
Functions that torch wrote in Python over other ops, which the dispatcher cannot see whole, have their bodies replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F

from ampcompat import _torch
from ampcompat._log import warn_once
from ampcompat._state import Part, state
from ampcompat.amp import lists
from ampcompat.amp.lists import functional_overrides, tensor_overrides, torch_overrides


class Rule(Enum):
    """What an op does with its floating-point arguments; every rule leaves float64 alone, as torch does.

    The last two refuse half where a script calls them by name (:mod:`ampcompat.amp.casts.refusals`). Where torch calls
    the op, arguments of a banned op are cast to float32, arguments of an in-place op to the dtype of its left side.
    """

    HALF = "half"
    BFLOAT16 = "bfloat16"  # functions that users registered so, at every level
    FLOAT = "float32"
    PROMOTE = "widest argument"
    LEFT = "left side"
    UNCAST = "as given"
    NO_BFLOAT16 = "float32 for bfloat16"
    BANNED = "half refused"
    INPLACE_BANNED = "half left side refused"


#: What follows for an op's in-place form.
_IN_PLACE: Final = {Rule.HALF: Rule.LEFT, Rule.FLOAT: Rule.INPLACE_BANNED}

Plan = dict[torch._ops.OpOverload, tuple[str, Rule]]


@dataclass(eq=False)
class OpRules(Part):
    """The op rules that are on the dispatcher (see :mod:`ampcompat.amp.casts.installation`).

    Attributes:
        table: The rules by public name, as last read from the lists.
        plans: What is registered, by device type.
        undo: Undo of the registrations and wrappers.
        allow_banned: ``amp.init(allow_banned=True)``: banned ops run in float32.
        registered: Functions that users registered, by module and name: the holder, the name, and the rule.
    """

    table: dict[str, Rule] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    undo: ExitStack = field(default_factory=ExitStack)
    allow_banned: bool = False
    registered: dict[tuple[int, str], tuple[object, str, Rule]] = field(default_factory=dict)


op_rules = state.add(OpRules())


# -- From lists to names -----------------------------------------------------------------------------------------------
class OpList(NamedTuple):
    """One of the lists that users may edit, the rule of what is on it, and the names that it ships with."""

    module: ModuleType
    name: str
    rule: Rule
    shipped: frozenset[str]


#: Where scripts find functions, in the order in which a listed name is looked up.
OWNERS: Final = (F, torch, torch.Tensor)


def public_name(entry: str) -> str:
    """The name of the op behind an operator: ``__rpow__`` and ``__ipow__`` are ``pow``; other names are themselves."""
    if not entry.startswith("__"):
        return entry
    name = entry.strip("_").replace("truediv", "div")
    is_reflected_or_in_place = name[0] in "ir" and hasattr(torch, name[1:])
    return name[1:] if is_reflected_or_in_place else name


#: The rule of each list, by the list's name. Where users add a name to several lists, the earliest wins: in apex half
#: cast last.
_RULES_OF_LISTS: Final = {
    "FP16_FUNCS": Rule.HALF,
    "FP32_FUNCS": Rule.FLOAT,
    "CASTS": Rule.PROMOTE,
    "SEQUENCE_CASTS": Rule.PROMOTE,
    "BANNED_FUNCS": Rule.BANNED,
    "UNCAST": Rule.UNCAST,
    "NO_BFLOAT16": Rule.NO_BFLOAT16,
}


def _names(module: ModuleType, list_name: str) -> set[str]:
    """Read the public names on a list as it is now; ``__rpow__`` is ``pow``."""
    holds_pairs = list_name == "BANNED_FUNCS"
    names = set()
    for entry in getattr(module, list_name):
        name = _first_of_pair(entry) if holds_pairs else entry
        if not isinstance(name, str):
            kind = "pairs of a name and a message" if holds_pairs else "names of ops"
            raise TypeError(
                f"{module.__name__}.{list_name} holds {entry!r} - its entries are {kind} - take it out or write it so."
            )
        names.add(public_name(name))
    return names


def _first_of_pair(entry: object) -> object:
    """Return the first item of a pair, and None for anything that is no pair."""
    if isinstance(entry, tuple) and len(entry) == 2:
        return entry[0]
    return None


def _shipped_lists() -> list[OpList]:
    """All lists, with what they hold before users edit them."""
    op_lists = []
    for list_name, rule in _RULES_OF_LISTS.items():
        for module in (functional_overrides, torch_overrides, tensor_overrides, lists):
            if hasattr(module, list_name):
                op_lists.append(OpList(module, list_name, rule, frozenset(_names(module, list_name))))
    return op_lists


_LISTS: Final = _shipped_lists()
#: Rule by name before users edit the lists; no name ships on lists of two rules.
SHIPPED: Final = {name: op_list.rule for op_list in _LISTS for name in sorted(op_list.shipped)}


def rules_by_name() -> dict[str, Rule]:
    """Read the rule of every name on the lists, users' edits first; raise a TypeError for an entry of a wrong kind."""
    removed, added = _read_edits()
    edits = {name: rule for name, rule in {**removed, **added}.items() if SHIPPED.get(name) is not rule}
    table = {**edits, **SHIPPED, **edits}  # edits first, in order and in value
    for name, rule in list(table.items()):
        if rule in _IN_PLACE and hasattr(torch.Tensor, f"{name}_"):
            table[f"{name}_"] = _IN_PLACE[rule]
    return table


def _read_edits() -> tuple[dict[str, Rule], dict[str, Rule]]:
    """The rules of the names that users have removed from lists (as given), and of the names that they have added."""
    removed: dict[str, Rule] = {}
    added: dict[str, Rule] = {}
    for op_list in _LISTS:
        now = _names(op_list.module, op_list.name)
        removed.update(dict.fromkeys(sorted(op_list.shipped - now), Rule.UNCAST))
        for name in sorted(now - op_list.shipped):
            added.setdefault(name, op_list.rule)
            _warn_of_unknown(name, op_list)
    return removed, added


def _warn_of_unknown(name: str, op_list: OpList) -> None:
    """Warn of a name that stands for nothing in this torch."""
    is_known = name in SHIPPED or _torch.overloads_of(name) or python_function(name) is not None
    if not is_known:
        warn_once(
            f"no op {name}",
            f"{op_list.module.__name__}.{op_list.name} holds {name!r}, which is not a function of torch,"
            " torch.nn.functional or torch.Tensor - it changes no cast - check its spelling.",
        )


# -- From names to ops -------------------------------------------------------------------------------------------------
#: Functions on the float list that the dispatcher cannot see whole: each would compute in half before or between the
#: listed ops inside, or add half gradients that nearly cancel (``normalize``). ``Tensor.cpu`` is not an op.
PYTHON: Final = (
    *("cpu", "normalize", "local_response_norm", "interpolate", "gaussian_nll_loss", "multilabel_soft_margin_loss"),
    *("triplet_margin_with_distance_loss", "mse_loss", "l1_loss"),
)


#: Float32 functions that native autocast of CUDA does not cast as a whole: it promotes grid_sample, and computes the
#: gradients of cumulative ops and of norms in half.
_CAST_IN_PART_ON_CUDA: Final = ("cumprod", "cumsum", "grid_sample", "norm")


def plan_for(device_type: str, key: str, table: dict[str, Rule] | None = None) -> Plan:
    """List the public name and rule of each overload that needs one of our kernels on ``device_type``.

    ``softmax`` is on the list of float32 functions. Its overloads are ``aten::softmax.int`` and the ops inside,
    ``_softmax`` and ``_safe_softmax``. Native autocast casts the first to float32 on CUDA, where ours are the other
    two; on the CPU it casts none, and all three are ours.
    """
    if table is None:
        table = rules_by_name()
    native = _torch.ops_with_kernel(key)
    plan: Plan = {}
    for name, rule in table.items():
        if not _needs_kernels(name, rule):
            continue
        overrides = _overrides_native(name, rule, device_type)
        # Cast inside _cudnn_rnn, with cuDNN's flat weight buffer.
        is_cast_by_cudnn = device_type == "cuda" and name in _torch.RECURRENT_LAYERS
        for op in _torch.overloads_of(name):
            is_cast_by_torch = is_cast_by_cudnn or _torch.op_name(op) in native
            if overrides or not is_cast_by_torch:
                plan[op] = name, rule
    return plan


def _overrides_native(name: str, rule: Rule, device_type: str) -> bool:
    """Whether ``name`` needs our kernels even where native autocast has its own."""
    if not _ships(name, rule):
        return True
    # Native refuses binary_cross_entropy in every dtype (CUDA) or in none (CPU).
    if rule in (Rule.BANNED, Rule.UNCAST):
        return True
    return name in _CAST_IN_PART_ON_CUDA and device_type != "cpu"


def _ships(name: str, rule: Rule) -> bool:
    """Whether ``name`` has ``rule`` where the lists are as shipped, as the in-place form of a listed op too."""
    if name.endswith("_"):
        return _IN_PLACE.get(SHIPPED.get(name[:-1], Rule.UNCAST)) is rule
    return SHIPPED.get(name) is rule


def _needs_kernels(name: str, rule: Rule) -> bool:
    """Whether an op of the public ``name`` may need a kernel to follow ``rule``, native autocast aside."""
    ships = _ships(name, rule)
    if rule is Rule.INPLACE_BANNED and ships:
        return False  # of one tensor, or promoted by torch (pow_); half is refused at the name that scripts call
    if rule is Rule.BANNED and name not in SHIPPED:
        return False  # of float32 arguments, where it is not refused
    if _torch.ATEN.get(name) == ():
        return rule is not Rule.UNCAST and not ships  # torch promotes by itself, or casts nothing
    return True


def python_function(name: str) -> tuple[object, Callable[..., object]] | None:
    """Find the function called ``name``, and what holds it."""
    for owner in OWNERS:
        function = getattr(owner, name, None)
        if callable(function):
            return owner, function
    return None
