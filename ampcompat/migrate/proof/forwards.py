"""Every forward that ran under apex's casts is inside an autocast region."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ampcompat.check.source import called
from ampcompat.migrate.casts import in_autocast
from ampcompat.migrate.objects import handed_over
from ampcompat.migrate.proof.subject import Subject

#: Functions that get a model and run none of it, by what their names say.
TRUSTED = re.compile(
    r"ddp|parallel|init|load|save|check_?point|restore|resume|ema|averaged|summary|count|param|print|log|freeze|convert"
    r"|wrap|compile|watch|optim|sched|broadcast|apply|prune|copy|sync|unwrap|device|norm|set_|hook|state|graph"
    r"|^(len|isinstance|issubclass|type|id|repr|str|list|tuple|zip|enumerate|iter|next|getattr|setattr|hasattr|vars|dir)$"
    r"|^(append|add|extend|insert|update|setdefault|register|super|deepcopy|to|cuda|dict|set|sorted|Namespace|add_module)$",
    re.I,
)
#: Functions that use a generator up before they return.
CONSUMERS = frozenset({"sum", "list", "tuple", "max", "min", "any", "all", "sorted", "set", "dict", "join", "extend"})
OUTSIDE = "{} runs outside torch.autocast, where apex cast it: put it under torch.autocast"
HANDED = "{} is handed to {}: what that runs of it belongs under torch.autocast"


def unwrapped(subject: Subject) -> Iterator[tuple[int, str]]:
    """Forwards, and what is computed from them, outside any region; models that leave the file."""
    source, casts = subject.source, subject.casts
    covered = _covered_functions(subject)
    for part, found in casts.needs.items():
        inside = in_autocast(source, found) or (found in casts.forwards and source.scope(found) in covered)
        if not inside and source.scope(part) not in covered:
            shown = ast.unparse(found.func) if isinstance(found, ast.Call) else ast.unparse(found)
            yield getattr(found, "lineno", part.lineno), OUTSIDE.format(shown[:60])
    for call in source.calls:
        if casts.is_forward(call) and isinstance(source.scope(call), ast.Lambda):
            yield call.lineno, OUTSIDE.format(ast.unparse(call.func)[:60])
        if casts.is_forward(call) and _is_put_off(subject, call):
            yield call.lineno, OUTSIDE.format(f"{ast.unparse(call.func)[:50]} in a generator")
        yield from _handed(subject, call)


def _is_put_off(subject: Subject, call: ast.Call) -> bool:
    """Whether a forward is in a generator expression that is not used up where it is written."""
    above: ast.AST = call
    for parent in subject.source.ancestors(call):
        if isinstance(above, ast.GeneratorExp):
            return not (isinstance(parent, ast.Call) and getattr(parent.func, "id", called(parent)) in CONSUMERS)
        if isinstance(parent, ast.stmt):
            return False
        above = parent
    return False


def _covered_functions(subject: Subject) -> set[ast.AST]:
    """Functions of the file that are only called inside autocast."""
    source, objects = subject.source, subject.objects
    calls: dict[ast.AST, list[ast.Call]] = {}
    for call in source.calls:
        for function in objects.called(call):
            calls.setdefault(function, []).append(call)
    covered: set[ast.AST] = set()
    for _ in range(3):
        for entered, made in calls.items():
            if all(in_autocast(source, call) or source.scope(call) in covered for call in made):
                covered.add(entered)
    # `model.forward` of a class of the file runs where the model is called.
    covered |= set(objects.methods.get("forward", []))
    return covered


def _handed(subject: Subject, call: ast.Call) -> Iterator[tuple[int, str]]:
    objects = subject.objects
    name = called(call)
    if objects.called(call) or name in objects.classes or TRUSTED.search(name) or subject.casts.is_forward(call):
        return
    for given in handed_over(call):
        labels = objects.models(given)
        if labels and not objects.models(call) and not in_autocast(subject.source, call):
            names = ", ".join(subject.managed.models[label.index] for label in sorted(labels))
            yield call.lineno, HANDED.format(names, name or ast.unparse(call.func)[:40])
            return
