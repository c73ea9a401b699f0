"""The hooks that a script has registered around optimizers' updates."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim import optimizer as module


class _Call:
    """A hook of amp's own before the steps of all optimizers."""

    def __init__(self, called: Callable[[Any], None]) -> None:
        self.called = called

    def __call__(self, optimizer: Any, args: object, kwargs: object) -> None:
        self.called(optimizer)


def call_before_steps(called: Callable[[Any], None], undo: ExitStack) -> None:
    """Call ``called(optimizer)`` before each step of any optimizer, until ``undo``."""
    undo.callback(module.register_optimizer_step_pre_hook(_Call(called)).remove)


def has_step_hooks(optimizer: Any) -> bool:
    """Whether a script's hook runs before or after the update in ``optimizer.step()``, of this optimizer or of all."""
    own = vars(optimizer)
    of_all = module._global_optimizer_pre_hooks
    return bool(
        own.get("_optimizer_step_pre_hooks")
        or own.get("_optimizer_step_post_hooks")
        or (of_all and not all(isinstance(hook, _Call) for hook in of_all.values()))
        or module._global_optimizer_post_hooks
    )


@contextmanager
def around_update(
    optimizer: Any, before: Callable[[], None], after: Callable[[], None], later: Callable[[], None]
) -> Iterator[None]:
    """Context for one ``step()``.

    Args:
        optimizer: Whose step.
        before: Is called when all pre-hooks have run.
        after: Is called before any post-hook; at the end, where no hook runs since torch has not hooked the class.
        later: Is called in the place of ``after`` for the step of a subclass whose base has a hooked step, too.
    """
    calls: list[Callable[[], None]] = []

    def run_before(*_: object) -> None:
        before()

    def run_after(*_: object) -> None:
        calls.append(later if calls else after)
        calls[-1]()

    own = vars(optimizer)
    pre_hooks: Any = own.setdefault("_optimizer_step_pre_hooks", OrderedDict())
    post_hooks: Any = own.setdefault("_optimizer_step_post_hooks", OrderedDict())
    key = object()
    pre_hooks[key] = run_before
    post_hooks[key] = run_after
    post_hooks.move_to_end(key, last=False)
    try:
        yield
    finally:
        del pre_hooks[key]
        del post_hooks[key]
    if not calls:
        after()
