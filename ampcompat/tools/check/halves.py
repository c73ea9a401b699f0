"""Which expressions are half tensors, shown by the flow of values: from a cast or a product, through what keeps half.

What is not shown is not half: parameters of functions, buffers, numpy values and results of unknown functions.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import NamedTuple

from ampcompat.tools.check.bindings import dotted
from ampcompat.tools.check.own import PACKAGE
from ampcompat.tools.check.source import SCOPES, TRIES, Source, called, once
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
WIDE_DTYPES = frozenset({"float", "float32", "float64", "double"})
#: Calls whose result is no half tensor, whatever they are given.
WIDE_RESULTS = frozenset({"float", "double", "item", "numpy", "tolist", "long", "int", "bool"})
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
    values = [node.value for node in nodes if name in map(dotted, node.targets)]
    return frozenset(
        str(n.value)
        for value in values
        for n in ast.walk(value)
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
    )


class Value(NamedTuple):
    """What a name is given on a line: whether that is half, and whether one branch or loop alone gives it."""

    line: int
    is_half: bool
    is_conditional: bool


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
        self._values: dict[tuple[ast.AST, str], list[Value]] | None = None

    def _values_of(self, scope: ast.AST, name: str) -> list[Value]:
        """What a name of a scope is given, in the order of lines."""
        if self._values is None:
            self._values = {}
            # Line by line: what a value is made of stands above it, and is there when it is asked for.
            for where, given, node in sorted(_assignments(self.source), key=lambda one: one[2].lineno):
                value = Value(node.lineno, self.of(node, before=node.lineno), _is_conditional(self.source, node))
                self._values.setdefault((where, given), []).append(value)
        return self._values.get((scope, name), [])

    def of(self, node: ast.AST, depth: int = 0, before: int | None = None) -> bool:
        """Whether ``node`` is shown to be a half tensor (``before``: as of that line)."""
        if depth > DEPTH:
            return False
        if isinstance(node, ast.Call):
            return self._call(node, depth + 1)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._name(node, depth + 1, before)
        if isinstance(node, ast.BinOp):
            return self._operation(node, depth + 1, before)
        if isinstance(node, ast.IfExp):
            return self.of(node.body, depth + 1, before) and self.of(node.orelse, depth + 1, before)
        if isinstance(node, ast.UnaryOp):
            return self.of(node.operand, depth + 1, before)
        if isinstance(node, ast.Subscript | ast.Starred):
            return self.of(node.value, depth + 1, before)
        return False

    def _operation(self, node: ast.BinOp, depth: int, before: int | None) -> bool:
        if isinstance(node.op, ast.MatMult):
            return self.casts or self.of(node.left, depth, before)
        if isinstance(node.op, ast.Pow) and self.casts:
            return False
        sides = [side for side in (node.left, node.right) if not _is_number(side)]
        return bool(sides) and all(self.of(side, depth, before) for side in sides)

    def _call(self, node: ast.Call, depth: int) -> bool:
        name = called(node)
        if name == "half" and isinstance(node.func, ast.Attribute) and not node.args:
            return True
        if name in ("to", "type"):
            return self._cast(node, depth)
        if name in WIDE_RESULTS or (name == "sum" and self.casts):
            return False
        if self._is_layer(node.func):
            return self.casts or self.whole
        if self.casts and name in listed("FP16_FUNCS") | listed("FP32_FUNCS"):
            return name in listed("FP16_FUNCS")
        return self._passes_half_on(node, depth)

    def _cast(self, node: ast.Call, depth: int) -> bool:
        """``x.to(...)`` and ``x.type(...)``: half by the dtype that they name, else as ``x`` where they name none."""
        dtypes = named_dtypes(node)
        if dtypes & (HALF_DTYPES | WIDE_DTYPES):
            return not dtypes.isdisjoint(HALF_DTYPES)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            return self.of(node.func.value, depth, node.lineno)
        return False

    def _passes_half_on(self, node: ast.Call, depth: int) -> bool:
        """Whether an operation returns the dtype of what it is given, and that is half."""
        given = operand(node)
        if given is None or called(node) not in listed("FP16_FUNCS") | listed("FP32_FUNCS") | KEEPS:
            return False
        parts = given.elts if called(node) in KEEPS and isinstance(given, ast.List | ast.Tuple) else [given]
        return bool(parts) and all(self.of(part, depth, node.lineno) for part in parts)

    def _is_layer(self, func: ast.AST) -> bool:
        path = dotted(func)
        layers = _layers(self.source)
        return bool(path) and ((_class_around(self.source, func), path) in layers or (None, path) in layers)

    def _name(self, node: ast.Name | ast.Attribute, depth: int, before: int | None) -> bool:
        if isinstance(node, ast.Attribute) and node.attr in ("T", "mT", "data"):
            return self.of(node.value, depth, before)
        scope = self.source.scope(node)
        line = node.lineno if before is None else before
        values = [value for value in self._values_of(scope, dotted(node)) if value.line < line]
        if not values:
            return self.whole and isinstance(node, ast.Name) and _is_input(self.source, node.id, scope)
        if values[-1].is_conditional:  # the branches before count, too
            return all(value.is_half for value in values)
        return values[-1].is_half


def operand(call: ast.Call) -> ast.expr | None:
    """The tensor that a call is applied to: what stands before a method, the first argument of a function."""
    is_function = isinstance(call.func, ast.Name) or dotted(call.func).partition(".")[0] in ("torch", "F", "nn")
    if is_function:
        return call.args[0] if call.args else None
    return getattr(call.func, "value", None)


def named_dtypes(call: ast.Call) -> set[str]:
    """The last names of all arguments of ``x.to(...)``, a dtype's among them: ``float16`` of ``torch.float16``."""
    return {dotted(given).rpartition(".")[2] for given in (*call.args, *(k.value for k in call.keywords))}


