"""Find what can be changed in a module's functions, and compile the module with one of the changes."""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

NEGATED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
}  # fmt: skip
BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
#: Two arguments of these are never of one kind: the exchange ends in a TypeError.
OF_TWO_KINDS = {"isinstance", "issubclass", "getattr", "setattr", "hasattr", "delattr", "cast"}


@dataclass(frozen=True)
class Mutant:
    """A change of one node of a file.

    Attributes:
        file: the path from the root of the repository.
        line: where the statement, or lambda, begins that is changed.
        node: the number of the node in ``ast.walk``'s order.
        kind: which change, a name in ``changes``.
        function: the innermost function around it.
        was: the node's source, on one line.
    """

    file: str
    line: int
    node: int
    kind: str
    function: str
    was: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.kind}: {self.was}"


def changes(node: ast.AST) -> Iterator[str]:
    """Yield the kinds of change that make sense at ``node``."""
    match node:
        case ast.Compare(ops=[op]):
            yield "negate"
            if type(op) in BOUNDARY:
                yield "move the boundary"
        case ast.BoolOp():
            yield "exchange and/or"
        case ast.UnaryOp(op=ast.Not()):
            yield "drop not"
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield "exchange the operator"
        case ast.Constant(value=bool() | int() | float()):
            yield "change the constant"
        case ast.Call(func=func, args=[ast.AST() as a, ast.AST() as b, *_]) if not any(
            isinstance(x, ast.Starred) for x in (a, b)
        ):
            if getattr(func, "id", None) not in OF_TWO_KINDS:
                yield "swap the first two arguments"
        case (
            ast.If(test=ast.Name() | ast.Attribute() | ast.Call())
            | ast.IfExp(test=ast.Name() | ast.Attribute() | ast.Call())
        ):
            yield "negate the test"
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return None"
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Delete() | ast.Continue() | ast.Break() | ast.AugAssign():
            yield "delete the statement"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "delete the statement"


def apply(tree: ast.Module, number: int, kind: str) -> ast.Module:
    """Change the node with that number in place, and return the tree."""
    node = next(n for i, n in enumerate(ast.walk(tree)) if i == number)
    match kind, node:
        case "negate", ast.Compare(ops=[op]):
            node.ops = [NEGATED[type(op)]()]
        case "move the boundary", ast.Compare(ops=[op]):
            node.ops = [BOUNDARY[type(op)]()]
        case "exchange and/or", ast.BoolOp(op=op):
            node.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case "drop not", ast.UnaryOp(operand=operand):
            replace(tree, node, operand)
        case "exchange the operator", ast.BinOp(op=op):
            node.op = OPERATORS[type(op)]()
        case "change the constant", ast.Constant(value=bool() as value):
            node.value = not value
        case "change the constant", ast.Constant(value=value):
            node.value = value + 1
        case "swap the first two arguments", ast.Call():
            node.args[:2] = node.args[1::-1]
        case "negate the test", ast.If(test=test) | ast.IfExp(test=test):
            node.test = ast.UnaryOp(ast.Not(), test)
        case "return None", ast.Return():
            node.value = None
        case "delete the statement", _:
            replace(tree, node, ast.Pass())
        case _:
            raise ValueError(f"{kind!r} does not apply to {ast.dump(node)}")
    return ast.fix_missing_locations(tree)


def replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """Put ``new`` where ``old`` is."""
    ast.copy_location(new, old)
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list) and any(item is old for item in value):
                value[:] = [new if item is old else item for item in value]


def mutants_of(path: Path, file: str) -> list[Mutant]:
    """Return every mutant of the functions in ``path``: no annotation, default, decorator, or text of a message."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    numbers = {node: number for number, node in enumerate(ast.walk(tree))}
    found: list[Mutant] = []

    def visit(node: ast.AST, function: str | None, statement: ast.stmt | ast.Lambda | None) -> None:
        if isinstance(node, ast.stmt):
            statement = node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in node.body:
                visit(child, node.name, None)
            return
        if isinstance(node, ast.Lambda):
            visit(node.body, function or "<lambda>", node)
            return
        if function is not None and statement is not None:
            for kind in changes(node):
                was = " ".join(ast.unparse(node).split())
                found.append(Mutant(file, statement.lineno, numbers[node], kind, function, was))
        if isinstance(node, ast.JoinedStr | ast.Raise):  # messages
            return
        for name, value in ast.iter_fields(node):
            if name != "annotation":
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        visit(child, function, statement)

    visit(tree, None, None)
    return found


def every(folder: Path, root: Path) -> list[Mutant]:
    """Return every mutant of the package in ``folder``."""
    return [m for path in sorted(folder.glob("*.py")) for m in mutants_of(path, path.relative_to(root).as_posix())]


def sample(folder: Path, root: Path, count: int, seed: int) -> list[Mutant]:
    """Return ``count`` mutants of the package in ``folder``, one a line at most, the same ones for the same seed."""
    found = every(folder, root)
    random.Random(seed).shuffle(found)
    a_line = {(m.file, m.line): m for m in reversed(found)}
    order = {mutant: at for at, mutant in enumerate(found)}
    return sorted(sorted(a_line.values(), key=order.__getitem__)[:count], key=lambda m: (m.file, m.line))


def changed(source: str, mutant: Mutant) -> str:
    """Return ``source``, of the mutant's file, with its change; comments and layout are lost."""
    return ast.unparse(apply(ast.parse(source), mutant.node, mutant.kind))


def codes(path: Path, mutant: Mutant) -> dict[tuple[str, int], CodeType]:
    """Return the code objects that the mutant changes, by name and first line."""
    source = path.read_text(encoding="utf-8")
    before = compile(source, str(path), "exec", dont_inherit=True)
    after = compile(apply(ast.parse(source), mutant.node, mutant.kind), str(path), "exec", dont_inherit=True)
    found: dict[tuple[str, int], CodeType] = {}

    def compare(old: CodeType, new: CodeType) -> None:
        if old == new:
            return
        found[new.co_name, new.co_firstlineno] = new
        inside = {(c.co_name, c.co_firstlineno): c for c in new.co_consts if isinstance(c, CodeType)}
        for code in old.co_consts:
            if isinstance(code, CodeType) and (code.co_name, code.co_firstlineno) in inside:
                compare(code, inside[code.co_name, code.co_firstlineno])

    compare(before, after)
    found.pop(("<module>", before.co_firstlineno), None)
    return found
