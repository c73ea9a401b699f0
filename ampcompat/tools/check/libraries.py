"""Other people's libraries that import apex themselves: renaming a script's own imports does not reach them."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator

from ampcompat.tools.check.source import Source

#: Classes that call apex, and the package that has each.
CLASSES = {"ApexScaler": "timm", "ApexOptimWrapper": "mmengine"}
#: Arguments by which transformers, Lightning and ignite are told to use apex: ``Trainer(amp_backend="apex")``.
BACKENDS = ("amp_backend", "amp_mode", "fp16_backend", "half_precision_backend")


def uses_of_apex(source: Source, own: Container[str] = ()) -> Iterator[tuple[ast.AST, str]]:
    """Where a file has a library use apex: the class, by its package and name, or the argument.

    Args:
        source: The parsed source.
        own: The names of modules that are no library's, as their imports are rewritten too.
    """
    names: list[tuple[ast.AST, str]] = []
    names += [(node, node.id) for node in source.kind(ast.Name)]
    names += [(node, node.attr) for node in source.kind(ast.Attribute)]
    names += [(alias, alias.name) for alias in source.kind(ast.alias)]
    for node, name in names:
        if name in CLASSES and source.imports(CLASSES[name]):
            yield node, f"{CLASSES[name]}.{name}"
    for call in source.calls:
        if source.full_name(call.func).partition(".")[0] in own:
            continue
        for keyword in call.keywords:
            if keyword.arg in BACKENDS and isinstance(keyword.value, ast.Constant) and keyword.value.value == "apex":
                yield keyword.value, keyword.arg
