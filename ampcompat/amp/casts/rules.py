"""Register the op lists' casts on the dispatcher's autocast keys, where native autocast does not make them by itself.

A listed name stands for one or more aten overloads. An op made of other ops needs a kernel only where its own
arithmetic would run in the wrong dtype; one on the innermost op serves all callers, ``torch.func.vmap`` included.
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
from types import FrameType, ModuleType
from typing import Any, Final, NamedTuple

import torch

from ampcompat import __version__, _torch
from ampcompat._log import warn_once
from ampcompat._state import state
from ampcompat.amp import lists
from ampcompat.amp.casts import refusals
from ampcompat.amp.casts.contexts import casts_off
from ampcompat.amp.casts.refusals import OWNERS, public_name
from ampcompat.amp.casts.trees import map_tree, tensors_in
from ampcompat.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from ampcompat.amp.properties import HALF_DTYPES

CASTABLE: Final = (*HALF_DTYPES, torch.float32)


class Rule(Enum):
    """Say what an op does with its floating-point arguments; float64 is left alone by each, as in torch.

    The last two refuse half where a script calls them by name (:mod:`ampcompat.amp.casts.refusals`). Where torch calls
    the op, arguments of a banned one are cast to float32, those of an in-place one to the dtype of the left side.
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
class OpList(NamedTuple):
    """One of the lists that users may edit, the rule of what is on it, and the names that it ships with."""

    module: ModuleType
    name: str
    rule: Rule
    shipped: frozenset[str]


#: The rule of each list, by the list's name. Where users add a name to several lists, the earliest wins: in apex half
#: cast last.
_RULES_OF_LISTS: Final = {
    "FP16_FUNCS": Rule.HALF,
    "BFLOAT16_FUNCS": Rule.HALF,
    "FP32_FUNCS": Rule.FLOAT,
    "CASTS": Rule.PROMOTE,
    "SEQUENCE_CASTS": Rule.PROMOTE,
    "BANNED_FUNCS": Rule.BANNED,
    "UNCAST": Rule.UNCAST,
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
    """The first item of a pair; None of anything else."""
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
        if rule in _IN_PLACE and _has_in_place_form(name, is_added=name in added):
            table[f"{name}_"] = _IN_PLACE[rule]
    return table


def _read_edits() -> tuple[dict[str, Rule], dict[str, Rule]]:
    """The rules of names that users have removed from lists (as given), and of those that they have added."""
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
    is_known = name in SHIPPED or _torch.overloads_of(name) or _python_function(name) is not None
    if not is_known:
        warn_once(
            f"no op {name}",
            f"{op_list.module.__name__}.{op_list.name} holds {name!r}, which is no function of torch,"
            " torch.nn.functional or torch.Tensor - it changes no cast - check its spelling.",
        )


def _has_in_place_form(name: str, is_added: bool) -> bool:
    """Whether scripts can call ``name`` in place; ``is_added``: users have put it on a list."""
    in_place = f"{name}_"
    if hasattr(torch.Tensor, in_place):
        return True
    # An added function may have one that is no method: F.silu(x, inplace=True) calls aten::silu_.
    return is_added and bool(_torch.overloads_of(in_place))


# -- From names to ops -------------------------------------------------------------------------------------------------
#: Functions on the float list that the dispatcher cannot see whole: each would compute in half before or between the
#: listed ops inside, or add half gradients that nearly cancel (``normalize``). ``Tensor.cpu`` is no op.
PYTHON: Final = (
    *("cpu", "normalize", "local_response_norm", "interpolate", "gaussian_nll_loss", "multilabel_soft_margin_loss"),
    *("triplet_margin_with_distance_loss", "mse_loss", "l1_loss"),
)


def planned(device_type: str, key: str, table: dict[str, Rule] | None = None) -> Plan:
    """List the public name and rule of each overload that needs one of our kernels on ``device_type``."""
    if table is None:
        table = rules_by_name()
    native = _torch.ops_with_kernel(key)
    plan: Plan = {op: (_torch.op_name(op), Rule.UNCAST) for op in _torch.out_forms_run_whole()}
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
    # Native refuses binary_cross_entropy in every dtype (CUDA) or in none (CPU), and promotes grid_sample (CUDA).
    if rule in (Rule.BANNED, Rule.UNCAST):
        return True
    return name == "grid_sample" and device_type != "cpu"


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
        return False  # likewise: what is not refused is float32
    if _torch.ATEN.get(name) == ():
        return rule is not Rule.UNCAST and not ships  # torch promotes by itself, or casts nothing
    return True


# -- Kernels -----------------------------------------------------------------------------------------------------------
Kernel = Callable[..., object]
#: Chooses the dtype that arguments are cast to; None leaves them as they are.
Chooser = Callable[[tuple[Any, ...]], torch.dtype | None]


def make_kernel(op: torch._ops.OpOverload, name: str, rule: Rule, device_type: str, key: str) -> Kernel:
    """Make the kernel that applies ``rule`` to ``op`` at the autocast ``key`` of ``device_type``.

    It casts the positional arguments, and those alone: no listed op takes a tensor as a keyword-only argument.
    """
    if name in _torch.RECURRENT_CELLS and rule is Rule.HALF:
        return _cell_kernel(op, device_type)
    call: Kernel = op
    if _torch.op_name(op) in ("aten::_softmax", "aten::_log_softmax"):
        call = _softmax_of_wide(op)
    below = _torch.keys_excluded(key)
    choose = _dtype_chooser(rule, device_type)

    def kernel(*args: object, **kwargs: object) -> object:
        # One loop and no helper: this is the cost of every listed op.
        dtype: torch.dtype | None
        if choose is not None:
            dtype = choose(args)
        elif kwargs and kwargs.get("dtype") in HALF_DTYPES:
            dtype = None  # the caller wants a half result: as in native autocast
        else:
            dtype = torch.float32
        with below():
            if dtype is None:
                return call(*args, **kwargs)
            cast_args = []
            for arg in args:
                if isinstance(arg, torch.Tensor):
                    arg_dtype = arg.dtype
                    if arg_dtype is not dtype and arg_dtype in CASTABLE and arg.device.type == device_type:
                        arg = _torch.cast_to(arg, dtype)
                elif isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], torch.Tensor):
                    arg = _cast_list(arg, dtype, device_type)
                cast_args.append(arg)
            return call(*cast_args, **kwargs)

    return kernel


