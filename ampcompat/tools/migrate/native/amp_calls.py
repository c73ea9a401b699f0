"""Calls of amp beside the loop: its state, the scale, and casts that a script asks for by function."""

from __future__ import annotations

import libcst as cst

from ampcompat.tools.migrate.native.edits import Edits
from ampcompat.tools.migrate.native.facts import Facts
from ampcompat.tools.migrate.native.home import Home
from ampcompat.tools.migrate.native.nodes import last_name, literal_key
from ampcompat.tools.migrate.text import code_of

STATE_DICT = "apex.amp.state_dict"
LOAD = "apex.amp.load_state_dict"
SCALERS = ("apex.amp._amp_state.loss_scalers", "apex.amp._amp_state._amp_state.loss_scalers")
OTHER_KEYS = "apex.amp.state_dict: a GradScaler's state has other keys; use {scaler}.get_scale()"
LOOKS = ("sorted", "list", "set", "len", "iter", "print", "tuple", "str", "format")


def state_uses(facts: Facts) -> list[cst.Call | cst.Attribute]:
    """Expressions that ask amp for its state."""
    found: list[cst.Call | cst.Attribute] = []
    for call in facts.file.of_type(cst.Call):
        calls_amp = facts.symbol(call.func) in (STATE_DICT, LOAD)
        asks = isinstance(call.func, cst.Attribute) and _asks_scale(call.func, facts)
        if calls_amp or asks:
            found.append(call)
    for node in facts.file.of_type(cst.Attribute):
        called = isinstance(parent := facts.file.parents[node], cst.Call) and parent.func is node
        if _asks_scale(node, facts) and not called and not isinstance(parent, cst.AugAssign):
            found.append(node)
    return found


def _asks_scale(node: cst.Attribute, facts: Facts) -> bool:
    """Whether an attribute is the scale of ``amp._amp_state.loss_scalers[0]``."""
    if node.attr.value not in ("loss_scale", "_loss_scale") or not isinstance(node.value, cst.Subscript):
        return False
    return facts.symbol(node.value.value) in SCALERS


def replace_state(facts: Facts, home: Home, edits: Edits) -> None:
    """``amp.state_dict()`` becomes the scaler's."""
    for node in state_uses(facts):
        scaler = home.scaler(facts.file.function(node))
        if isinstance(node, cst.Attribute) or facts.symbol(node.func) not in (STATE_DICT, LOAD):
            _scale(node, facts, scaler, edits)
            continue
        parent = facts.file.parents[node]
        saved_scale = _saved_scale(parent, facts)
        if saved_scale is not None:
            edits.replace(saved_scale, f"{scaler}.get_scale()")
            continue
        if _looks_inside(parent, facts):
            edits.mark(facts.file.statement(node), OTHER_KEYS.format(scaler=scaler))
            continue
        name = "state_dict" if facts.symbol(node.func) == STATE_DICT else "load_state_dict"
        edits.replace(node.func, f"{scaler}.{name}")


def _scale(node: cst.Call | cst.Attribute, facts: Facts, scaler: str, edits: Edits) -> None:
    """``amp._amp_state.loss_scalers[0]._loss_scale``, read or written."""
    statement = facts.file.statement(node)
    if not isinstance(facts.file.parents[node], cst.AssignTarget):
        edits.replace(node, f"{scaler}.get_scale()")
    elif isinstance(statement, cst.Assign) and len(statement.targets) == 1:
        new = f'{scaler}.load_state_dict({{**{scaler}.state_dict(), "scale": {code_of(statement.value)}}})'
        edits.statements[statement] = lambda _: [cst.parse_statement(new)]


def _saved_scale(parent: cst.CSTNode, facts: Facts) -> cst.CSTNode | None:
    """The whole of ``amp.state_dict()["loss_scaler0"]["loss_scale"]``, around the first of the two brackets."""
    outer = facts.file.parents.get(parent)
    if not isinstance(parent, cst.Subscript) or not isinstance(outer, cst.Subscript):
        return None
    return outer if (literal_key(parent), literal_key(outer)) == ("loss_scaler0", "loss_scale") else None


def _looks_inside(parent: cst.CSTNode, facts: Facts) -> bool:
    """Whether the state is not handed on as a whole."""
    if isinstance(parent, cst.Subscript | cst.Attribute | cst.For | cst.CompFor | cst.ComparisonTarget):
        return True
    outer = facts.file.parents.get(parent)
    return isinstance(parent, cst.Arg) and isinstance(outer, cst.Call) and last_name(outer.func) in LOOKS


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
DEVICE = '"cuda" if torch.cuda.is_available() else "cpu"'
NO_CASTS = f"torch.autocast({DEVICE}, enabled=False)"
FLOAT_FUNCTION = ("apex.amp.float_function", "apex.amp.amp.float_function")


def replace_casts(facts: Facts, edits: Edits) -> None:
    """Write torch's own casts for those that apex was asked for; what has no counterpart stays, to be marked."""
    for call in facts.file.of_type(cst.Call):
        if facts.symbol(call.func) in ("apex.amp.disable_casts", "apex.amp.handle.disable_casts"):
            edits.replace(call, NO_CASTS)
        else:
            _drop_registration(call, facts, edits)
    for decorator in facts.file.of_type(cst.Decorator):
        function = facts.file.parents[decorator]
        if facts.symbol(decorator.decorator) in FLOAT_FUNCTION and isinstance(function, cst.FunctionDef):
            _float_function(decorator, function, facts, edits)


def _drop_registration(call: cst.Call, facts: Facts, edits: Edits) -> None:
    """``amp.register_half_function(torch, "einsum")`` goes where autocast runs the function in half anyway."""
    rule = REGISTERED.get(facts.symbol(call.func) or "")
    statement = facts.file.statement(call)
    if rule is None or len(call.args) != 2 or not isinstance(statement, cst.Expr) or statement.value is not call:
        return
    module, name = (code_of(arg.value).strip("\"'") for arg in call.args)
    if module in ("torch", "F", "torch.nn.functional", "torch.Tensor") and name in rule:
        edits.statements[statement] = lambda _: []


def _float_function(decorator: cst.Decorator, function: cst.FunctionDef, facts: Facts, edits: Edits) -> None:
    """``@amp.float_function`` above a method, or the forward of an autograd function, is ``custom_fwd``.

    That writes attributes to the first argument: other functions stay, to be marked.
    """
    first = function.params.params[0].name.value if function.params.params else ""
    if first not in ("self", "ctx"):
        return
    name = "custom_bwd" if first == "ctx" and function.name.value == "backward" else "custom_fwd"
    cast = ", cast_inputs=torch.float32" if name == "custom_fwd" else ""
    edits.replace(decorator.decorator, f"torch.amp.{name}(device_type={DEVICE}{cast})")
