"""Classes and functions of apex beside amp that torch has too: written with torch's arguments and apex's defaults."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import libcst as cst

from ampcompat.tools.migrate.native.edits import Edits
from ampcompat.tools.migrate.native.facts import Facts
from ampcompat.tools.migrate.text import code_of


def _either(package: str, module: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a class in its package and in its module."""
    return tuple(f"apex.{package}.{home}{name}" for home in ("", f"{module}.") for name in names)


LAYER_NORMS = _either("normalization", "fused_layer_norm", ("FusedLayerNorm", "MixedFusedLayerNorm"))
RMS_NORMS = _either("normalization", "fused_layer_norm", ("FusedRMSNorm", "MixedFusedRMSNorm"))
ADAM = _either("optimizers", "fused_adam", ("FusedAdam",))
SGD = _either("optimizers", "fused_sgd", ("FusedSGD",))
ADAGRAD = _either("optimizers", "fused_adagrad", ("FusedAdagrad",))
DDP = _either("parallel", "distributed", ("DistributedDataParallel",))
SYNC_BN = _either("parallel", "optimized_sync_batchnorm", ("SyncBatchNorm",))
CONVERT = ("apex.parallel.convert_syncbn_model",)
TO_FLOAT = ("apex.fp16_utils.to_python_float", "apex.fp16_utils.fp16util.to_python_float")
#: Classes that stand for torch's wherever they are named: as a base, an argument, a value.
MENTIONS = {
    **dict.fromkeys(LAYER_NORMS, "torch.nn.LayerNorm"),
    **dict.fromkeys(RMS_NORMS, "torch.nn.RMSNorm"),
    **dict.fromkeys(SYNC_BN, "torch.nn.SyncBatchNorm"),
    **dict.fromkeys(DDP, "torch.nn.parallel.DistributedDataParallel"),
}
#: What only tunes apex's own kernels and buckets.
TUNING = (
    "set_grad_none", "materialize_master_grads", "capturable", "message_size", "delay_allreduce", "shared_param",
    "prof", "retain_allreduce_buffers", "allreduce_trigger_params", "num_allreduce_streams",
    "allreduce_communicators", "memory_efficient", "channel_last",
)  # fmt: skip
#: Where a name is bound, not read.
BINDS = (cst.ImportAlias, cst.AsName, cst.AssignTarget, cst.ImportFrom, cst.Import, cst.Param, cst.ClassDef)


def replace_classes(facts: Facts, edits: Edits) -> None:
    """Replace calls and mentions that have a counterpart of the same meaning; the others stay, to be marked."""
    called: set[int] = set()
    for call in facts.file.of_type(cst.Call):
        called.add(id(call.func))
        name = facts.symbol(call.func)
        if name is not None and not any(arg.star for arg in call.args) and _call(name, call) is not None:
            edits.expressions[call] = functools.partial(_torchs, name)
    for node in facts.file.names():
        if id(node) in called:
            continue
        name = facts.file.symbol(node)
        if name in MENTIONS and name not in RMS_NORMS and _is_value(node, facts):
            edits.replace(node, MENTIONS[name])


def _is_value(node: cst.CSTNode, facts: Facts) -> bool:
    """Whether a name is read: not part of an import, of a longer name, or assigned to."""
    parent = facts.file.parents[node]
    return not isinstance(parent, (*BINDS, cst.Attribute))


def _torchs(name: str, call: cst.Call) -> cst.BaseExpression:
    return cst.parse_expression(_call(name, call) or "")


def _call(name: str, call: cst.Call) -> str | None:
    """The source of torch's call, or None where the arguments ask for what torch does not do."""
    positional = [code_of(arg.value) for arg in call.args if arg.keyword is None]
    given = {arg.keyword.value: code_of(arg.value) for arg in call.args if arg.keyword is not None}
    kept = {key: value for key, value in given.items() if key not in TUNING}
    if name in LAYER_NORMS and len(positional) <= 3:
        return _written("torch.nn.LayerNorm", positional, kept)
    if name in RMS_NORMS and len(positional) <= 3:
        eps = {} if len(positional) > 1 or "eps" in kept else {"eps": "1e-5"}
        return _written("torch.nn.RMSNorm", positional, {**eps, **kept})
    if name in ADAM:
        return _adam(positional, kept)
    if name in SGD and len(positional) <= 6:
        return None if _differs(kept, "wd_after_momentum", "False") else _written("torch.optim.SGD", positional, kept)
    if name in ADAGRAD and len(positional) <= 2:
        differs = _differs(kept, "adagrad_w_mode", "False")
        return None if differs else _written("torch.optim.Adagrad", positional, kept)
    if name in CONVERT and len(positional) <= 2:
        return _written("torch.nn.SyncBatchNorm.convert_sync_batchnorm", positional, kept)
    if name in SYNC_BN and len(positional) <= 6 and not _differs(kept, "fuse_relu", "False"):
        return _written("torch.nn.SyncBatchNorm", positional, kept)
    if name in TO_FLOAT and len(positional) == 1 and not given:
        return f"{positional[0]}.item()"
    return _ddp(positional, given, kept) if name in DDP and len(positional) == 1 else None


def _adam(positional: list[str], kept: dict[str, str]) -> str | None:
    # apex's third argument is bias_correction, torch's is betas.
    if len(positional) > 2 or _differs(kept, "bias_correction", "True") or _differs(kept, "amsgrad", "False"):
        return None
    decoupled = kept.pop("adam_w_mode", "True")
    if decoupled == "False":
        return _written("torch.optim.Adam", positional, kept)
    if decoupled != "True":
        return None
    return _written("torch.optim.AdamW", positional, {**kept, "weight_decay": kept.get("weight_decay", "0.0")})


def _ddp(positional: list[str], given: Mapping[str, str], kept: dict[str, str]) -> str | None:
    if _differs(kept, "gradient_average", "True") or _differs(kept, "allreduce_always_fp32", "False"):
        return None
    if _differs(kept, "gradient_predivide_factor", "1.0"):
        return None
    # With delayed all-reduce apex took parameters that got no gradient; torch asks to be told.
    if given.get("delay_allreduce", "False") != "False":
        kept["find_unused_parameters"] = "True"
    return _written("torch.nn.parallel.DistributedDataParallel", positional, kept)


def _differs(kept: dict[str, str], name: str, default: str) -> bool:
    """Whether an argument differs from its default; it is taken out."""
    return kept.pop(name, default) != default


def _written(function: str, positional: list[str], keywords: Mapping[str, str]) -> str:
    return f"{function}({', '.join([*positional, *(f'{key}={value}' for key, value in keywords.items())])})"