def _softmax_of_wide(op: torch._ops.OpOverload) -> Kernel:
    """Make ``op`` not widen its result where the input was cast to float32 by now, which torch refuses."""

    def softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> object:
        return op(x, dim, half_to_float and x.dtype is not torch.float32)

    return softmax


def _cast_list(tensors: Any, dtype: torch.dtype, device_type: str) -> list[Any]:
    """Cast those of ``tensors`` (None among them) that are on ``device_type`` and can be cast."""
    cast = []
    for tensor in tensors:
        if tensor is not None and tensor.dtype in CASTABLE and tensor.device.type == device_type:
            tensor = tensor.to(dtype)
        cast.append(tensor)
    return cast


def _cell_kernel(op: torch._ops.OpOverload, device_type: str) -> Kernel:
    """Cast input and states of a recurrent cell; its inner ``linear`` casts the weights, through autocast's cache."""
    inner = _torch.composite(op)

    def kernel(x: torch.Tensor, hidden: Any, *weights: object) -> object:
        dtype = torch.get_autocast_dtype(device_type)
        if isinstance(hidden, (list, tuple)):  # an LSTM cell's
            x, *states = _cast_list((x, *hidden), dtype, device_type)
            return inner(x, states, *weights)
        x, hidden = _cast_list((x, hidden), dtype, device_type)
        return inner(x, hidden, *weights)

    return kernel


def _dtype_chooser(rule: Rule, device_type: str) -> Chooser | None:
    """Make what chooses, of positional arguments, the dtype to cast them to; None where that is always float32."""

    def half(args: tuple[Any, ...]) -> torch.dtype | None:
        return torch.get_autocast_dtype(device_type)

    def widest(args: tuple[Any, ...]) -> torch.dtype | None:
        # A loop of its own, which is faster than ``tensors_in``: a part of the cost of every promoted op.
        dtypes = set()
        pending = list(args)
        for arg in pending:  # the list grows while it is read
            if isinstance(arg, torch.Tensor):
                if arg.dtype in CASTABLE and arg.device.type == device_type:
                    dtypes.add(arg.dtype)
            elif isinstance(arg, (list, tuple)):
                pending.extend(arg)
        return torch.float32 if len(dtypes) > 1 else None  # of float16 and bfloat16, too

    def as_given(args: tuple[Any, ...]) -> torch.dtype | None:
        return None

    def left(args: tuple[Any, ...]) -> torch.dtype | None:
        dtype: torch.dtype = args[0].dtype
        return dtype if dtype.is_floating_point else None

    choosers: dict[Rule, Chooser] = {
        Rule.HALF: half,
        Rule.PROMOTE: widest,
        Rule.UNCAST: as_given,
        Rule.LEFT: left,
        Rule.INPLACE_BANNED: left,
    }
    return choosers.get(rule)


