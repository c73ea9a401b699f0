"""Register the op lists' casts on the dispatcher's autocast keys, where native autocast does not make them by itself.

A listed name stands for one or more aten overloads. An op made of other ops needs a kernel only where its own
arithmetic would run in the wrong dtype; one on the innermost op serves all ways in, ``torch.func.vmap`` included.
Functions that torch wrote in Python over other ops, which the dispatcher cannot see whole, have their bodies replaced.

A kernel runs only while autocast is on for its device type, and reads the half dtype from autocast when it is called:
users' own autocast regions, checkpoint recomputation and threads get what they ask for. Like native autocast, kernels
cast float16, bfloat16 and float32 tensors on their own device type and leave float64 and every other argument alone.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from enum import Enum
from types import FrameType
from typing import Any, Final

import torch

from ampcompat import __version__, _torch
from ampcompat._log import warn_once
from ampcompat._state import state
from ampcompat.amp import lists, refusals
from ampcompat.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from ampcompat.amp.properties import HALF_DTYPES as HALVES
from ampcompat.amp.refusals import OWNERS, public_name
from ampcompat.amp.trees import map_tree, tensors_in

CASTABLE: Final = (*HALVES, torch.float32)


class Rule(Enum):
    """Say what an op does with its floating-point arguments; float64 is left alone by each, as in torch.

    The last two refuse half where a script calls them by name (:mod:`ampcompat.amp.refusals`). Where torch calls the
    op, arguments of a banned one are cast to float32, those of an in-place one to the dtype of the left side.
    """

    HALF = "half"
    BFLOAT16 = "bfloat16"  # functions that users registered so, at every level
    FLOAT = "float32"
    PROMOTE = "widest argument"
    LEFT = "left side"
    UNCAST = "as given"
    BANNED = "half refused"
    INPLACE_BANNED = "half left side refused"


#: What follows for an op's in-place form.
_IN_PLACE: Final = {Rule.HALF: Rule.LEFT, Rule.FLOAT: Rule.INPLACE_BANNED}

Plan = dict[torch._ops.OpOverload, tuple[str, Rule]]


# -- From lists to names -----------------------------------------------------------------------------------------------
def _names(module: Any, list_name: str) -> set[str]:
    """Read the public names on a list; ``__rpow__`` is ``pow``."""
    pairs = list_name == "BANNED_FUNCS"
    names = set()
    for entry in getattr(module, list_name):
        name = entry[0] if pairs and isinstance(entry, tuple) and len(entry) == 2 else entry
        if not isinstance(name, str) or isinstance(entry, str) is pairs:
            raise TypeError(
                f"{module.__name__}.{list_name} holds {entry!r} - its entries are"
                f" {'pairs of a name and a message' if pairs else 'names of ops'} - take it out or write it so."
            )
        names.add(public_name(name))
    return names


#: Every list with its rule and the names it ships with. Where users add a name to several, the earliest wins: in apex
#: half cast last.
_READ: Final = tuple(
    (module, name, rule, frozenset(_names(module, name)))
    for name, rule in (
        *(("FP16_FUNCS", Rule.HALF), ("BFLOAT16_FUNCS", Rule.HALF)),
        *(("FP32_FUNCS", Rule.FLOAT), ("CASTS", Rule.PROMOTE)),
        *(("SEQUENCE_CASTS", Rule.PROMOTE), ("BANNED_FUNCS", Rule.BANNED), ("UNCAST", Rule.UNCAST)),
    )
    for module in (functional_overrides, torch_overrides, tensor_overrides, lists)
    if hasattr(module, name)
)
#: Rule by name before users edit the lists; none ships on lists of two rules.
SHIPPED: Final = {name: rule for *_, rule, names in _READ for name in sorted(names)}


def rules_by_name() -> dict[str, Rule]:
    """Read the rule of every name on the lists, users' edits first; raise a TypeError for an entry of a wrong kind."""
    added: dict[str, Rule] = {}
    removed: dict[str, Rule] = {}
    for module, list_name, rule, shipped in _READ:
        now = _names(module, list_name)
        removed.update(dict.fromkeys(sorted(shipped - now), Rule.UNCAST))
        for name in sorted(now - shipped):
            added.setdefault(name, rule)
            if name not in SHIPPED and not _torch.overloads_of(name) and _python_function(name) is None:
                warn_once(
                    f"no op {name}",
                    f"{module.__name__}.{list_name} holds {name!r}, which is no function of torch, torch.nn.functional"
                    " or torch.Tensor - it changes no cast - check its spelling.",
                )
    edits = {name: rule for name, rule in {**removed, **added}.items() if SHIPPED.get(name) is not rule}
    table = {**edits, **SHIPPED, **edits}  # edits first, in order and in value
    for name, rule in list(table.items()):
        # An added function may have one that is no method: F.silu(x, inplace=True) calls aten::silu_.
        in_aten = name in added and _torch.overloads_of(f"{name}_")
        if rule in _IN_PLACE and (in_aten or hasattr(torch.Tensor, f"{name}_")):
            table[f"{name}_"] = _IN_PLACE[rule]
    return table


