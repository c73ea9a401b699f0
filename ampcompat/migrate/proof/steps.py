"""Every step of an optimizer goes through its scaler, and nothing else that could step one gets hold of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampcompat.check.bindings import dotted
from ampcompat.check.source import called, text
from ampcompat.migrate.objects import FUNCTIONS, handed_over
from ampcompat.migrate.proof.subject import Subject

Failure = tuple[int, str]
# What has a step() and is no optimizer, by its name or by that of its class.
OTHERS = re.compile(
    r"sched|warm_?up|^lr|lr$|_lr|decay|anneal|prof|\benv|env$|envs$|bar$|progress|timer|meter|swa|ema|stopp|sim$", re.I
)
#: Functions that get an optimizer and are known not to step it, by what their names say.
TRUSTED = re.compile(
    r"sched|lr|warm|anneal|decay|check_?point|load|save|resume|restore|state|print|log|info|report|summary|watch"
    r"|^(len|isinstance|issubclass|type|id|repr|str|list|tuple|zip|enumerate|iter|sorted|next|hasattr|vars|dir|dict|set)$"
    r"|^(append|add|extend|insert|update|setdefault|register|broadcast\w*|unscale_|Namespace|deepcopy|copy|super)$",
    re.I,
)
#: Attributes of an optimizer that leave its parameters alone.
PLAIN = frozenset(
    {"zero_grad", "param_groups", "state_dict", "load_state_dict", "state", "defaults", "add_param_group"}
    | {"__class__", "train", "eval", "register_step_post_hook", "get_lr", "lr", "optimizer", "optim"}
    | {"_step_count", "__setstate__", "__name__", "share_memory", "cur_lr"}
)
RAW = "{} is not stepped through its scaler: gradients are scaled here, call {}.step({})"
UNSURE = "{}.step(): if this is an optimizer of amp, step it with {}.step(...) and update() once after"
HANDED = "{} is handed to {}: if that steps it, or reads gradients, it must do so through {}"


def stray_steps(subject: Subject) -> Iterator[Failure]:
    """Steps that are not the scaler's, and uses of an optimizer that may hide one."""
    objects, scaler = subject.objects, subject.managed.scaler
    for node in subject.source.nodes:
        if isinstance(node, ast.Attribute) and node.attr == "step" and isinstance(node.ctx, ast.Load):
            yield from _step(subject, node)
        elif isinstance(node, ast.Call):
            if getattr(node.func, "id", called(node)) in ("getattr", "methodcaller", "attrgetter"):
                yield from _by_name(subject, node)
            yield from _handed(subject, node)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr not in PLAIN:
            known = objects.optimizers(node.value) and not objects.optimizers(node) and dotted(node.value)
            call = subject.source.parents.get(node)
            plain = _is_container_method(node) or objects.models(node.value)
            method = isinstance(call, ast.Call) and call.func is node and not objects.called(call)
            if known and method and not plain:
                yield node.lineno, UNSURE.format(text(node.value), scaler).replace(".step():", f".{node.attr}():")
    yield from _unreached(subject)


def _is_container_method(node: ast.Attribute) -> bool:
    return node.attr in (
        "append",
        "extend",
        "insert",
        "items",
        "values",
        "keys",
        "get",
        "pop",
        "update",
        "setdefault",
        "index",
    )


def _step(subject: Subject, node: ast.Attribute) -> Iterator[Failure]:
    objects, scaler = subject.objects, subject.managed.scaler
    call = subject.source.parents.get(node)
    is_call = isinstance(call, ast.Call) and call.func is node
    if subject.is_scaler(node.value):
        given = [*call.args, *(k.value for k in call.keywords)] if isinstance(call, ast.Call) and is_call else []
        if len(given) != 1:
            yield node.lineno, f"{scaler}.step takes one optimizer and no closure"
        elif not objects.optimizers(given[0]):
            yield node.lineno, f"{ast.unparse(given[0])} is not shown to be an optimizer that amp.initialize got"
        return
    name = ast.unparse(node.value)
    if objects.optimizers(node.value):
        yield node.lineno, RAW.format(name, scaler, name)
    elif not _harmless(subject, node.value):
        yield node.lineno, UNSURE.format(name, scaler)


