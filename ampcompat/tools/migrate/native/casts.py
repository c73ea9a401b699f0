"""Casts that a script asks of apex by function: autocast makes them itself, or is told to."""

from __future__ import annotations

import libcst as cst

from ampcompat.tools.migrate.native.edits import Edits
from ampcompat.tools.migrate.native.facts import Facts
from ampcompat.tools.migrate.text import code_of

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