# -- From names to ops -------------------------------------------------------------------------------------------------
#: Functions on the float list that the dispatcher cannot see whole: each would compute in half before or between the
#: listed ops inside, or add half gradients that nearly cancel (``normalize``). ``Tensor.cpu`` is no op.
PYTHON: Final = (
    *("cpu", "normalize", "local_response_norm", "interpolate", "gaussian_nll_loss", "multilabel_soft_margin_loss"),
    *("triplet_margin_with_distance_loss", "mse_loss", "l1_loss"),
)


def planned(device_type: str, key: str, table: dict[str, Rule] | None = None) -> Plan:
    """List the public name and rule of each overload that needs a kernel of ours on ``device_type``."""
    native = _torch.ops_with_kernel(key)
    plan: Plan = {op: (_torch.op_name(op), Rule.UNCAST) for op in _torch.out_forms_run_whole()}
    for name, rule in (rules_by_name() if table is None else table).items():
        ships = _ships(name, rule)
        if not _needs_kernels(name, rule, ships):
            continue
        # Native refuses binary_cross_entropy in every dtype (CUDA) or in none (CPU), and promotes grid_sample (CUDA).
        overrides = not ships or rule in (Rule.BANNED, Rule.UNCAST) or (name == "grid_sample" and device_type != "cpu")
        # Cast inside _cudnn_rnn, with cuDNN's flat weight buffer.
        cudnn = device_type == "cuda" and name in _torch.RECURRENT_LAYERS
        for op in _torch.overloads_of(name):
            if overrides or not (cudnn or _torch.op_name(op) in native):
                plan[op] = name, rule
    return plan


def _ships(name: str, rule: Rule) -> bool:
    """Whether ``name`` has ``rule`` where nobody has edited the lists, as the in-place form of a listed op too."""
    if name.endswith("_"):
        return _IN_PLACE.get(SHIPPED.get(name[:-1], Rule.UNCAST)) is rule
    return SHIPPED.get(name) is rule


def _needs_kernels(name: str, rule: Rule, ships: bool) -> bool:
    """Whether an op of the public ``name`` may need a kernel to follow ``rule``, native autocast aside."""
    if rule is Rule.INPLACE_BANNED and ships:
        return False  # of one tensor, or promoted by torch (pow_); half is refused at the name that scripts call
    if rule is Rule.BANNED and name not in SHIPPED:
        return False  # likewise: what is not refused is float32
    if _torch.ATEN.get(name) == ():
        return rule is not Rule.UNCAST and not ships  # torch promotes by itself, or casts nothing
    return True