def _harmless(subject: Subject, receiver: ast.AST, depth: int = 0) -> bool:
    """Whether what steps is shown to be no optimizer of amp."""
    objects = subject.objects
    if isinstance(receiver, ast.Call):
        return OTHERS.search(called(receiver)) is not None
    while isinstance(receiver, ast.Subscript):
        receiver = receiver.value
    path = dotted(receiver)
    if path is None:
        return False
    if OTHERS.search(path.rpartition(".")[2]) or path in ("self", "super"):
        return True
    scope = objects.scope(receiver)
    owner = objects._owner(scope, path)
    values = [
        value
        for _, target, value in objects.assignments
        if dotted(target) == path and objects._owner(objects.scope(target), path) is owner
    ]
    # Made here from what amp does not manage: another optimizer, an environment.
    if values:
        calls = [value for value in values if isinstance(value, ast.Call)]
        return len(calls) == len(values) and all(
            OTHERS.search(called(call)) or not _takes_managed(subject, call) for call in calls
        )
    if isinstance(owner, FUNCTIONS) and depth < 3:
        given = [
            argument
            for call in subject.source.calls
            if owner in objects.called(call)
            for name, argument in objects.bound(call, owner)
            if name == path
        ]
        return bool(given) and all(not objects.optimizers(g) and _harmless(subject, g, depth + 1) for g in given)
    return False


def _takes_managed(subject: Subject, call: ast.Call) -> bool:
    given = [*call.args, *(k.value for k in call.keywords)]
    return bool(subject.objects.of(call)) or any(subject.objects.optimizers(g) for g in given)


def _by_name(subject: Subject, node: ast.Call) -> Iterator[Failure]:
    strings = [a.value for a in node.args if isinstance(a, ast.Constant)]
    if "step" in strings:
        yield node.lineno, UNSURE.format(ast.unparse(node), subject.managed.scaler).replace(".step():", ":")
    elif len(node.args) > 1 and not strings and subject.objects.optimizers(node.args[0]):
        yield node.lineno, HANDED.format(text(node.args[0]) or "an optimizer", "getattr", subject.managed.scaler)


def _handed(subject: Subject, node: ast.Call) -> Iterator[Failure]:
    """An optimizer that goes where this file cannot follow it."""
    objects = subject.objects
    name = called(node)
    if subject.is_scaler(getattr(node.func, "value", node)) or objects.called(node) or TRUSTED.search(name):
        return
    if name in objects.classes:
        return
    path = dotted(node.func) or name
    if "lr_scheduler" in path:
        return
    for given in handed_over(node):
        labels = objects.optimizers(given)
        if labels and not objects.optimizers(node):
            names = ", ".join(subject.managed.optimizers[label.index] for label in sorted(labels))
            yield node.lineno, HANDED.format(names, name or ast.unparse(node.func), subject.managed.scaler)
            return


def _unreached(subject: Subject) -> Iterator[Failure]:
    """Optimizers whose loss is scaled and that no scaler steps."""
    managed = subject.managed
    stepped = {
        label
        for call in subject.source.calls
        if subject.on_scaler(call, "step") and call.args
        for label in subject.objects.optimizers(call.args[0])
    }
    scales = [call for call in subject.source.calls if subject.on_scaler(call, "scale")]
    scales.sort(key=lambda call: (call.lineno, call.col_offset))
    for position, call in enumerate(scales):
        wanted = managed.scaled[position] if len(scales) == len(managed.scaled) else frozenset()
        for label in sorted(wanted - stepped):
            name = managed.optimizers[label.index]
            yield call.lineno, f"no {managed.scaler}.step({name}) in this file: the gradients of this loss stay scaled"
