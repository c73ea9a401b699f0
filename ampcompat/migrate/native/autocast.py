"""Wrap what ran under apex's casts in ``torch.autocast``: forward passes, what follows from them, evaluation too."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from ampcompat.check.lines import indent_of
from ampcompat.check.source import Source, called
from ampcompat.migrate.casts import MOVES, blocks, in_autocast, is_autocast, is_barrier, within
from ampcompat.migrate.marks import marked
from ampcompat.migrate.native.aside import indented
from ampcompat.migrate.native.facts import Facts
from ampcompat.migrate.objects import FUNCTIONS
from ampcompat.migrate.result import MARK

OUT_OF_SIGHT = "the forward pass is not in this function; run it under torch.autocast"


def rebuilt(facts: Facts, made: Plan) -> str:
    """The text of ``facts`` with its regions, built by libcst: for strings over several lines."""
    wrapper = MetadataWrapper(cst.parse_module(facts.source.code), unsafe_skip_copy=True)
    return wrapper.module.visit(_Wrap(facts, made, wrapper.resolve(PositionProvider))).code


def has_long_string(source: Source, made: Plan) -> bool:
    """Whether a string goes over several lines of a region: indenting them would change it."""
    strings: list[ast.expr] = [node for node in source.kind(ast.Constant) if isinstance(node.value, str | bytes)]
    long = [node.lineno for node in (*strings, *source.kind(ast.JoinedStr)) if node.lineno != node.end_lineno]
    return any(start <= line <= end for line in long for start, (_, end) in made.regions.items())


def wrapped(facts: Facts, made: Plan, lines: Sequence[str]) -> str:
    """The text with the ``lines`` of each region indented under a ``with``: much cheaper than to build it anew."""
    lines = list(lines)
    newline = "\r\n" if lines[0].endswith("\r\n") else "\n"
    marks = dict.fromkeys(made.marks, f"{MARK}{OUT_OF_SIGHT}")
    for start in sorted({*made.regions, *marks}, reverse=True):
        indent = indent_of(lines[start - 1])
        if start in marks:
            above = made.marks[start]
            if marks[start] not in (lines[above - 2] if above > 1 else ""):
                lines.insert(above - 1, f"{indent}{marks[start]}{newline}")
            continue
        unit = "\t" if indent.startswith("\t") else "    "
        end = made.regions[start][1]
        body = indented(lines[start - 1 : end], unit)
        lines[start - 1 : end] = [f"{indent}with {facts.autocast()}:{newline}", *body]
    return "".join(lines)


class Plan:
    """Decide where regions begin and end.

    Attributes:
        regions: For the first line of each region the first line of its last statement, and the last line of that.
        edges: The first and the last statement of each region.
        marks: Functions whose loss was computed elsewhere: their line, and that of their first decorator.
    """

    def __init__(self) -> None:
        self.regions: dict[int, tuple[int, int]] = {}
        self.edges: set[ast.AST] = set()
        self.marks: dict[int, int] = {}


def plan(facts: Facts) -> Plan:
    """The regions of a file."""
    source, casts = facts.source, facts.casts
    made = Plan()
    needs: set[ast.AST] = {part for part in casts.needs if not in_autocast(source, part) and not is_autocast(part)}
    for call in source.calls_to("apex.amp.scale_loss", "apex.amp.handle.scale_loss"):
        _chain(facts, call, needs, made)
    for scope in (source.tree, *(n for n in source.nodes if isinstance(n, FUNCTIONS))):
        _block(scope.body, needs, casts.arithmetic, made)
    return made


def _chain(facts: Facts, call: ast.Call, needs: set[ast.AST], made: Plan) -> None:
    """Add what computes the loss of a block where no model was seen to: a helper of another file, a criterion."""
    source, casts = facts.source, facts.casts
    scope = source.scope(call)
    loss = call.args[0]
    if casts._tensor(loss, scope) or _computes(loss):
        return
    needed = _names(loss)
    found = False
    body = sorted((n for n in source.nodes if isinstance(n, ast.stmt) and source.scope(n) is scope), key=_line)
    first = facts.call.lineno if source.scope(facts.call) is scope else 0
    for part in reversed([n for n in body if first < n.lineno < call.lineno]):
        targets = {name for t in _targets(part) for name in _names(t)}
        if targets & needed and isinstance(part, ast.Assign | ast.AugAssign | ast.AnnAssign):
            value = part.value
            found |= value is not None and _computes(value)
            if value is not None and (_computes(value) or isinstance(value, ast.BinOp)):
                needs.add(part)
            needed |= _names(value) if value is not None else set()
    given = isinstance(scope, FUNCTIONS) and needed & facts.objects.locals.get(scope, set())
    if not found and isinstance(scope, FUNCTIONS):
        callers = [c for c in source.calls if scope in facts.objects.called(c)]
        seen = [g for c in callers for name, g in facts.objects.bound(c, scope) if given and name in given]
        if not seen or not any(casts._tensor(g, facts.objects.scope(g)) or _computes(g) for g in seen):
            made.marks[scope.lineno] = min([scope.lineno, *(d.lineno for d in scope.decorator_list)])


def _line(node: ast.stmt) -> int:
    return node.lineno


def _targets(part: ast.AST) -> list[ast.expr]:
    if isinstance(part, ast.Assign):
        return part.targets
    return [part.target] if isinstance(part, ast.AugAssign | ast.AnnAssign) else []


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in within(node) if isinstance(n, ast.Name)} | {
        ast.unparse(n) for n in within(node) if isinstance(n, ast.Attribute)
    } - {"self"}


def _computes(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Call) and called(n) not in MOVES for n in within(node))


def _block(body: Sequence[ast.stmt], needs: set[ast.AST], soft: set[ast.AST], made: Plan) -> None:
    """Plan one list of statements, then what its regions do not hold."""
    at = 0
    while at < len(body):
        part = body[at]
        if not _wanted(part, needs) or is_barrier(part) or isinstance(part, (*FUNCTIONS, ast.ClassDef)):
            if not is_autocast(part):
                for block in blocks(part):
                    _block(block, needs, soft, made)
            if isinstance(part, ast.ClassDef):
                _block([s for s in part.body if not isinstance(s, FUNCTIONS)], needs, soft, made)
            at += 1
            continue
        last, end = at, at + 1
        while end < len(body) and not is_barrier(body[end]):
            after = body[end] in soft and last == end - 1 and isinstance(body[end], ast.Assign | ast.AugAssign)
            if after or _holds(body[end], needs):
                last = end
            end += 1
        if last == at and part not in needs:  # a compound statement alone: inside it is enough
            at += 1
            continue
        made.regions[part.lineno] = (body[last].lineno, body[last].end_lineno or body[last].lineno)
        made.edges |= {part, body[last]}
        at = last + 1


def _wanted(part: ast.stmt, needs: set[ast.AST]) -> bool:
    """Whether a statement itself (for a compound one: its first line) needs autocast."""
    return part in needs


def _holds(part: ast.stmt, needs: set[ast.AST]) -> bool:
    return any(n in needs for n in ast.walk(part))


class _Wrap(cst.CSTTransformer):
    def __init__(self, facts: Facts, made: Plan, positions: object) -> None:
        self.facts, self.plan = facts, made
        self.positions = positions

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.positions[node].start.line)  # type: ignore[index]

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> cst.BaseSuite:
        return updated_node.with_changes(body=self._wrapped(original_node.body, updated_node.body))

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        return updated_node.with_changes(body=self._wrapped(original_node.body, updated_node.body))

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        if self._line(original_node.name) in self.plan.marks:
            return marked(updated_node, OUT_OF_SIGHT)
        return updated_node

    def _wrapped(
        self, original: Sequence[cst.BaseStatement], updated: Sequence[cst.BaseStatement]
    ) -> list[cst.BaseStatement]:
        lines = [self._line(node) for node in original]
        result: list[cst.BaseStatement] = []
        at = 0
        while at < len(lines):
            last = self.plan.regions.get(lines[at])
            if last is None or last[0] not in lines[at:]:
                result.append(updated[at])
                at += 1
                continue
            end = lines.index(last[0], at) + 1
            result.append(self._region(updated[at:end]))
            at = end
        return result

    def _region(self, statements: Sequence[cst.BaseStatement]) -> cst.With:
        region = cst.ensure_type(cst.parse_statement(f"with {self.facts.autocast()}:\n    pass\n"), cst.With)
        first = statements[0]
        lines = getattr(first, "leading_lines", ())
        body = [first.with_changes(leading_lines=[]), *statements[1:]]
        return region.with_changes(leading_lines=lines, body=region.body.with_changes(body=body))
