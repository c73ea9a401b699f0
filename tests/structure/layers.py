"""Say which module of ``ampcompat/amp`` may import which, and read which does.

:data:`LAYERS` is the one place that says it; ``test_layers.py`` checks the imports, and ``docs/architecture.py`` draws
them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]

#: Modules by layer, lowest first. A module imports modules of lower layers only.
LAYERS: Final[tuple[tuple[str, ...], ...]] = (
    ("_state", "_torch", "_types"),
    ("_log",),
    ("lists", "observers", "hints", "levels", "options"),
    ("_amp_state",),
    ("properties",),
    ("casts",),
    ("half",),
    ("scaling",),
    ("adapters", "misuse"),
    ("_process_optimizer", "session_casts"),
    ("_initialize", "arguments", "compat", "handle", "rnn_compat", "scaler", "utils"),
    ("session_objects", "opt", "__version__"),
    ("frontend",),
    ("amp",),
    ("__init__",),
)
#: Modules of packages in which each imports only those before it.
ORDER: Final[dict[str, tuple[str, ...]]] = {
    "casts": (
        *("trees", "rules", "refusals", "contexts", "kernels", "wrappers"),
        *("cpu_convolution", "installation", "registration", "ambience"),
    ),
    "half": (
        *("masters", "torch_events", "record", "saving", "casting"),
        *("devices", "forward", "model_class", "keep_fp32", "boundary", "unwrap"),
    ),
    "scaling": (
        *("loss_scale", "found_inf", "scaler", "session", "adapter"),
        *("leaves", "unscaling", "older_gradients", "optimizer_state"),
        *("groups", "block", "scale_loss", "backward_methods", "clearing", "steps", "closures", "optimizer"),
        "checkpoint",
    ),
}
#: Modules outside ``amp`` that every module of it may import.
SHARED: Final = frozenset(("_state", "_torch", "_types", "_log"))
#: Modules that hold names which legacy code imports, and little else.
LEGACY: Final = frozenset(
    (
        *("__version__", "_amp_state", "_initialize", "_process_optimizer", "compat", "handle"),
        *("opt", "rnn_compat", "scaler", "utils"),
    )
)
#: What the facade, ``amp/__init__.py``, may import from ``ampcompat.tools``, inside functions only.
FACADE_MAY_IMPORT: Final = frozenset(("explain", "report", "scale_log"))


class Import(NamedTuple):
    """One import of a module of ours by another, by full names.

    Attributes:
        source: The module that imports.
        target: The module that is imported.
        kind: "at import", "lazily" (in a function or under a condition), or "for types" (under ``TYPE_CHECKING``).
    """

    source: str
    target: str
    kind: str


def modules() -> dict[str, Path]:
    """Every module of ampcompat by its full name."""
    found = {}
    for path in sorted((ROOT / "ampcompat").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def _targets(node: ast.AST, source: str, known: dict[str, Path]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = source if known[source].name == "__init__.py" else source.rpartition(".")[0]
            base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])])
        full = [f"{base}.{alias.name}" for alias in node.names]
        return [name if name in known else base for name in full]
    if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func) and node.args:
        name = node.args[0]
        return [str(name.value)] if isinstance(name, ast.Constant) else []
    return []


def _imports_in(node: ast.AST, source: str, known: dict[str, Path], kind: str) -> Iterator[Import]:
    yield from (Import(source, to, kind) for to in _targets(node, source, known) if to in known and to != source)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for child in node.body:
            yield from _imports_in(child, source, known, "for types")
        for child in node.orelse:
            yield from _imports_in(child, source, known, kind)
        return
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.If)):
        kind = "lazily"
    for child in ast.iter_child_nodes(node):
        yield from _imports_in(child, source, known, kind)


def imports() -> list[Import]:
    """Every import between modules of ampcompat, of every kind."""
    known = modules()
    found: list[Import] = []
    for name, path in known.items():
        found += _imports_in(ast.parse(path.read_text(encoding="utf-8")), name, known, "at import")
    return found


def layered_name(module: str) -> str | None:
    """The name in :data:`LAYERS` that ``module`` belongs to; None where it is above them, or the package itself."""
    parts = module.split(".")
    if parts[1:2] == ["amp"]:
        return parts[2] if len(parts) > 2 else "__init__"
    return parts[1] if parts[1:2] and parts[1] in SHARED else None


def imports_by_module() -> dict[str, set[str]]:
    """What each module of :data:`LAYERS` imports of them, but for types."""
    found: dict[str, set[str]] = {name: set() for layer in LAYERS for name in layer}
    for one in imports():
        source, target = layered_name(one.source), layered_name(one.target)
        if source is not None and target is not None and source != target and one.kind != "for types":
            found.setdefault(source, set()).add(target)
    return found


def without_implied(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """``graph`` without the arrows that other arrows lead along already.

    Raises:
        graphlib.CycleError: Its arrows lead in a circle, which the error names.
    """
    TopologicalSorter(graph).prepare()

    def reach(name: str) -> set[str]:
        return graph[name].union(*map(reach, graph[name]))

    return {name: targets - set().union(*map(reach, targets)) for name, targets in graph.items()}
