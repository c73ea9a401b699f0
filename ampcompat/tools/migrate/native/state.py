"""Checkpoints and looks at the scale."""

from __future__ import annotations

import libcst as cst

from ampcompat.tools.migrate.native.edits import Edits
from ampcompat.tools.migrate.native.facts import Facts
from ampcompat.tools.migrate.native.home import Home
from ampcompat.tools.migrate.native.nodes import last_name
from ampcompat.tools.migrate.text import code_of

STATE_DICT = "apex.amp.state_dict"
LOAD = "apex.amp.load_state_dict"
SCALERS = ("apex.amp._amp_state.loss_scalers", "apex.amp._amp_state._amp_state.loss_scalers")
OTHER_KEYS = "apex.amp.state_dict: a GradScaler's state has other keys; use {scaler}.get_scale()"
#: Functions that autocast casts as they were registered.
REGISTERED = {
    "apex.amp.register_half_function": (
        "einsum", "matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "linear", "conv1d", "conv2d", "conv3d",
        "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "chain_matmul", "prelu",
        "scaled_dot_product_attention",
    ),
    "apex.amp.register_float_function": (
        "softmax", "log_softmax", "layer_norm", "group_norm", "exp", "log", "pow", "prod", "cumsum", "cumprod", "norm",
        "cosine_similarity", "cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "nll_loss", "kl_div",
        "binary_cross_entropy_with_logits", "softplus", "cdist",
    ),
}  # fmt: skip
LOOKS = ("sorted", "list", "set", "len", "iter", "print", "tuple", "str", "format")
NO_CASTS = 'torch.autocast("cuda" if torch.cuda.is_available() else "cpu", enabled=False)'


def state_uses(facts: Facts) -> list[cst.Call | cst.Attribute]:
    """Expressions that ask amp for its state."""
    found: list[cst.Call | cst.Attribute] = []
    for call in facts.file.of_type(cst.Call):
        calls_amp = facts.symbol(call.func) in (STATE_DICT, LOAD)
        asks = isinstance(call.func, cst.Attribute) and _asks_scale(call.func, facts)
        if calls_amp or asks:
            found.append(call)
    for node in facts.file.of_type(cst.Attribute):
        if _asks_scale(node, facts) and not _is_written(node, facts):
            found.append(node)
    return found


def _asks_scale(node: cst.Attribute, facts: Facts) -> bool:
    """Whether an attribute is the scale of ``amp._amp_state.loss_scalers[0]``."""
    if node.attr.value not in ("loss_scale", "_loss_scale") or not isinstance(node.value, cst.Subscript):
        return False
    return facts.symbol(node.value.value) in SCALERS


def _is_written(node: cst.Attribute, facts: Facts) -> bool:
    parent = facts.file.parents[node]
    called = isinstance(parent, cst.Call) and parent.func is node
    return called or isinstance(parent, cst.AssignTarget | cst.AugAssign)


def replace_state(facts: Facts, home: Home, edits: Edits) -> None:
    """``amp.state_dict()`` becomes the scaler's."""
    for node in state_uses(facts):
        scaler = home.scaler(facts.file.function(node))
        if isinstance(node, cst.Attribute) or facts.symbol(node.func) not in (STATE_DICT, LOAD):
            edits.expressions[node] = lambda _, s=scaler: cst.parse_expression(f"{s}.get_scale()")  # type: ignore[misc]
            continue
        parent = facts.file.parents[node]
        if _looks_inside(parent, facts):
            edits.mark(facts.file.statement(node), OTHER_KEYS.format(scaler=scaler))
            continue
        if len(home.groups) > 1:
            _several(node, facts, home.all(facts.file.function(node)), edits)
            continue
        name = "state_dict" if facts.symbol(node.func) == STATE_DICT else "load_state_dict"
        edits.expressions[node] = lambda new, s=f"{scaler}.{name}": _renamed(new, s)  # type: ignore[misc]


def _several(node: cst.Call, facts: Facts, scalers: str, edits: Edits) -> None:
    """The state of several scalers: a list."""
    statement = facts.file.statement(node)
    if facts.symbol(node.func) == STATE_DICT:
        edits.expressions[node] = lambda _: cst.parse_expression(f"[s.state_dict() for s in {scalers}]")
    elif isinstance(statement, cst.Expr) and statement.value is node and node.args:
        given = code_of(node.args[0].value)
        loop = f"for s, state in zip({scalers}, {given}):\n    s.load_state_dict(state)\n"
        edits.statements[statement] = lambda _: [cst.parse_statement(loop)]
    else:
        edits.mark(statement, f"write: for s, state in zip({scalers}, ...): s.load_state_dict(state)")


def _looks_inside(parent: cst.CSTNode, facts: Facts) -> bool:
    """Whether the state is not handed on as a whole."""
    if isinstance(parent, cst.Subscript | cst.Attribute | cst.For | cst.CompFor | cst.ComparisonTarget):
        return True
    outer = facts.file.parents.get(parent)
    return isinstance(parent, cst.Arg) and isinstance(outer, cst.Call) and last_name(outer.func) in LOOKS


def _renamed(call: cst.CSTNode, function: str) -> cst.CSTNode:
    return call.with_changes(func=cst.parse_expression(function))


def replace_disable_casts(facts: Facts, edits: Edits) -> None:
    """``amp.disable_casts()``: autocast that is switched off."""
    for call in facts.file.of_type(cst.Call):
        if facts.symbol(call.func) in ("apex.amp.disable_casts", "apex.amp.handle.disable_casts"):
            edits.expressions[call] = lambda _: cst.parse_expression(NO_CASTS)


def drop_registrations(facts: Facts, edits: Edits) -> None:
    """``amp.register_half_function(torch, "einsum")`` goes where autocast runs the function in half anyway."""
    for call in facts.file.of_type(cst.Call):
        rule = REGISTERED.get(facts.symbol(call.func) or "")
        statement = facts.file.statement(call)
        if rule is None or len(call.args) != 2 or not isinstance(statement, cst.Expr) or statement.value is not call:
            continue
        module, name = (code_of(arg.value).strip("\"'") for arg in call.args)
        if module in ("torch", "F", "torch.nn.functional", "torch.Tensor") and name in rule:
            edits.statements[statement] = lambda _: []
