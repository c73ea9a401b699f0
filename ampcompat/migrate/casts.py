"""Which statements ran under apex's casts: forward passes, and what is computed from their results.

A taint analysis over the statements of each function in order. Sources are calls of the models; what reads a tainted
path and computes needs autocast too. Attributes carry taint from method to method, returned values to the callers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from ampcompat.check.bindings import dotted
from ampcompat.check.source import Source, called, children
from ampcompat.migrate.objects import FUNCTIONS, SCOPES, Function, Objects

# Methods of a module that run no forward.
# Functions of other modules that, by their names, read the gradients of what they are given.
READS_GRADIENTS = re.compile(r"grad|clip|agc", re.IGNORECASE)
READS_NONE = re.compile(
    r"(no|zero|enable|requires|set|inference|with)_?grad|^grad$|gradscaler|checkpoint|is_grad", re.IGNORECASE
)
SAFE_METHODS = frozenset(
    {"train", "eval", "parameters", "named_parameters", "buffers", "named_buffers", "modules"}
    | {"named_modules", "children", "named_children", "state_dict", "load_state_dict", "cuda", "cpu", "to"}
    | {"half", "float", "double", "bfloat16", "zero_grad", "apply", "requires_grad_", "share_memory"}
    | {"register_buffer", "register_parameter", "register_forward_hook", "register_forward_pre_hook"}
    | {"register_backward_hook", "register_full_backward_hook", "add_module", "get_parameter", "get_submodule"}
    | {"size", "numel", "item", "items", "keys", "values", "save_pretrained", "save", "save_checkpoint"}
    | {"resize_token_embeddings", "no_sync", "append", "extend", "update", "copy", "pop", "get"}
    | {"load_pretrained", "from_pretrained", "extra_repr", "__class__", "set_epoch", "join"}
    | {"gradient_checkpointing_enable", "get_input_embeddings", "tie_weights", "init_weights"}
    | {"reset_parameters", "freeze", "unfreeze", "freeze_encoder", "no_weight_decay", "close", "start_prefetch"}
    | {"print_trainable_parameters", "step", "named_children_", "load", "load_weights", "set_input"}
    | {"get_current_losses"}
)
DATA = re.compile(r"\.(weight|bias|data|grad|config|cfg|hparams|__name__)\b")
# Calls that move data about: nothing of what autocast casts.
MOVES = frozenset(
    {"to", "cuda", "cpu", "float", "double", "half", "long", "int", "bool", "type", "item", "detach", "contiguous"}
    | {"requires_grad_", "view", "reshape", "squeeze", "unsqueeze", "permute", "transpose", "size", "dim", "clone"}
    | {"next", "iter", "len", "zip", "range", "enumerate", "keys", "items", "values", "max", "min", "isinstance"}
    | {"zero_grad", "step", "train", "eval", "backward", "numpy", "tolist", "isfinite", "isnan", "isinf", "any", "all"}
    | {"print", "append", "extend", "add_scalar", "add_scalars", "info", "debug", "warning", "log_metric", "write"}
    | {"format", "str", "set_postfix", "set_description", "update", "hasattr", "getattr", "all_reduce", "barrier"}
    | {"scale", "unscale_", "defaultdict", "dict", "list", "tuple", "set", "save", "exit", "round", "join", "log_dict"}
)
# What is a Python number, or no float tensor, has no dtype to lose.
PLAIN = frozenset(
    {"item", "tolist", "numpy", "len", "int", "float", "str", "size", "isfinite", "isnan", "bool", "argmax"}
)
NETWORK = re.compile(
    r"(^|_)(net\w?|network|model|teacher|student|encoder|decoder|critic|generator|discriminator|vgg|ema)$"
)
BARRIERS = frozenset({"step", "backward", "scale_loss", "unscale_", "update"})
Statements = Sequence[ast.stmt]
Operation = ast.Call | ast.BinOp


GRAD_MODES = ("no_grad", "inference_mode", "set_grad_enabled", "enable_grad")
CHANGES_WEIGHTS = frozenset(
    {"load_state_dict", "copy_", "apply", "update_parameters", "clamp_weights", "clip_weights", "spectral_norm"}
)


class Casts:
    """The statements of a file that need autocast.

    Attributes:
        needs: Statements (for a compound one, its first line) that run or use a forward, with the expression that does.
        forwards: Those of the expressions that call a model.
        arithmetic: Statements that add or divide such results: the same under autocast and outside.
    """

    def __init__(self, source: Source, objects: Objects, everywhere: bool = True) -> None:
        self.source, self.objects, self.everywhere = source, objects, everywhere
        self.tainted: set[tuple[ast.AST, str]] = set()
        self.producers: set[ast.AST] = set()
        self.needs: dict[ast.stmt, ast.AST] = {}
        self.forwards: set[ast.AST] = set()
        self.arithmetic: set[ast.AST] = set()
        self._entered: dict[ast.Call, bool | list[Function]] = {}
        scopes = [source.tree, *(node for node in source.nodes if isinstance(node, FUNCTIONS))]
        bodies = [(scope, list(_parts(scope.body))) for scope in scopes]
        before = -1
        while before != (now := len(self.tainted) + len(self.producers)):
            before = now
            for scope, parts in bodies:
                for part, operations in parts:
                    found = self._needing(operations, scope)
                    if found is not None:
                        self.needs.setdefault(part, found)
                    self._assign(part, scope)

    def _assign(self, part: ast.stmt, scope: ast.AST) -> None:
        pairs: list[tuple[ast.AST, ast.AST]] = []
        if isinstance(part, ast.Assign):
            pairs = [(target, part.value) for target in part.targets]
        elif isinstance(part, ast.AugAssign | ast.AnnAssign) and part.value is not None:
            pairs = [(part.target, part.value)]
        elif isinstance(part, ast.For | ast.AsyncFor):
            pairs = [(part.target, part.iter)]
        elif isinstance(part, ast.Return) and part.value is not None and self._tensor(part.value, scope):
            self.producers.add(scope)
        elif isinstance(part, ast.Expr) and isinstance(part.value, ast.Call):
            call = part.value
            if called(call) in ("append", "extend", "insert", "update") and isinstance(call.func, ast.Attribute):
                pairs = [(call.func.value, a) for a in call.args]
        for target, value in pairs:
            if self._tensor(value, scope):
                for name in _stored(target):
                    self.tainted.add((self.objects._owner(scope, name), name))

    def _is_tainted(self, path: str, scope: ast.AST) -> bool:
        return (self.objects._owner(scope, path), path) in self.tainted

    def is_forward(self, call: ast.Call, scope: ast.AST | None = None) -> bool:
        """Whether a call runs the forward of a model (of a network beside them, too, where casts were everywhere)."""
        entered = self._entered.get(call)
        if entered is None:
            entered = self._entered[call] = self._enters(call, self.objects.scope(call) if scope is None else scope)
        return entered if isinstance(entered, bool) else any(f in self.producers for f in entered)

    def _enters(self, call: ast.Call, scope: ast.AST) -> bool | list[Function]:
        """The functions of the file that decide whether a call is a forward, or what it is for certain."""
        func: ast.AST = call.func
        if isinstance(func, ast.Attribute) and (
            func.attr in SAFE_METHODS or DATA.search("." + (dotted(func) or ast.unparse(func)))
        ):
            return False
        entered = self.objects.called(call)
        own = isinstance(func, ast.Attribute) and any(x.kind == "model" for x in self.objects.of(func.value, scope))
        if entered and not own:
            return entered
        if any(self.objects.trains(f) for f in entered):
            return False  # a model that holds its training step
        if isinstance(func, ast.Call) and any(x.kind == "model" for x in self.objects.of(func, scope)):
            return True  # `getattr(model, "forward")(x)`, `model.to(device)(x)`
        while isinstance(func, ast.Attribute | ast.Subscript | ast.Call):
            if not isinstance(func, ast.Call) and any(x.kind == "model" for x in self.objects.of(func, scope)):
                return True
            func = func.value if not isinstance(func, ast.Call) else func.func
        if any(x.kind == "model" for x in self.objects.of(func, scope)):
            return not isinstance(func, ast.Name) or func.id not in self.objects.classes
        return self._other_network(call.func, scope)

    def _other_network(self, func: ast.AST, scope: ast.AST) -> bool:
        """Whether an object that is not amp's is called, and by its name is a network: at O1 it was cast as well."""
        path = dotted(func) or ""
        if not self.everywhere or not NETWORK.search(path.rpartition(".")[2]):
            return False
        name = path.rpartition(".")[2]
        if name in self.objects.functions or name in self.objects.classes:
            return False
        return any(
            dotted(target) == path and isinstance(value, ast.Call) for _, target, value in self.objects.assignments
        )

    def _needing(self, operations: Sequence[tuple[ast.AST, Operation]], scope: ast.AST) -> ast.AST | None:
        """The first of the operations of a statement that needs autocast, or None."""
        for expression, node in operations:
            if isinstance(node, ast.Call):
                if self.is_forward(node, scope):
                    self.forwards.add(node)
                    return node
                if called(node) in MOVES or self._is_own_step(node):
                    continue
                given = [*node.args, *(k.value for k in node.keywords)]
                given += [node.func.value] if isinstance(node.func, ast.Attribute) else []
                if any(self._tensor(g, scope) for g in given):
                    return node
            elif self._tensor(node.left, scope) or self._tensor(node.right, scope):
                if isinstance(node.op, ast.MatMult):
                    return node
                self.arithmetic.add(expression)
        return None

    def _is_own_step(self, call: ast.Call) -> bool:
        """Whether the call enters a function of the file that trains: it must not run inside autocast as a whole."""
        return any(self.objects.trains(function) for function in self.objects.called(call))

    def _tensor(self, node: ast.AST, scope: ast.AST) -> bool:
        """Whether the value of an expression may be a tensor that came out of a forward."""
        if isinstance(node, ast.Call):
            if self.is_forward(node, scope):
                return not any(self.objects.trains(f) for f in self.objects.called(node))
            if called(node) in PLAIN or any(self.objects.trains(f) for f in self.objects.called(node)):
                return False
        elif isinstance(node, (*SCOPES, ast.Compare)):
            return False
        elif isinstance(node, ast.Name | ast.Attribute):
            path = dotted(node)
            if path is None:
                return self._tensor(node.value, scope) if isinstance(node, ast.Attribute) else False
            if isinstance(node, ast.Attribute) and node.attr in ("shape", "device", "dtype", "grad"):
                return False
            while path:
                if self._is_tainted(path, scope):
                    return True
                path = path.rpartition(".")[0]
            return False
        return any(self._tensor(child, scope) for child in children(node))