# -- Kernels -----------------------------------------------------------------------------------------------------------
def make_kernel(op: torch._ops.OpOverload, name: str, rule: Rule, device_type: str, key: str) -> Callable[..., object]:
    """Make the kernel that applies ``rule`` to ``op`` at the autocast ``key`` of ``device_type``.

    It casts the positional arguments, and those alone: no listed op takes a tensor as a keyword-only argument.
    """
    if name in _torch.RECURRENT_CELLS and rule is Rule.HALF:
        return _cell_kernel(op, device_type)
    # These two refuse to widen what is float32 by now.
    softmax = _torch.op_name(op) in ("aten::_softmax", "aten::_log_softmax")
    call: Callable[..., object] = (
        (lambda x, dim, widen: op(x, dim, widen and x.dtype is not torch.float32)) if softmax else op
    )
    below, target = _torch.keys_excluded(key), _target(rule, device_type)

    def kernel(*args: object, **kwargs: object) -> object:
        # One loop and no helper: this is the price of every listed op.
        if target is not None:
            dtype = target(args)
        else:  # float32; as they are where the caller asks for a half result, as in native autocast
            dtype = None if kwargs and kwargs.get("dtype") in HALVES else torch.float32
        with below():
            if dtype is None:
                return call(*args, **kwargs)
            given = []
            for a in args:
                if isinstance(a, torch.Tensor):
                    now = a.dtype
                    if now is not dtype and now in CASTABLE and a.device.type == device_type:
                        a = _torch.cast_to(a, dtype)
                elif isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor):
                    a = _cast_list(a, dtype, device_type)
                given.append(a)
            return call(*given, **kwargs)

    return kernel


def _cast_list(tensors: Any, dtype: torch.dtype, device_type: str) -> list[Any]:
    return [t if t is None or t.dtype not in CASTABLE or t.device.type != device_type else t.to(dtype) for t in tensors]


def _cell_kernel(op: torch._ops.OpOverload, device_type: str) -> Callable[..., object]:
    """Cast input and states of a recurrent cell; its inner ``linear`` casts the weights, through autocast's cache."""
    inner = _torch.composite(op)

    def kernel(x: torch.Tensor, hidden: Any, *weights: object) -> object:
        dtype, several = torch.get_autocast_dtype(device_type), isinstance(hidden, (list, tuple))
        x, *states = _cast_list((x, *hidden) if several else (x, hidden), dtype, device_type)
        return inner(x, states if several else states[0], *weights)

    return kernel


def _target(rule: Rule, device_type: str) -> Callable[[tuple[object, ...]], torch.dtype | None] | None:
    """Make what chooses the dtype to cast arguments to (None: leave them) of these; float32 needs no choice."""

    def dtypes(args: tuple[object, ...]) -> set[torch.dtype]:
        # A loop of its own, which is faster than ``tensors_in``: a part of the price of every promoted op.
        found, pending = set(), list(args)
        for a in pending:
            if isinstance(a, torch.Tensor):
                if a.dtype in CASTABLE and a.device.type == device_type:
                    found.add(a.dtype)
            elif isinstance(a, (list, tuple)):
                pending.extend(a)
        return found

    def left(args: tuple[Any, ...]) -> torch.dtype | None:
        dtype: torch.dtype = args[0].dtype
        return dtype if dtype.is_floating_point else None

    choosers: dict[Rule, Callable[[tuple[object, ...]], torch.dtype | None]] = {
        Rule.HALF: lambda args: torch.get_autocast_dtype(device_type),
        Rule.PROMOTE: lambda args: torch.float32 if len(dtypes(args)) > 1 else None,  # as float16 and bfloat16 do
        Rule.UNCAST: lambda args: None,
        Rule.LEFT: left,
        Rule.INPLACE_BANNED: left,
    }
    return choosers.get(rule)


