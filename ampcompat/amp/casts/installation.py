"""Install the rules: kernels on the dispatcher, wrappers around functions; and take them back."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from contextlib import ExitStack

from ampcompat import __version__, _torch
from ampcompat._state import state
from ampcompat.amp.casts import refusals
from ampcompat.amp.casts.contexts import cast_state
from ampcompat.amp.casts.kernels import make_kernel
from ampcompat.amp.casts.rules import (
    PYTHON,
    SHIPPED,
    Plan,
    Rule,
    op_rules,
    plan_for,
    public_name,
    python_function,
    rules_by_name,
)
from ampcompat.amp.casts.wrappers import make_wrapper, wrap
from ampcompat.amp.lists import functional_overrides


def install(device_types: Iterable[str]) -> None:
    """Install the lists, as they are now, for ``device_types``; anew where lists were edited since.

    A device type that this torch cannot autocast is skipped. Nothing is installed if any registration fails, or if
    a list holds an entry of the wrong kind (TypeError).
    """
    table = rules_by_name()
    wanted = dict.fromkeys([*op_rules.plans, *device_types])
    if op_rules.plans and table != op_rules.table:
        uninstall()
    missing = [device_type for device_type in wanted if device_type not in op_rules.plans]
    keys = {device_type: _torch.autocast_key(device_type) for device_type in missing}
    plans = {device_type: plan_for(device_type, key, table) for device_type, key in keys.items() if key}
    if not plans:
        return
    with ExitStack() as undo:
        for device_type, plan in plans.items():
            _register_kernels(device_type, plan, undo)
        if not op_rules.plans:
            _torch.keep_torch_functions_traceable(undo)
            _wrap_functions(table, undo)
            state.undo_once(uninstall)
        _separate_compiled_code([*op_rules.plans, *plans], table, undo)
        op_rules.undo.push(undo.pop_all())
    op_rules.plans.update(plans)
    op_rules.table = table


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
    """Wrap what is not an op of the dispatcher: functions written in Python, and names that refuse half."""
    messages = {public_name(name): message for name, message in functional_overrides.BANNED_FUNCS}
    in_float32 = functools.partial(make_wrapper, rule=Rule.FLOAT)
    refusals.refuse_in_place([name for name, rule in table.items() if rule is Rule.INPLACE_BANNED], undo)
    for name, rule in table.items():
        if rule is Rule.BANNED:
            refusals.ban(name, messages[name], in_float32, undo)
        elif rule in (Rule.HALF, Rule.FLOAT, Rule.PROMOTE) and _is_wrapped_in_python(name, rule):
            owner_and_function = python_function(name)
            if owner_and_function is not None:
                owner, function = owner_and_function
                _torch.wrap_everywhere(owner, function, functools.partial(make_wrapper, rule=rule), undo)


def _is_wrapped_in_python(name: str, rule: Rule) -> bool:
    """Whether ``name`` stands for a function whose body is replaced: one of ours, or a user's that is not an op."""
    if name in PYTHON:
        return True
    return SHIPPED.get(name) is not rule and not _torch.overloads_of(name)


def wrap_registered() -> None:
    """Wrap everything registered, once, until ``cast_state.undo_registered`` is closed; the registrations stay."""
    undo = cast_state.undo_registered
    undo.close()
    _torch.keep_torch_functions_traceable(undo)
    for module, name, rule in op_rules.registered.values():
        own = getattr(module, "__dict__", {}).get(name)  # a static method must not turn into a method
        target = own if isinstance(own, staticmethod) else getattr(module, name)
        method, wrapper = wrap(target, rule)
        if method:
            _torch.replace(target, method, wrapper, undo)
        else:
            _torch.replace(module, name, wrapper, undo)


def uninstall() -> None:
    """Uninstall all rules. Idempotent."""
    op_rules.plans.clear()
    op_rules.undo.close()
