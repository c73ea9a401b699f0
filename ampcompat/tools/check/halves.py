"""Which expressions are half tensors, shown by the flow of values: from a cast or a product, through what keeps half.

What is not shown is not half: parameters of functions, buffers, numpy values and results of unknown functions.
"""

from __future__ import annotations

import ast
import bisect
import functools
from collections.abc import Iterator

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.own import PACKAGE
from ampcompat.tools.check.source import SCOPES, TRIES, Source, called, text
from ampcompat.tools.dtypes import HALF_NAMES

HALF_DTYPES = HALF_NAMES | {"half"}
LAYERS = frozenset(
    {"Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"}
    | {"Bilinear", "LSTM", "GRU", "RNN"}
)
# What returns its first tensor's dtype; on none of the lists.
KEEPS = frozenset(
    {"view", "reshape", "transpose", "permute", "contiguous", "squeeze", "unsqueeze", "flatten", "expand"}
    | {"expand_as", "repeat", "clone", "detach", "relu", "leaky_relu", "sigmoid", "tanh", "dropout", "abs"}
    | {"sqrt", "clamp", "clamp_min", "clamp_max", "clamp_", "max", "min", "mean", "chunk", "split", "cat"}
    | {"stack", "masked_fill", "masked_fill_", "index_select", "gather", "t", "cuda", "neg", "narrow", "select"}
    | {"where", "type_as", "elu", "selu", "silu", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "pad"}
    | {"roll", "flip", "tril", "triu", "mul", "add", "div", "sub"}
)
#: Calls and names that are Python numbers.
NUMBERS = frozenset({"len", "float", "int", "item", "size", "sqrt_"})
NAMES_OF_NUMBERS = frozenset({"temperature", "scale", "scaling", "eps", "d_k", "dim", "head_dim", "dk", "gamma", "n"})
#: Operations in one expression that are looked through.
DEPTH = 12


@functools.cache
def listed(name: str) -> frozenset[str]:
    """The operations on the O1 lists called ``name``, read from their source: importing them would need torch."""
    files = sorted((PACKAGE / "amp" / "lists").glob("*_overrides.py"))
    nodes = [node for file in files for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.Assign)]
    values = [node.value for node in nodes if name in map(text, node.targets)]
    return frozenset(
        str(n.value)
        for value in values
        for n in ast.walk(value)
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
    )


class Values:
    """What a name of one scope is given, in the order of lines, and whether that is half."""

    def __init__(self) -> None:
        self.lines: list[int] = []
        self.halves: list[bool] = []
        self.all_halves: list[bool] = []  # this one and all above
        self.conditional: list[bool] = []

    def add(self, line: int, is_half: bool, conditional: bool) -> None:
        """Add a value, from a line that is not above those before."""
        self.lines.append(line)
        self.halves.append(is_half)
        self.all_halves.append(is_half and (not self.all_halves or self.all_halves[-1]))
        self.conditional.append(conditional)

    def is_half(self, line: int) -> bool | None:
        """Whether the name holds a half tensor above ``line``; None where it is given nothing there.

        A value that one branch alone gives counts with that of the branches before.
        """
        last = bisect.bisect_left(self.lines, line) - 1
        if last < 0:
            return None
        return self.all_halves[last] if self.conditional[last] else self.halves[last]