# -- Functions written in Python, and those of users -------------------------------------------------------------------
def make_wrapper(function: Any, rule: Rule, overrule: bool = False) -> Any:
    """Wrap ``function`` so that its floating tensors, nested ones too but not ``out``, are cast where casts are on.

    Ops inside still follow the lists; with ``overrule`` they do not. Takes any callable; returned is a plain function,
    so that it binds as a method.
    """
    fixed = {Rule.FLOAT: torch.float32, Rule.BFLOAT16: torch.bfloat16}.get(rule)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> object:
        device_types, out, widest = state.rules.plans, kwargs.get("out"), None
        casting: list[str] = []
        if not device_types:  # amp casts nothing in this process now
            return function(*args, **kwargs)
        if rule is Rule.PROMOTE:
            dtypes = [t.dtype for t in tensors_in((args, kwargs), objects=False) if t.is_floating_point()]
            widest = functools.reduce(torch.promote_types, dtypes) if dtypes else None

        def cast(t: torch.Tensor) -> torch.Tensor:
            now, on = t.dtype, t.device.type
            if not now.is_floating_point or on not in device_types or not torch.is_autocast_enabled(on):
                return t
            casting.append(on)
            if t is out or (now not in CASTABLE and widest is None):
                return t
            dtype = widest or fixed or torch.get_autocast_dtype(on)
            return t if now == dtype else _torch.cast_to(t, dtype)

        args, kwargs = map_tree(args, cast, objects=False), kwargs and map_tree(kwargs, cast, objects=False)
        if not casting or not overrule:
            return function(*args, **kwargs)
        with torch.autocast(casting[0], enabled=False):
            return function(*args, **kwargs)

    return wrapper


def wrap(target: Any, rule: Rule) -> tuple[str, Any]:
    """Wrap a function, or of a class, which keeps its identity, the method that stands for calling it.

    For a function of torch's own the user's word beats the list: ``register_float_function(torch, "matmul")``
    multiplies in float32. A static or class method stays one. Returns the method's name, "" for a function, too.
    """
    if isinstance(target, (staticmethod, classmethod)):
        return "", type(target)(wrap(target.__func__, rule)[1])
    module = str(getattr(target, "__module__", None) or "")
    if isinstance(target, type):
        if issubclass(target, torch.autograd.Function):
            return "apply", staticmethod(make_wrapper(target.apply, rule))
        name = "forward" if issubclass(target, torch.nn.Module) else "__call__"
        overrule = rule is Rule.FLOAT and module.split(".")[0] == "torch"
        return name, make_wrapper(getattr(target, name), rule, overrule)
    overrule = module in ("torch", "torch.functional", "torch.nn.functional", "torch._tensor")
    if inspect.isbuiltin(target) or inspect.ismethoddescriptor(target):
        # Methods of Tensor name a class, functions of torch.* a bound type object.
        owners = (getattr(target, "__objclass__", None), type(getattr(target, "__self__", None)))
        modules = (module, *(getattr(owner, "__module__", "") for owner in owners))
        overrule = any(name.split(".")[0] == "torch" for name in modules)
    return "", make_wrapper(target, rule, overrule)


def _python_function(name: str) -> tuple[object, Callable[..., object]] | None:
    """Find the function called ``name``, and what holds it."""
    for owner in OWNERS:
        function = getattr(owner, name, None)
        if callable(function):
            return owner, function
    return None


# -- Told to tools -----------------------------------------------------------------------------------------------------
def why_float32(frame: FrameType) -> str:
    """Say why the kernel or wrapper that runs in ``frame`` does not cast to half; "" where it does, or is none of ours.

    For tools that examine the stack of an op: :mod:`ampcompat.tools.report` names the reason of each float32 product.
    """
    code, values = frame.f_code, frame.f_locals
    if code.co_filename != make_kernel.__code__.co_filename:
        return ""
    if code.co_name == "kernel" and isinstance(values.get("call"), torch._ops.OpOverload):
        name = _torch.op_name(values["call"]).removeprefix("aten::")
        takes_widest = values["target"] is not None
        return f"{name} takes its widest input's dtype" if takes_widest else f"{name} is on the float list"
    if code.co_name == "wrapper":
        name = getattr(values["function"], "__name__", "a function")
        if values["rule"] is Rule.PROMOTE:
            return f"{name} takes its widest input's dtype"
        if values["rule"] is Rule.FLOAT:
            return f"{name} is registered as a float function"
    return ""