def _is_number(node: ast.AST, depth: int = 0) -> bool:
    """Whether a side of an operation is a Python number, which changes no dtype."""
    if depth > DEPTH:
        return False
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand, depth + 1)
    if isinstance(node, ast.BinOp):
        return _is_number(node.left, depth + 1) and _is_number(node.right, depth + 1)
    if isinstance(node, ast.Call):
        return dotted(node.func).startswith("math.") or called(node) in NUMBERS
    return dotted(node).rpartition(".")[2] in NAMES_OF_NUMBERS


def _assignments(source: Source) -> Iterator[tuple[ast.AST, str, ast.expr]]:
    """Each assignment to a name: its scope, the name, the value."""
    nodes: Iterator[ast.Assign | ast.AnnAssign | ast.AugAssign] = source.kind(ast.Assign, ast.AnnAssign, ast.AugAssign)
    for node in nodes:
        if node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                if dotted(name):
                    yield source.scope(node), dotted(name), node.value


@once
def _layers(source: Source) -> set[tuple[ast.AST | None, str]]:
    """The names that layers are given, by class."""
    return {
        (_class_around(source, value), name)
        for _, name, value in _assignments(source)
        if isinstance(value, ast.Call) and called(value) in LAYERS
    }


def _class_around(source: Source, node: ast.AST) -> ast.ClassDef | None:
    return next((outer for outer in source.ancestors(node) if isinstance(outer, ast.ClassDef)), None)


def _is_conditional(source: Source, value: ast.AST) -> bool:
    """Whether a value is given in a branch or loop of its function."""
    for parent in source.ancestors(value):
        if isinstance(parent, SCOPES):
            return False
        if isinstance(parent, (ast.If, ast.For, ast.AsyncFor, ast.While, *TRIES)):
            return True
    return False


def _is_input(source: Source, name: str, scope: ast.AST) -> bool:
    """Whether a name is what the forward of a half module is given first."""
    if not isinstance(scope, ast.FunctionDef) or scope.name != "forward" or len(scope.args.args) < 2:
        return False
    cls = _class_around(source, scope)
    if cls is None or "Module" not in " ".join(map(ast.unparse, cls.bases)):
        return False
    if any(part in cls.name for part in ("Loss", "Criterion", "Norm")):
        return False  # losses are given what patched forwards return: float32; norms may be kept float32
    return scope.args.args[1].arg == name