def _parts(body: Statements) -> Iterator[tuple[ast.stmt, list[tuple[ast.AST, Operation]]]]:
    """The statements of a function in order, functions in it left out, with the operations of their expressions."""
    for part in body:
        if isinstance(part, ast.ClassDef):
            yield from _parts(part.body)
        elif not isinstance(part, FUNCTIONS):
            yield (
                part,
                [(e, node) for e in expressions(part) for node in within(e) if isinstance(node, ast.Call | ast.BinOp)],
            )
            for block in blocks(part):
                yield from _parts(block)


def _stored(target: ast.AST) -> Iterator[str]:
    if isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from _stored(part)
        return
    while isinstance(target, ast.Subscript | ast.Starred):
        target = target.value
    path = dotted(target)
    if path is not None and path not in ("self", "_"):
        yield path


def expressions(part: ast.stmt) -> list[ast.AST]:
    """Return what a statement evaluates itself: for a compound one, its first line."""
    if isinstance(part, ast.If | ast.While):
        return [part.test]
    if isinstance(part, ast.For | ast.AsyncFor):
        return [part.iter]
    if isinstance(part, ast.With | ast.AsyncWith):
        return [item.context_expr for item in part.items]
    if isinstance(part, ast.Match):
        return [part.subject]
    if isinstance(part, (*FUNCTIONS, ast.ClassDef, ast.Try)) or type(part).__name__ == "TryStar":
        return []
    return [part]