# -- Functions written in Python, and those of users -------------------------------------------------------------------
def make_wrapper(function: Any, rule: Rule, overrule: bool = False) -> Any:
    """Wrap ``function`` so that its floating tensors, nested ones too but not ``out``, are cast where casts are on.

    Takes any callable; returned is a plain function, so that it binds as a method.

    Args:
        function: What is wrapped.
        rule: HALF, BFLOAT16, FLOAT or PROMOTE.
        overrule: Whether ops inside are not cast. Else they still follow the lists.
    """
    fixed_dtype = {Rule.FLOAT: torch.float32, Rule.BFLOAT16: torch.bfloat16}.get(rule)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> object:
        device_types = state.rules.plans
        if not device_types:  # amp casts nothing in this process now
            return function(*args, **kwargs)
        widest = _widest_dtype(args, kwargs) if rule is Rule.PROMOTE else None
        out = kwargs.get("out")
        casting: list[str] = []  # the device types of tensors that casts apply to

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            own_dtype = tensor.dtype
            device_type = tensor.device.type
            if not own_dtype.is_floating_point or device_type not in device_types:
                return tensor
            if not torch.is_autocast_enabled(device_type):
                return tensor
            casting.append(device_type)
            if tensor is out or (own_dtype not in CASTABLE and widest is None):
                return tensor
            dtype = widest or fixed_dtype or torch.get_autocast_dtype(device_type)
            return tensor if own_dtype == dtype else _torch.cast_to(tensor, dtype)

        args = map_tree(args, cast, objects=False)
        if kwargs:
            kwargs = map_tree(kwargs, cast, objects=False)
        if casting and overrule:
            with casts_off(casting[0]):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapper


def _widest_dtype(args: Any, kwargs: Any) -> torch.dtype | None:
    """The dtype that holds all floating tensors among the arguments; None where there is none."""
    dtypes = [tensor.dtype for tensor in tensors_in((args, kwargs), objects=False) if tensor.is_floating_point()]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def wrap(target: Any, rule: Rule) -> tuple[str, Any]:
    """Wrap a function, or of a class, which keeps its identity, the method that stands for calling it.

    For a function of torch's own the registration overrules the list: ``register_float_function(torch, "matmul")``
    multiplies in float32. A static or class method stays one.

    Returns:
        The name of the method that is wrapped ("" for a function), and the wrapper.
    """
    if isinstance(target, (staticmethod, classmethod)):
        _, wrapper = wrap(target.__func__, rule)
        return "", type(target)(wrapper)
    if isinstance(target, type):
        return _wrap_class(target, rule)
    return "", make_wrapper(target, rule, overrule=_is_function_of_torch(target))


def _wrap_class(cls: Any, rule: Rule) -> tuple[str, Any]:
    """Wrap the method of ``cls`` that stands for calling it; returns its name, too."""
    if issubclass(cls, torch.autograd.Function):
        return "apply", staticmethod(make_wrapper(cls.apply, rule))
    name = "forward" if issubclass(cls, torch.nn.Module) else "__call__"
    overrule = rule is Rule.FLOAT and _is_in_torch(cls.__module__)
    return name, make_wrapper(getattr(cls, name), rule, overrule)


def _is_function_of_torch(function: Any) -> bool:
    """Whether ``function`` is one of the public ops of torch."""
    module = getattr(function, "__module__", None)
    if inspect.isbuiltin(function) or inspect.ismethoddescriptor(function):
        # Methods of Tensor name a class, functions of torch.* a bound type object.
        class_of_method = getattr(function, "__objclass__", None)
        class_of_self = type(getattr(function, "__self__", None))
        modules = [module, *(getattr(owner, "__module__", None) for owner in (class_of_method, class_of_self))]
        return any(_is_in_torch(name) for name in modules)
    return module in ("torch", "torch.functional", "torch.nn.functional", "torch._tensor")


def _is_in_torch(module: object) -> bool:
    """Whether the module of this name is torch, or inside it."""
    return isinstance(module, str) and module.partition(".")[0] == "torch"


def _python_function(name: str) -> tuple[object, Callable[..., object]] | None:
    """Find the function called ``name``, and what holds it."""
    for owner in OWNERS:
        function = getattr(owner, name, None)
        if callable(function):
            return owner, function
    return None


