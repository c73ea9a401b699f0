"""Other people's libraries that import apex themselves: renaming a script's own imports does not reach them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat.tools.check.source import Source

#: Classes that call apex, and the package that has each.
CLASSES = {"ApexScaler": "timm", "ApexOptimWrapper": "mmengine"}
#: Libraries that are told to use apex by one of these arguments: ``Trainer(amp_backend="apex")``.
TOLD = ("transformers", "pytorch_lightning", "lightning", "ignite", "torch_lr_finder")
BACKENDS = ("amp_backend", "amp_mode", "fp16_backend", "half_precision_backend")


def uses_of_apex(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Where a file has a library use apex: the class, by its package and name, or the argument."""
    names: list[tuple[ast.AST, str]] = []
    names += [(node, node.id) for node in source.kind(ast.Name)]
    names += [(node, node.attr) for node in source.kind(ast.Attribute)]
    names += [(alias, alias.name) for alias in source.kind(ast.alias)]
    for node, name in names:
        if name in CLASSES and source.imports(CLASSES[name]):
            yield node, f"{CLASSES[name]}.{name}"
    for call in source.calls:
        imported = source.full_name(call.func)
        if imported and imported.partition(".")[0] not in TOLD:  # a class of the repository, whose imports are renamed
            continue
        for keyword in call.keywords:
            if keyword.arg in BACKENDS and isinstance(keyword.value, ast.Constant) and keyword.value.value == "apex":
                yield keyword.value, keyword.arg