def blocks(part: ast.stmt) -> list[list[ast.stmt]]:
    """The blocks of a compound statement other than a function or class, in order."""
    if isinstance(part, (*FUNCTIONS, ast.ClassDef)):
        return []
    found = [getattr(part, name, []) for name in ("body", "orelse", "finalbody")]
    found += [handler.body for handler in getattr(part, "handlers", [])]
    found += [case.body for case in getattr(part, "cases", [])]
    return [block for block in found if block]


def within(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of an expression, those of lambdas left out: they run elsewhere."""
    rest = [node]
    for one in rest:
        yield one
        if not isinstance(one, SCOPES):
            rest += children(one)


def is_autocast(part: ast.AST) -> bool:
    """Whether a statement is ``with torch.autocast(...)``, or another way to have it."""
    if not isinstance(part, ast.With | ast.AsyncWith):
        return False
    calls = [item.context_expr for item in part.items]
    return any(isinstance(c, ast.Call) and called(c) in ("autocast", "disable_casts") for c in calls)


def in_autocast(source: Source, node: ast.AST) -> bool:
    """Whether ``node`` is inside such a statement, in the same function."""
    for parent in source.ancestors(node):
        if isinstance(parent, SCOPES):
            return False
        if is_autocast(parent):
            return True
    return False


def _changes(part: ast.AST, data: ast.Attribute) -> bool:
    """Whether ``x.data`` is assigned, or changed by a method."""
    text = ast.unparse(data)
    stored = isinstance(data.ctx, ast.Store)
    return stored or any(
        isinstance(n, ast.Call) and called(n).endswith("_") and ast.unparse(n.func).startswith(text)
        for n in ast.walk(part)
    )


def is_barrier(part: ast.AST) -> bool:
    """Whether a statement must stay out of autocast: it steps, runs backward, hands values out or defines something."""
    for node in ast.walk(part):
        # Autocast keeps the half copies of weights that it made in a region: those made without gradients, and those of
        # weights that change, must not serve a later forward of the same region.
        if isinstance(node, ast.With) and any(word in ast.unparse(node.items[0]) for word in GRAD_MODES):
            return True
        if isinstance(node, ast.Attribute) and node.attr == "data" and _changes(part, node):
            return True
        if isinstance(node, ast.Call) and called(node) in CHANGES_WEIGHTS:
            return True
        if isinstance(
            node, ast.Yield | ast.YieldFrom | ast.Await | ast.ClassDef | ast.Global | ast.Import | ast.ImportFrom
        ):
            return True
        if isinstance(node, (*FUNCTIONS, ast.AsyncFor, ast.AsyncWith)):
            return True
        if isinstance(node, ast.Call) and called(node) in BARRIERS and isinstance(node.func, ast.Attribute):
            if called(node) == "update" and "scaler" not in ast.unparse(node.func):
                continue
            return True
        if isinstance(node, ast.Call) and called(node) == "scale_loss":
            return True
    return False
