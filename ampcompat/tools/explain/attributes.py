"""Put back what the modules of a model hold, after a forward that was run again: counters, lists, tensors."""

from __future__ import annotations

import contextlib
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import torch

_DICTS = (dict, OrderedDict)
_CONTAINERS = (*_DICTS, list, set, deque)
#: Objects whose attributes are not looked into: what is theirs is not the model's, or never changes.
_OTHERS = (torch.nn.Module, torch.Tensor, type, types.FunctionType, types.MethodType, types.ModuleType)


@contextlib.contextmanager
def attributes_put_back(model: torch.nn.Module) -> Iterator[None]:
    """Inside, a forward of ``model`` may write what its modules hold; afterwards they hold what they held, bitwise.

    These are attributes of every kind, the contents of lists and the like, and attributes of objects that a module
    holds. Tensors that a module holds as attributes are copies inside.
    """
    held = _Held()
    for module in model.modules():
        held.keep(vars(module), with_objects=True)
    copies: dict[int, torch.Tensor] = {}
    try:
        for module in model.modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and not value.requires_grad:
                    copies.setdefault(id(value), value.clone())
                    vars(module)[name] = copies[id(value)]
        yield
    finally:
        held.put_back()


class _Held:
    """What containers held when they were seen."""

    def __init__(self) -> None:
        self._contents: dict[int, tuple[Any, Any]] = {}  # by id: a container, and a copy of it

    def keep(self, container: Any, with_objects: bool = False) -> None:
        """Keep what ``container`` holds, and what the containers in it hold; of objects in it only on demand."""
        if id(container) in self._contents:
            return
        self._contents[id(container)] = container, container.copy()
        for value in [*container.values()] if isinstance(container, _DICTS) else [*container]:
            if type(value) in _CONTAINERS:
                self.keep(value, with_objects)
            elif with_objects and hasattr(value, "__dict__") and not isinstance(value, _OTHERS):
                self.keep(vars(value))

    def put_back(self) -> None:
        """Put back what is not as it was."""
        for container, before in self._contents.values():
            is_dict = isinstance(container, _DICTS)
            now, then = ([*one.items()] if is_dict else [*one] for one in (container, before))
            is_same = len(now) == len(then) and all(_is_same(*pair) for pair in zip(now, then, strict=True))
            if is_same:
                continue
            container.clear()
            if isinstance(container, (list, deque)):
                container.extend(before)
            else:
                container.update(before)


def _is_same(now: Any, then: Any) -> bool:
    if isinstance(now, tuple) and isinstance(then, tuple) and len(now) == len(then) == 2:
        return now[0] is then[0] and now[1] is then[1]
    return now is then
