"""Which expressions are half tensors, shown by the flow of values: from a cast or a product, through what keeps half.

What is not shown is not half: parameters of functions, buffers, numpy values and results of unknown functions.
"""

from __future__ import annotations

import ast
import functools

from ampcompat.check.bindings import dotted
from ampcompat.check.own import PACKAGE
from ampcompat.check.source import SCOPES, Source, called, text

HALF_DTYPES = frozenset({"half", "float16", "bfloat16"})
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

    @functools.cached_property
    def _assigned(self) -> tuple[dict[tuple[ast.AST, str], list[ast.expr]], set[tuple[ast.AST | None, str]]]:
        """The values of each name by scope, and the names of layers by class; worked out when first asked for."""
        source, values = self.source, dict[tuple[ast.AST, str], list[ast.expr]]()
        layers = set[tuple[ast.AST | None, str]]()
        for node in source.nodes:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else targets
            value = getattr(node, "value", None)
            for target in targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                for name in names:
                    if text(name) and value is not None:
                        values.setdefault((source.scope(node), text(name)), []).append(value)
                        if isinstance(value, ast.Call) and called(value) in LAYERS:
                            layers.add((self._class(node), text(name)))
        return values, layers

    def _class(self, node: ast.AST) -> ast.AST | None:
        return next((a for a in self.source.ancestors(node) if isinstance(a, ast.ClassDef)), None)

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

    def _is_plain(self, node: ast.AST) -> bool:
        """Whether a side of an operation is a Python number, which changes no dtype."""
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.UnaryOp):
            return self._is_plain(node.operand)
        if isinstance(node, ast.BinOp):
            return self._is_plain(node.left) and self._is_plain(node.right)
        if isinstance(node, ast.Call):
            return (dotted(node.func) or "").startswith("math.") or called(node) in (
                "len",
                "float",
                "int",
                "item",
                "size",
                "sqrt_",
            )
        name = text(node).rpartition(".")[2]
        return name in ("temperature", "scale", "scaling", "eps", "d_k", "dim", "head_dim", "dk", "gamma", "n")

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
        return bool(path) and not self._assigned[1].isdisjoint({(self._class(func), path), (None, path)})

    def _name(self, node: ast.Name | ast.Attribute, depth: int, before: int | None) -> bool:
        if isinstance(node, ast.Attribute) and node.attr in ("T", "mT", "data"):
            return self.of(node.value, depth + 1, before)
        path = text(node)
        scope = self.source.scope(node)
        line = getattr(node, "lineno", 0) if before is None else before
        values = [v for v in self._assigned[0].get((scope, path), []) if v.lineno < line]
        if values:
            last = max(values, key=lambda v: v.lineno)
            # A value that one branch alone gives counts with that of the branches before.
            recent = [v for v in values if v is last or self._conditional(last)]
            return all(self.of(v, depth + 1, v.lineno) for v in recent)
        return self.whole and isinstance(node, ast.Name) and self._is_input(node.id, scope)

    def _conditional(self, value: ast.AST) -> bool:
        for parent in self.source.ancestors(value):
            if isinstance(parent, SCOPES):
                return False
            if isinstance(parent, ast.If | ast.For | ast.While | ast.Try):
                return True
        return False

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