# -- For tools ---------------------------------------------------------------------------------------------------------
def why_float32(frame: FrameType) -> str:
    """Say why the kernel or wrapper that runs in ``frame`` does not cast to half; "" where it does, or is none of ours.

    For tools that examine the stack of an op: :mod:`ampcompat.tools.report` names the reason of each float32 product.
    A frame is all that such a tool has, so this reads what :func:`make_kernel` and :func:`make_wrapper` have made.
    """
    code = frame.f_code
    values = frame.f_locals
    if code.co_filename != make_kernel.__code__.co_filename:
        return ""
    if code.co_name == "kernel" and isinstance(values.get("call"), torch._ops.OpOverload):
        name = _torch.op_name(values["call"]).removeprefix("aten::")
        takes_widest = values["choose"] is not None
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

    A device type that this torch cannot autocast is skipped. Nothing is installed if any registration fails, or if
    a list holds an entry of the wrong kind (TypeError).
    """
    rules = state.rules
    table = rules_by_name()
    wanted = dict.fromkeys([*rules.plans, *device_types])
    if rules.plans and table != rules.table:
        release()
    keys = {device_type: _torch.autocast_key(device_type) for device_type in wanted if device_type not in rules.plans}
    plans = {device_type: planned(device_type, key, table) for device_type, key in keys.items() if key}
    if not plans:
        return
    with ExitStack() as undo:
        for device_type, plan in plans.items():
            _register_kernels(device_type, plan, undo)
        if not rules.plans:
            _torch.keep_torch_functions_traceable(undo)
            _wrap_functions(table, undo)
            state.undo_once(release)
        _separate_compiled_code([*rules.plans, *plans], table, undo)
        rules.undo.push(undo.pop_all())
    rules.plans.update(plans)
    rules.table = table


def _register_kernels(device_type: str, plan: Plan, undo: ExitStack) -> None:
    key = _torch.autocast_key(device_type) or ""
    kernels = {op: make_kernel(op, name, rule, device_type, key) for op, (name, rule) in plan.items()}
    _torch.register_kernels(kernels, key, undo)


def _separate_compiled_code(device_types: list[str], table: dict[str, Rule], undo: ExitStack) -> None:
    """Keep compiled code with the rules of ``table`` and code without them apart, in memory and on disk.

    torch compiles our casts into its graphs but does not know them: a graph from before the rules, or from a plain
    process's cache, would ignore them, and ours would serve a plain program. Backward graphs are compiled without
    casts.
    """
    named = [f"{name} {rule.value}" for name, rule in table.items()]
    digest = hashlib.sha256(repr(sorted([__version__, *device_types, *named])).encode()).hexdigest()
    undo.callback(_torch.forget_compiled_graphs)
    _torch.tag_compile_caches(f"ampcompat-{digest[:16]}", undo)
    _torch.compile_backward_without_autocast(undo)
    _torch.forget_compiled_graphs()


def _wrap_functions(table: dict[str, Rule], undo: ExitStack) -> None:
    """Wrap what is no op of the dispatcher: functions written in Python, and names that refuse half."""
    messages = {public_name(name): message for name, message in functional_overrides.BANNED_FUNCS}
    in_float32 = functools.partial(make_wrapper, rule=Rule.FLOAT)
    refusals.refuse_in_place([name for name, rule in table.items() if rule is Rule.INPLACE_BANNED], undo)
    for name, rule in table.items():
        if rule is Rule.BANNED:
            refusals.ban(name, messages[name], in_float32, undo)
        elif rule in (Rule.HALF, Rule.FLOAT, Rule.PROMOTE) and _is_wrapped_in_python(name, rule):
            owner_and_function = _python_function(name)
            if owner_and_function is not None:
                owner, function = owner_and_function
                _torch.wrap_everywhere(owner, function, functools.partial(make_wrapper, rule=rule), undo)


def _is_wrapped_in_python(name: str, rule: Rule) -> bool:
    """Whether ``name`` stands for a function whose body is replaced: one of ours, or a user's that is no op."""
    if name in PYTHON:
        return True
    return SHIPPED.get(name) is not rule and not _torch.overloads_of(name)


def wrap_registered() -> None:
    """Wrap everything registered, once, until ``state.casts.functions`` is closed; the registrations stay."""
    undo = state.casts.functions
    undo.close()
    _torch.keep_torch_functions_traceable(undo)
    for module, name, rule in state.functions.values():
        own = getattr(module, "__dict__", {}).get(name)  # a static method must not turn into a method
        target = own if isinstance(own, staticmethod) else getattr(module, name)
        method, wrapper = wrap(target, rule)
        if method:
            _torch.replace(target, method, wrapper, undo)
        else:
            _torch.replace(module, name, wrapper, undo)


def release() -> None:
    """Uninstall all rules. Idempotent."""
    state.rules.plans.clear()
    state.rules.undo.close()
