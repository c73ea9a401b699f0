"""Classes and functions of apex beside amp that torch has too: written with torch's arguments and apex's defaults."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst

from ampcompat.check.bindings import Bindings
from ampcompat.migrate.marks import code_of
from ampcompat.migrate.native.patterns import is_layout, symbol

LAYER_NORMS = tuple(
    f"apex.normalization.{home}{name}"
    for home in ("", "fused_layer_norm.")
    for name in ("FusedLayerNorm", "MixedFusedLayerNorm")
)
RMS_NORMS = tuple(name.replace("LayerNorm", "RMSNorm") for name in LAYER_NORMS)
DDP = ("apex.parallel.DistributedDataParallel", "apex.parallel.distributed.DistributedDataParallel")


def _either(module: str, name: str) -> tuple[str, str]:
    return f"apex.optimizers.{name}", f"apex.optimizers.{module}.{name}"


#: Packages of apex that hold what is replaced.
REPLACED = ("apex.normalization", "apex.optimizers", "apex.parallel")
ADAM, SGD = _either("fused_adam", "FusedAdam"), _either("fused_sgd", "FusedSGD")
ADAGRAD = _either("fused_adagrad", "FusedAdagrad")
#: What only tunes apex's own kernels and buckets.
TUNING = frozenset(
    {"set_grad_none", "materialize_master_grads", "capturable", "message_size", "delay_allreduce"}
    | {"shared_param", "prof", "retain_allreduce_buffers", "allreduce_trigger_params", "num_allreduce_streams"}
    | {"allreduce_communicators", "memory_efficient", "channel_last"}
)
Given = Mapping[str, str]


class Replace(cst.CSTTransformer):
    """Replaces calls and mentions that have a counterpart of the same meaning; the others stay, to be marked."""

    def __init__(self, bindings: Bindings) -> None:
        self.bindings = bindings
        self.changed = False

    def on_visit(self, node: cst.CSTNode) -> bool:
        return not is_layout(node) and super().on_visit(node)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        name = symbol(original_node.func, self.bindings)
        if name is None or any(arg.star for arg in updated_node.args):
            return updated_node
        made = _call(name, updated_node)
        if made is None:
            return updated_node
        self.changed = True
        return cst.parse_expression(made)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        """A base class, or a class that is handed on."""
        return updated_node.with_changes(value=self._mention(original_node.value, updated_node.value))

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
        return updated_node.with_changes(value=self._mention(original_node.value, updated_node.value))

    def _mention(self, original: cst.BaseExpression, updated: cst.BaseExpression) -> cst.BaseExpression:
        if not isinstance(original, cst.Name | cst.Attribute) or symbol(original, self.bindings) not in LAYER_NORMS:
            return updated
        self.changed = True
        return cst.parse_expression("torch.nn.LayerNorm")


def _call(name: str, call: cst.Call) -> str | None:
    """The source of torch's call, or None where the arguments ask for what torch does not do."""
    positional = [code_of(arg.value) for arg in call.args if arg.keyword is None]
    given = {arg.keyword.value: code_of(arg.value) for arg in call.args if arg.keyword is not None}
    kept = {key: value for key, value in given.items() if key not in TUNING}
    if name in LAYER_NORMS and len(positional) <= 3:
        return _written("torch.nn.LayerNorm", positional, kept)
    if name in RMS_NORMS and len(positional) <= 3:
        return _written("torch.nn.RMSNorm", positional, kept if len(positional) > 1 else {"eps": "1e-5", **kept})
    if name in ADAM:
        return _adam(positional, kept)
    if name in SGD and len(positional) <= 6:
        return None if _off(kept, "wd_after_momentum", "False") else _written("torch.optim.SGD", positional, kept)
    if name in ADAGRAD and len(positional) <= 2:
        return None if _off(kept, "adagrad_w_mode", "False") else _written("torch.optim.Adagrad", positional, kept)
    if name == "apex.parallel.convert_syncbn_model" and len(positional) <= 2:
        return _written("torch.nn.SyncBatchNorm.convert_sync_batchnorm", positional, kept)
    return _ddp(positional, given, kept) if name in DDP and len(positional) == 1 else None


def _adam(positional: list[str], kept: dict[str, str]) -> str | None:
    # apex's third argument is bias_correction, torch's is betas.
    if len(positional) > 2 or _off(kept, "bias_correction", "True") or _off(kept, "amsgrad", "False"):
        return None
    decoupled = kept.pop("adam_w_mode", "True")
    if decoupled not in ("True", "False"):
        return None
    if decoupled == "False":
        return _written("torch.optim.Adam", positional, kept)
    return _written("torch.optim.AdamW", positional, {**kept, "weight_decay": kept.get("weight_decay", "0.0")})


def _ddp(positional: list[str], given: Given, kept: dict[str, str]) -> str | None:
    if _off(kept, "gradient_average", "True") or _off(kept, "allreduce_always_fp32", "False"):
        return None
    if _off(kept, "gradient_predivide_factor", "1.0"):
        return None
    # With delayed all-reduce apex took parameters that got no gradient; torch asks to be told.
    if given.get("delay_allreduce", "False") != "False":
        kept["find_unused_parameters"] = "True"
    return _written("torch.nn.parallel.DistributedDataParallel", positional, kept)


def _off(kept: dict[str, str], name: str, default: str) -> bool:
    """Whether an argument differs from its default; one that is it is dropped."""
    return kept.pop(name, default) != default


def _written(function: str, positional: list[str], keywords: Given) -> str:
    return f"{function}({', '.join([*positional, *(f'{key}={value}' for key, value in keywords.items())])})"
