"""Code spread over modules: what other files of a tree do with the objects that a translated file put under amp.

Each file is translated alone. Afterwards the files that import a translated one, or that it imports, are read for
steps, forwards and gradients of its optimizers and models, and for names of apex that they took from it. What they do
there has no scaler and no autocast region, so it is marked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ampcompat.check.bindings import dotted
from ampcompat.check.source import Source, called, parse
from ampcompat.migrate.casts import Casts, in_autocast
from ampcompat.migrate.objects import FUNCTIONS, Label, Labels, Objects
from ampcompat.migrate.proof.mark import insert
from ampcompat.migrate.proof.protocol import Protocol
from ampcompat.migrate.proof.subject import Managed, Subject

STEP = "{}.step(): gradients of this optimizer are scaled in {}, so {} has to step it"
FORWARD = "{} runs outside torch.autocast, where apex cast it: put it under torch.autocast as in {}"
GRADIENTS = "gradients that {} scales may be scaled here: unscale_ them with its {} first, once"
NAME = "{} comes from {}, which imported it from apex: import it from apex here and migrate again, or replace its uses"
IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t][^\n(]*(?:\([^)]*\))?", re.MULTILINE)
# `args.model` is the name of a model.
OPTIONS = re.compile(r"(^|_)(arg|args|cfg|conf|config|option|options|hparams|hp|flags|params|parser|settings)$", re.I)
Root = tuple[ast.AST, str, Label]


@dataclass(frozen=True)
class Exposed:
    """Describe what other files can get hold of in a translated file; compares and pickles as plain values.

    Attributes:
        managed: The objects under amp; None where no call of amp was translated.
        names: Objects by the name that the module has for them.
        attributes: Objects by the name of the attribute that holds them.
        returned: Objects that functions give back, by place in a tuple.
        apex: Names that the module imported from apex and imports no more.
        covered: Functions of other modules that it calls under autocast alone.
    """

    managed: Managed | None = None
    names: Mapping[str, Labels] = field(default_factory=dict)
    attributes: Mapping[str, Labels] = field(default_factory=dict)
    returned: Mapping[str, tuple[Labels, ...]] = field(default_factory=dict)
    apex: frozenset[str] = frozenset()
    covered: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return self.managed is not None or bool(self.apex)

    @property
    def words(self) -> frozenset[str]:
        """List the names of which a text must use one to use any of it."""
        return frozenset({*self.names, *self.attributes, *self.returned, *self.apex})


def exposed(subject: Subject | None, before: Source, after: str) -> Exposed:
    """Describe what the translation of ``before`` into ``after`` leaves for other files to find."""
    imported = {name for name in before.bindings.names if "." not in name and not name.startswith("_")}
    nodes = subject.source.nodes if subject is not None else ast.walk(parse(after))
    kept = {alias.asname or alias.name.partition(".")[0] for node in nodes for alias in _names(node)}
    apex = frozenset(imported - kept)
    if subject is None:
        return Exposed(apex=apex)
    objects, source = subject.objects, subject.source
    places = {True: set[str](), False: set[str]()}
    for call in source.calls:
        places[in_autocast(source, call)].add(called(call))
    returned = {}
    for name, functions in objects.functions.items():
        values = [value for function in functions for value in objects.returns.get(function, ())]
        parts = [v.elts if isinstance(v, ast.Tuple) else [v] for v in values]
        if parts and len({len(p) for p in parts}) == 1:
            labels = tuple(frozenset().union(*map(objects.of, column)) for column in zip(*parts, strict=True))
            if any(labels):
                returned[name] = labels
    return Exposed(
        subject.managed,
        {path: labels for (owner, path), labels in objects.known.items() if owner is source.tree and "." not in path},
        dict(objects.attributes),
        returned,
        apex,
        frozenset(places[True] - places[False] - set(objects.functions) - {""}),
    )


def _names(node: ast.AST) -> Sequence[ast.alias]:
    return node.names if isinstance(node, ast.Import | ast.ImportFrom) else ()


def related(texts: Mapping[str, str], shown: Mapping[str, Exposed]) -> dict[str, set[str]]:
    """For each file of a tree the translated ones, of ``shown``, whose objects it may use.

    By the words of import statements: files that import it, directly or through others, and all that these import.

    Args:
        texts: The source of each file by its path with ``/``.
        shown: What translated files expose, by path.
    """
    words = {path: _words(" ".join(IMPORT.findall(text))) for path, text in texts.items()}
    by_stem: dict[str, list[str]] = {}
    for path in texts:
        by_stem.setdefault(_module(path)[-1], []).append(path)
    imports = {path: {other for word in found for other in by_stem.get(word, ())} for path, found in words.items()}
    importers: dict[str, set[str]] = {}
    for path, others in imports.items():
        for other in others:
            importers.setdefault(other, set()).add(path)
    found: dict[str, set[str]] = {}
    for root in shown:
        # Up to the scripts that run it, and from there down: a hook meets its trainer in a third file.
        for path in _reached(_reached({root}, importers), imports) - {root}:
            if not shown[root].words.isdisjoint(_words(texts[path])):
                found.setdefault(path, set()).add(root)
    return found


def _reached(start: set[str], edges: Mapping[str, set[str]]) -> set[str]:
    reached, new = set(start), set(start)
    while new:
        new = {other for path in new for other in edges.get(path, ())} - reached
        reached |= new
    return reached


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _module(path: str) -> tuple[str, ...]:
    """``a/b.py`` as ``("a", "b")``, a package as its folder."""
    parts = tuple(path.removesuffix(".py").split("/"))
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def _shown(path: str) -> str:
    """The end of a path, for a message."""
    parts = path.split("/")
    return "/".join(parts[-2:] if parts[-1] == "__init__.py" else parts[-1:])


def marked_uses(code: str, path: str, others: Mapping[str, Exposed]) -> str:
    """``code``, the text of the file ``path``, with a mark at each use of what ``others`` expose.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: The text cannot be parsed.
    """
    marks: list[tuple[int, str]] = []
    source = Source("", code)
    for module, one in others.items():
        marks += _apex_names(source, path, module, one)
        if one.managed is not None:
            marks += _objects(source, path, module, one, one.managed)
    return insert(code, marks)


def _imported(source: Source, path: str, module: str) -> Iterator[tuple[ast.stmt, str, str]]:
    """Names that a file has of ``module``: the statement, the name in the module (``*`` for all), the name here."""
    wanted = _module(module)
    folder = tuple(path.split("/")[:-1])
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom):
            parts = tuple((node.module or "").split(".")) if node.module else ()
            base = folder[: len(folder) - node.level + 1] if node.level else ()
            for alias in node.names:
                here = alias.asname or alias.name
                if _is(base + parts, wanted, node.level):
                    yield node, alias.name, here
                elif _is((*base, *parts, alias.name), wanted, node.level):
                    yield node, "", here
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is(tuple(alias.name.split(".")), wanted, 0):
                    yield node, "", alias.asname or alias.name


def _is(named: tuple[str, ...], wanted: tuple[str, ...], level: int) -> bool:
    """Whether a module is meant; which folder a script runs from is not known, so the end of the path decides."""
    return named == wanted if level else bool(named) and wanted[-len(named) :] == named


def _apex_names(source: Source, path: str, module: str, one: Exposed) -> Iterator[tuple[int, str]]:
    if not one.apex:
        return
    for statement, name, here in _imported(source, path, module):
        taken = [name] if name in one.apex else []
        if name == "*":
            taken = sorted({n.id for n in source.nodes if isinstance(n, ast.Name)} & one.apex)
        elif not name:
            used = {dotted(n) for n in source.nodes if isinstance(n, ast.Attribute)}
            taken = [found for found in sorted(one.apex) if f"{here}.{found}" in used]
        for found in taken:
            yield statement.lineno, NAME.format(found, _shown(module))


def _objects(source: Source, path: str, module: str, one: Exposed, managed: Managed) -> Iterator[tuple[int, str]]:
    shown = _shown(module)
    objects = Objects(source, list(_roots(source, path, module, one)), one.attributes)
    subject = Subject(source, managed, objects, Casts(source, objects, everywhere=False))
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and node.attr == "step" and isinstance(node.ctx, ast.Load):
            if objects.optimizers(node.value):
                yield node.lineno, STEP.format(ast.unparse(node.value), shown, managed.scaler)
        elif isinstance(node, ast.Call) and subject.casts.is_forward(node) and not in_autocast(source, node):
            function = source.scope(node)
            if not _is_option(node.func) and getattr(function, "name", "") not in one.covered:
                yield node.lineno, FORWARD.format(ast.unparse(node.func)[:60], shown)
    yield from _gradients(subject, shown)


def _is_option(func: ast.AST) -> bool:
    while isinstance(func, ast.Attribute):
        func = func.value
        if OPTIONS.search((dotted(func) or "").rpartition(".")[2]):
            return True
    return False


def _gradients(subject: Subject, module: str) -> Iterator[tuple[int, str]]:
    """Gradients that are read in functions, or at the top, where an object of the module is at hand."""
    source, objects = subject.source, subject.objects
    protocol = Protocol(subject)
    for node in source.nodes:
        if not isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Return | ast.AnnAssign):
            continue
        read = protocol.reads(node, set())
        if read is None:
            continue
        around = [node, *(a for a in source.ancestors(node) if isinstance(a, ast.For | ast.With))]
        headers = [a.iter if isinstance(a, ast.For) else a for a in around]
        if any(objects.of(inner) for part in headers for inner in ast.walk(part)):
            yield node.lineno, GRADIENTS.format(module, subject.managed.scaler)


def _roots(source: Source, path: str, module: str, one: Exposed) -> Iterator[Root]:
    tree = source.tree
    for _, name, here in _imported(source, path, module):
        for exposed_name, labels in one.names.items():
            if name in (exposed_name, "*", ""):
                known = here if name == exposed_name else exposed_name if name == "*" else f"{here}.{exposed_name}"
                yield from ((tree, known, label) for label in labels)
        for function, places in one.returned.items():
            if name in (function, "*", ""):
                known = here if name == function else function if name == "*" else f"{here}.{function}"
                yield from _results(source, known, places)
    yield from _inherited(source, one)


def _results(source: Source, function: str, places: Sequence[Labels]) -> Iterator[Root]:
    """List what is bound to the result of a function."""
    for node in source.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and dotted(node.value.func) == function:
            for target in node.targets:
                parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                for position, part in enumerate(parts):
                    every = frozenset[Label]().union(*places)
                    labels = places[position] if len(parts) == len(places) else every
                    if (found := dotted(part)) is not None:
                        yield from ((source.scope(node), found, label) for label in labels)


def _inherited(source: Source, one: Exposed) -> Iterator[Root]:
    """``self.opt`` of classes that never assign it: subclasses of those of the module, or their mixins."""
    for cls in (node for node in source.nodes if isinstance(node, ast.ClassDef)):
        methods = [node for node in cls.body if isinstance(node, FUNCTIONS)]
        inside = [n for n in ast.walk(cls) if isinstance(n, ast.Attribute)]
        stored = {dotted(n) for n in inside if isinstance(n.ctx, ast.Store)}
        for name, labels in one.attributes.items():
            if methods and f"self.{name}" not in stored:
                yield from ((methods[0], f"self.{name}", label) for label in labels)
