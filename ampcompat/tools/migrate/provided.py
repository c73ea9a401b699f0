"""What ``native_amp.py`` has: its names, the arguments of its functions, the attributes of its objects.

It is read from the source, since torch may not be installed.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator

from ampcompat.tools.check.source import Source
from ampcompat.tools.migrate.copied import NAME, TEXT


@functools.cache
def _source() -> Source:
    return Source(f"{NAME}.py", TEXT)


def has(name: str) -> bool:
    """Whether ``native_amp`` has a name: one of its own, or ``__dict__`` and the like, which every module has."""
    return name in _names() or (name.startswith("__") and hasattr(sys.modules[__name__], name))


@functools.cache
def _names() -> frozenset[str]:
    names: set[str] = set()
    for node in _source().tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def takes(function: str, keyword: str) -> bool:
    """Whether a function of ``native_amp`` takes a keyword; True for what is no function of it."""
    for node in _source().tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            return node.args.kwarg is not None or any(argument.arg == keyword for argument in arguments)
    return True


@functools.cache
def attributes(owner: str) -> frozenset[str]:
    """The attributes of ``_amp_state``, ``opt_properties``, ``_amp_stash`` or ``LossScaler``."""
    return frozenset(_methods(owner)) | frozenset(_fields(owner))


def _fields(owner: str) -> Iterator[str]:
    """The keywords of the namespace that is assigned to ``owner``."""
    for node in _source().kind(ast.Assign):
        target, value = node.targets[0], node.value
        is_owner = isinstance(target, ast.Name | ast.Attribute) and ast.unparse(target).rpartition(".")[2] == owner
        if is_owner and isinstance(value, ast.Call):
            yield from (keyword.arg for keyword in value.keywords if keyword.arg)


def _methods(owner: str) -> Iterator[str]:
    """The methods of the class ``owner``, and what they assign to ``self``."""
    for cls in _source().kind(ast.ClassDef):
        if cls.name == owner:
            yield from (node.name for node in cls.body if isinstance(node, ast.FunctionDef))
            stored = (node for node in ast.walk(cls) if isinstance(node, ast.Attribute))
            yield from (node.attr for node in stored if isinstance(node.ctx, ast.Store))