class Halves:
    """Half tensors of one file.

    Args:
        source: The file.
        casts: Whether O1 may be the level: products run in half, the operations of the float list in float32.
        whole: Whether every level of the repository keeps half models (O2, O3), or fp16_utils makes them: layers are
            half, and so is what they are given.
    """

    def __init__(self, source: Source, casts: bool, whole: bool) -> None:
        self.source, self.casts, self.whole = source, casts, whole
        self._values: dict[tuple[ast.AST, str], Values] | None = None

    def _values_of(self, scope: ast.AST, name: str) -> Values:
        if self._values is None:
            self._values = {}
            # Line by line: what a value is made of stands above it, and is there when it is asked for.
            for where, given, value in sorted(self._assignments(), key=lambda one: one[2].lineno):
                values = self._values.setdefault((where, given), Values())
                values.add(value.lineno, self.of(value, before=value.lineno), self._is_conditional(value))
        return self._values.get((scope, name), Values())

    def _assignments(self) -> Iterator[tuple[ast.AST, str, ast.expr]]:
        """Each assignment to a name: its scope, the name, the value."""
        assignments: list[ast.Assign | ast.AnnAssign | ast.AugAssign] = [
            *self.source.kind(ast.Assign),
            *self.source.kind(ast.AnnAssign),
            *self.source.kind(ast.AugAssign),
        ]
        for node in assignments:
            if node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if text(name):
                        yield self.source.scope(node), text(name), node.value

    @functools.cached_property
    def _layers(self) -> set[tuple[ast.AST | None, str]]:
        """The names that layers are given, by class."""
        return {
            (self._class(value), name)
            for _, name, value in self._assignments()
            if isinstance(value, ast.Call) and called(value) in LAYERS
        }

    def _class(self, node: ast.AST) -> ast.AST | None:
        """The class around ``node``."""
        key = ("class", self._block(node))
        if key not in self.source.known:
            classes = (a for a in self.source.ancestors(node) if isinstance(a, ast.ClassDef))
            self.source.known[key] = next(classes, None)
        found: ast.AST | None = self.source.known[key]
        return found

    def _is_conditional(self, value: ast.AST) -> bool:
        """Whether a value is given in a branch or loop of its function."""
        key = ("conditional", self._block(value))
        if key not in self.source.known:
            self.source.known[key] = self._in_branch(value)
        found: bool = self.source.known[key]
        return found

    def _in_branch(self, value: ast.AST) -> bool:
        for parent in self.source.ancestors(value):
            if isinstance(parent, SCOPES):
                return False
            if isinstance(parent, (ast.If, ast.For, ast.AsyncFor, ast.While, *TRIES)):
                return True
        return False

    def _block(self, node: ast.AST) -> int:
        """A key of the block of statements that ``node`` stands in."""
        place = self.source.place(self.source.statement(node))
        return 0 if place is None else id(place.block)

    def of(self, node: ast.AST, depth: int = 0, before: int | None = None) -> bool:
        """Whether ``node`` is shown to be a half tensor (``before``: as of that line)."""
        if depth > DEPTH:
            return False
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._name(node, depth, before)
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.MatMult):
                return self.casts or self.of(node.left, depth + 1, before)
            if isinstance(node.op, ast.Pow) and self.casts:
                return False
            sides = [s for s in (node.left, node.right) if not self._is_plain(s)]
            return bool(sides) and all(self.of(s, depth + 1, before) for s in sides)
        if isinstance(node, ast.UnaryOp | ast.Subscript | ast.Starred):
            return self.of(node.operand if isinstance(node, ast.UnaryOp) else node.value, depth + 1, before)
        if isinstance(node, ast.IfExp):
            return self.of(node.body, depth + 1, before) and self.of(node.orelse, depth + 1, before)
        return False

    def _is_plain(self, node: ast.AST, depth: int = 0) -> bool:
        """Whether a side of an operation is a Python number, which changes no dtype."""
        if depth > DEPTH:
            return False
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.UnaryOp):
            return self._is_plain(node.operand, depth + 1)
        if isinstance(node, ast.BinOp):
            return self._is_plain(node.left, depth + 1) and self._is_plain(node.right, depth + 1)
        if isinstance(node, ast.Call):
            return (dotted(node.func) or "").startswith("math.") or called(node) in NUMBERS
        return text(node).rpartition(".")[2] in NAMES_OF_NUMBERS

    def _call(self, node: ast.Call, depth: int) -> bool:
        name = called(node)
        line = node.lineno
        if name == "half" and isinstance(node.func, ast.Attribute) and not node.args:
            return True
        if name in ("to", "type"):
            dtypes = {text(a).rpartition(".")[2] for a in (*node.args, *(k.value for k in node.keywords))}
            if dtypes & HALF_DTYPES:
                return True
            return (
                not dtypes & {"float", "float32", "float64", "double"} and name == "to" and self._receiver(node, depth)
            )
        if name in ("float", "double", "item", "numpy", "tolist", "long", "int", "bool", "sum") and (
            name != "sum" or self.casts
        ):
            return False
        if self._is_layer(node.func):
            return self.casts or self.whole
        first = node.args[0] if node.args else None
        # The operands stand behind a function, around a method.
        operand = first if self._is_function(node.func) else getattr(node.func, "value", None)
        if name in listed("FP16_FUNCS"):
            return self.casts or (operand is not None and self.of(operand, depth + 1, line))
        if name in listed("FP32_FUNCS"):
            return not self.casts and operand is not None and self.of(operand, depth + 1, line)
        if name in KEEPS and operand is not None:
            given = operand.elts if isinstance(operand, ast.List | ast.Tuple) else [operand]
            return bool(given) and all(self.of(g, depth + 1, line) for g in given)
        return False

    def _receiver(self, node: ast.Call, depth: int) -> bool:
        return isinstance(node.func, ast.Attribute) and self.of(node.func.value, depth + 1, node.lineno)

    def _is_function(self, func: ast.AST) -> bool:
        root = (dotted(func) or "").partition(".")[0]
        return isinstance(func, ast.Name) or root in ("torch", "F", "nn")

    def _is_layer(self, func: ast.AST) -> bool:
        path = text(func)
        return bool(path) and not self._layers.isdisjoint({(self._class(func), path), (None, path)})

    def _name(self, node: ast.Name | ast.Attribute, depth: int, before: int | None) -> bool:
        if isinstance(node, ast.Attribute) and node.attr in ("T", "mT", "data"):
            return self.of(node.value, depth + 1, before)
        scope = self.source.scope(node)
        line = getattr(node, "lineno", 0) if before is None else before
        is_half = self._values_of(scope, text(node)).is_half(line)
        if is_half is not None:
            return is_half
        return self.whole and isinstance(node, ast.Name) and self._is_input(node.id, scope)

    def _is_input(self, name: str, scope: ast.AST) -> bool:
        """Whether a name is what the forward of a half module is given first."""
        if not isinstance(scope, ast.FunctionDef) or scope.name != "forward" or len(scope.args.args) < 2:
            return False
        cls = self._class(scope)
        if not isinstance(cls, ast.ClassDef) or "Module" not in " ".join(map(ast.unparse, cls.bases)):
            return False
        if any(part in cls.name for part in ("Loss", "Criterion", "Norm")):
            return False  # losses are given what patched forwards return: float32; norms may be kept float32
        return scope.args.args[1].arg == name