# -- In force ----------------------------------------------------------------------------------------------------------
def acquire(device_types: Iterable[str]) -> None:
    """Install the lists, as they are now, for ``device_types``; anew where lists were edited since.

    A device type that this torch cannot autocast is passed over. Nothing is installed if any registration fails, or if
    a list holds an entry of the wrong kind (TypeError).
    """
    rules, table = state.rules, rules_by_name()
    wanted, plans = [*rules.plans, *device_types], dict[str, Plan]()
    if rules.plans and table != rules.table:
        release()
    with ExitStack() as undo:
        for device_type in wanted:
            key = _torch.autocast_key(device_type)
            if key and device_type not in rules.plans and device_type not in plans:
                plan = plans[device_type] = planned(device_type, key, table)
                kernels = {op: make_kernel(op, *rule, device_type, key) for op, rule in plan.items()}
                _torch.register_kernels(kernels, key, undo)
        if not plans:
            return
        if not rules.plans:
            _torch.keep_torch_functions_traceable(undo)
            _wrap_functions(table, undo)
            state.undo_once(release)
        # torch compiles our casts into its graphs but does not know them: a graph from before the rules, or from a
        # plain process's cache, would ignore them, and ours would serve a plain program. Key its caches, in memory and
        # on disk, to the rules, and compile backward graphs without casts.
        named = [f"{name} {rule.value}" for name, rule in table.items()]
        digest = hashlib.sha256(repr(sorted([__version__, *rules.plans, *plans, *named])).encode()).hexdigest()[:16]
        undo.callback(_torch.forget_compiled_graphs)
        _torch.tag_compile_caches(f"ampcompat-{digest}", undo)
        _torch.compile_backward_without_autocast(undo)
        _torch.forget_compiled_graphs()
        rules.undo.push(undo.pop_all())
    rules.plans.update(plans)
    rules.table = table


def _wrap_functions(table: dict[str, Rule], undo: ExitStack) -> None:
    """Wrap what is no op of the dispatcher: functions written in Python, and names that refuse half."""
    messages = {public_name(name): message for name, message in functional_overrides.BANNED_FUNCS}
    in_float32 = functools.partial(make_wrapper, rule=Rule.FLOAT)
    refusals.refuse_in_place([name for name, rule in table.items() if rule is Rule.INPLACE_BANNED], undo)
    for name, rule in table.items():
        if rule is Rule.BANNED:
            refusals.ban(name, messages[name], in_float32, undo)
        elif rule in (Rule.HALF, Rule.FLOAT, Rule.PROMOTE):
            # Also functions that users added and no op stands for.
            added = SHIPPED.get(name) is not rule and not _torch.overloads_of(name)
            found = _python_function(name) if name in PYTHON or added else None
            if found is not None:
                _torch.wrap_everywhere(*found, functools.partial(make_wrapper, rule=rule), undo)


def wrap_registered() -> None:
    """Wrap everything registered, once, until ``state.casts.functions`` is closed; the registrations stay."""
    undo = state.casts.functions
    undo.close()
    _torch.keep_torch_functions_traceable(undo)
    for module, name, rule in state.functions.values():
        own = getattr(module, "__dict__", {}).get(name)  # a static method must not turn into a method
        target = own if isinstance(own, staticmethod) else getattr(module, name)
        method, wrapper = wrap(target, rule)
        _torch.replace(target if method else module, method or name, wrapper, undo)


def release() -> None:
    """Uninstall all rules. Idempotent."""
    state.rules.plans.clear()
    state.rules.undo.close()
