"""The symbols of apex that one file uses: in imports, by names, by probes, and what amp leaves on optimizers."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompat._extensions import EXTENSIONS, NOT_FOUND
from ampcompat.tools.check.bindings import apex_name, dotted
from ampcompat.tools.check.findings import DIFFERS, NOTE, UNSUPPORTED, WORKS, Finding
from ampcompat.tools.check.libraries import uses_of_apex
from ampcompat.tools.check.source import TRIES, Source, once
from ampcompat.tools.check.symbols import canonical, verdict

PROBES = ("find_spec", "import_module", "__import__", "version", "get_distribution")
#: The probes that raise for what they do not find.
IMPORTS = ("import_module", "__import__")
FAILS = "the import fails here, so that the script does as it does without apex"
MISSING = (
    "ampcompat has no such extension: the import raises ModuleNotFoundError; import it inside try, with a fallback"
)
FOUND = "the probe finds ampcompat, each use of it is refused"
OF_LIBRARY = (
    "the library imports apex itself: start the script with `ampcompat run`, or call ampcompat.install_as_apex() above"
    " the import of that library; imports that are renamed here do not reach it"
)


def symbols_of(source: Source) -> list[Finding]:
    """A finding for each symbol on each line."""
    found: list[Finding] = []
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [_symbol(source, node, name) for name in filter(None, map(apex_name, _imported(node)))]
        elif (symbol := _used(source, node)) is not None and not _is_of_native_amp(source, symbol):
            found.append(_symbol(source, node, symbol))
    found += [f for call in source.calls_named(*PROBES) if (f := _probe(source, call)) is not None]
    found += _missing_extensions(source)
    found += [source.finding(node, "symbol", name, DIFFERS, OF_LIBRARY) for node, name in uses_of_apex(source)]
    # Two mentions on one line (`amp.initialize(amp.x)`) stay two only when they name different symbols.
    return list({(f.line, f.name): f for f in found}.values())


def _is_of_native_amp(source: Source, symbol: str) -> bool:
    """Whether a symbol that counts as one of ``apex.amp`` is one of ``native_amp``."""
    return source.bindings.is_native and symbol.startswith("apex.amp.")


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The names that a statement imports, in full; of a star the module's."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.level > 0:
        return []
    return [node.module or "" if alias.name == "*" else f"{node.module}.{alias.name}" for alias in node.names]


def _used(source: Source, node: ast.AST) -> str | None:
    """The apex symbol that a node uses; of a chain of attributes the whole speaks."""
    if not isinstance(node, ast.Attribute | ast.Name) or not isinstance(node.ctx, ast.Load):
        return None
    if isinstance(source.parents.get(node), ast.Attribute):
        return None  # the longer chain speaks
    symbol = source.apex(node)
    # A bare module (`if amp is not None`, `amp` passed on) says nothing that its import did not.
    return None if symbol is None or (isinstance(node, ast.Name) and symbol.count(".") < 2) else symbol


def _symbol(source: Source, node: ast.AST, name: str) -> Finding:
    level, note = verdict(name)
    if level == UNSUPPORTED and _is_behind_try(source, node):
        fails = FAILS if _fails_on_import(name) else FOUND
        level, note = DIFFERS, f"imported inside try: {fails} ({note})"
    return source.finding(node, "symbol", canonical(name), level, note)


def _is_behind_try(source: Source, node: ast.AST) -> bool:
    """Whether ``node`` is an import in a ``try``, or uses a name that only such an import gives, which fails here."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return _guarded(source, node)
    return dotted(node).partition(".")[0] in _names_behind_try(source)


@once
def _names_behind_try(source: Source) -> set[str]:
    """The names of ``from`` imports that fail here, all of them in a ``try``: what its handlers give is used."""
    guarded: set[str] = set()
    others: set[str] = set()
    for node in source.kind(ast.ImportFrom):
        for alias, name in zip(node.names, _imported(node), strict=False):
            symbol = apex_name(name)
            is_given_by_handler = symbol is not None and _fails_on_import(symbol) and _guarded(source, node)
            (guarded if is_given_by_handler else others).add(alias.asname or alias.name)
    return guarded - others


def _fails_on_import(symbol: str) -> bool:
    """Whether importing a symbol raises ImportError; packages right below apex can be imported, and are empty."""
    return verdict(symbol).verdict == UNSUPPORTED and symbol.count(".") > 1


def _guarded(source: Source, node: ast.AST) -> bool:
    """Whether a statement stands in the body of a ``try`` with handlers."""
    for child, parent in source.around(node):
        if isinstance(parent, TRIES) and source.field(child) == "body" and getattr(parent, "handlers", []):
            return True
    return False


def _probe(source: Source, call: ast.Call) -> Finding | None:
    first = call.args[0] if call.args else None
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
        return None
    if first.value.partition(".")[0] not in ("apex", *EXTENSIONS):
        return None
    level, note = verdict(first.value)
    note = note or "asked for by name: answered under `ampcompat run` or install_as_apex()"
    return source.finding(call, "symbol", canonical(first.value), NOTE if level == WORKS else level, note)


def _missing_extensions(source: Source) -> Iterator[Finding]:
    """Imports, also by name, of what apex compiled and ampcompat does not have."""
    named: list[tuple[ast.AST, object]] = []
    named += [(node, alias.name) for node in source.kind(ast.Import) for alias in node.names]
    for call in source.calls_named(*IMPORTS):
        if call.args and isinstance(call.args[0], ast.Constant):
            named.append((call, call.args[0].value))
    for node, name in named:
        if name not in NOT_FOUND:
            continue
        if _guarded(source, node):
            yield source.finding(node, "symbol", str(name), DIFFERS, f"imported inside try: {FAILS}")
        else:
            yield source.finding(node, "symbol", str(name), UNSUPPORTED, MISSING)
