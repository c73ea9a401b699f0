"""Classes and functions of apex beside amp that torch has too, and the arguments that torch takes for apex's."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import NamedTuple

from ampcompat.tools.migrate.edits import Edits

#: What only tunes apex's own kernels and buckets.
TUNING = (
    "set_grad_none", "materialize_master_grads", "capturable", "message_size", "delay_allreduce", "shared_param",
    "prof", "retain_allreduce_buffers", "allreduce_trigger_params", "num_allreduce_streams",
    "allreduce_communicators", "memory_efficient", "channel_last",
)  # fmt: skip
#: Why what has no counterpart is left.
ADVICE = {
    "apex.parallel.LARC": "torch has no LARC; import it from ampcompat, or take another optimizer",
    "apex.optimizers.FusedLAMB": "torch has no LAMB; import it from ampcompat, or take another optimizer",
    "apex.optimizers.FusedNovoGrad": "torch has no NovoGrad; import it from ampcompat, or take another optimizer",
    "apex.optimizers.FusedAdam": "use torch.optim.AdamW, or Adam for adam_w_mode=False; apex's weight_decay is 0",
    "apex.optimizers.FusedSGD": "use torch.optim.SGD",
    "apex.optimizers.FusedAdagrad": "use torch.optim.Adagrad",
    "apex.normalization.FusedRMSNorm": "use torch.nn.RMSNorm(..., eps=1e-5)",
    "apex.parallel.DistributedDataParallel": "use torch.nn.parallel.DistributedDataParallel",
}


class Arguments(NamedTuple):
    """The arguments of a call: their sources by position and by name."""

    positional: list[str]
    keywords: dict[str, str]


class Call(NamedTuple):
    """What takes the place of a call: torch's name, and the arguments."""

    name: str
    arguments: Arguments


Rule = Callable[[Arguments], "Call | None"]


def _same(
    name: str, positional: int, refused: dict[str, str] | None = None, added: dict[str, str] | None = None
) -> Rule:
    """The rule of a class that takes torch's arguments.

    Args:
        name: Torch's name.
        positional: How many of apex's positional arguments mean the same.
        refused: Arguments that torch has nothing for, unless they are apex's default.
        added: Arguments that spell out apex's default, unless they are given.
    """

    def rule(arguments: Arguments) -> Call | None:
        keywords = dict(arguments.keywords)
        if len(arguments.positional) > positional or _differs(keywords, refused or {}):
            return None
        return Call(name, Arguments(arguments.positional, {**keywords, **_missing(keywords, added or {})}))

    return rule


def _adam(arguments: Arguments) -> Call | None:
    keywords = dict(arguments.keywords)
    decoupled = keywords.pop("adam_w_mode", "True")
    # apex's third argument is bias_correction, torch's is betas.
    refused = _differs(keywords, {"bias_correction": "True", "amsgrad": "False"})
    if len(arguments.positional) > 2 or refused or decoupled not in ("True", "False"):
        return None
    if decoupled == "False":
        return Call("torch.optim.Adam", Arguments(arguments.positional, keywords))
    added = _missing(keywords, {"weight_decay": "0.0"})
    return Call("torch.optim.AdamW", Arguments(arguments.positional, {**keywords, **added}))


def _rms_norm(arguments: Arguments) -> Call | None:
    added = {} if len(arguments.positional) > 1 else {"eps": "1e-5"}
    return _same("torch.nn.RMSNorm", 3, added=added)(arguments)


def _ddp(arguments: Arguments) -> Call | None:
    keywords = dict(arguments.keywords)
    refused = {
        "gradient_average": "True", "allreduce_always_fp32": "False", "gradient_predivide_factor": "1.0",
    }  # fmt: skip
    if len(arguments.positional) != 1 or _differs(keywords, refused):
        return None
    return Call("torch.nn.parallel.DistributedDataParallel", Arguments(arguments.positional, keywords))


def _differs(keywords: dict[str, str], defaults: dict[str, str]) -> bool:
    """Whether one of some arguments is not its default; they are taken out."""
    given = [keywords.pop(name, default) != default for name, default in defaults.items()]
    return any(given)


def _missing(keywords: dict[str, str], added: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in added.items() if name not in keywords}


def _in_both(package: str, module: str, rules: dict[str, Rule]) -> dict[str, Rule]:
    """Rules by the names that a class has in its package and in its module."""
    return {f"apex.{home}.{name}": rule for name, rule in rules.items() for home in (package, f"{package}.{module}")}


LAYER_NORM = _same("torch.nn.LayerNorm", 3)
RULES: dict[str, Rule] = {
    **_in_both("normalization", "fused_layer_norm", {"FusedLayerNorm": LAYER_NORM, "MixedFusedLayerNorm": LAYER_NORM}),
    **_in_both("normalization", "fused_layer_norm", {"FusedRMSNorm": _rms_norm, "MixedFusedRMSNorm": _rms_norm}),
    **_in_both("optimizers", "fused_adam", {"FusedAdam": _adam}),
    **_in_both("optimizers", "fused_sgd", {"FusedSGD": _same("torch.optim.SGD", 6, {"wd_after_momentum": "False"})}),
    **_in_both(
        "optimizers", "fused_adagrad", {"FusedAdagrad": _same("torch.optim.Adagrad", 2, {"adagrad_w_mode": "False"})}
    ),
    **_in_both("parallel", "distributed", {"DistributedDataParallel": _ddp}),
    **_in_both(
        "parallel",
        "optimized_sync_batchnorm",
        {"SyncBatchNorm": _same("torch.nn.SyncBatchNorm", 6, {"fuse_relu": "False"})},
    ),
    "apex.parallel.convert_syncbn_model": _same("torch.nn.SyncBatchNorm.convert_sync_batchnorm", 2),
}
#: Classes that mean the same where they are not called: as a base, an argument, in isinstance.
CLASSES = {
    symbol: name
    for symbols, name in (
        (("FusedLayerNorm", "MixedFusedLayerNorm"), "torch.nn.LayerNorm"),
        (("DistributedDataParallel",), "torch.nn.parallel.DistributedDataParallel"),
        (("SyncBatchNorm",), "torch.nn.SyncBatchNorm"),
        (("convert_syncbn_model",), "torch.nn.SyncBatchNorm.convert_sync_batchnorm"),
    )
    for symbol in RULES
    if symbol.rpartition(".")[2] in symbols
}
TO_FLOAT = ("apex.fp16_utils.to_python_float", "apex.fp16_utils.fp16util.to_python_float")


def has_counterpart(symbol: str) -> bool:
    """Whether torch may have a counterpart of a symbol, depending on the arguments of its calls."""
    return symbol in RULES


def counterpart(symbol: str, call: ast.Call | None, edits: Edits) -> str | None:
    """Torch's name for a symbol of apex where it is called or just named; None where torch has none."""
    if call is None:
        return CLASSES.get(symbol)
    replacement = _replacement(symbol, call, edits)
    return None if replacement is None else replacement.name


def write_arguments(symbol: str, call: ast.Call, edits: Edits) -> None:
    """Give a call the arguments that torch takes."""
    replacement = _replacement(symbol, call, edits)
    if replacement is None:
        return
    keywords = replacement.arguments.keywords
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in keywords:
            edits.remove_keyword(call, keyword)
    added = [name for name in keywords if name not in _arguments(call, edits).keywords]
    if added:
        edits.add_keyword(call, ", ".join(f"{name}={keywords[name]}" for name in added))


def note(symbol: str, call: ast.Call, edits: Edits) -> str | None:
    """What to know about a call that now makes torch's class; None where there is nothing."""
    name = symbol.rpartition(".")[2]
    if name in ("FusedAdam", "FusedAdagrad"):
        return (
            f"load checkpoints of {name} after amp.initialize, which has the optimizer take them; before it, torch "
            "raises KeyError: 'step'"
        )
    if _arguments(call, edits).keywords.get("delay_allreduce", "False") != "False":
        return (
            "delay_allreduce=True is dropped, with which apex took parameters that got no gradient; if there are such, "
            "torch says so, and needs find_unused_parameters=True"
        )
    return None


def _replacement(symbol: str, call: ast.Call, edits: Edits) -> Call | None:
    if symbol not in RULES:
        return None
    starred = any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords)
    if starred:  # whatever is in there
        return Call(CLASSES[symbol], _arguments(call, edits)) if symbol in CLASSES and symbol not in DDP else None
    arguments = _arguments(call, edits)
    keywords = arguments.keywords
    keywords = {name: value for name, value in keywords.items() if name not in TUNING}
    return RULES[symbol](Arguments(arguments.positional, keywords))


def _arguments(call: ast.Call, edits: Edits) -> Arguments:
    positional = [edits.text(argument) for argument in call.args]
    return Arguments(positional, {one.arg or "": edits.text(one.value) for one in call.keywords})


DDP = ("apex.parallel.DistributedDataParallel", "apex.parallel.distributed.DistributedDataParallel")


def advice(symbol: str) -> str | None:
    """Why a class that torch has a counterpart of is left, or what to take; None for others."""
    package, _, name = symbol.rpartition(".")
    return ADVICE.get(f"{'.'.join(package.split('.')[:2])}.{name}")


def refused_arguments(symbol: str, call: ast.Call | None, edits: Edits) -> list[str]:
    """The keywords of a call that torch has nothing for, as the call spells them: it would be rewritten without."""
    if call is None or symbol not in RULES:
        return []
    arguments = _arguments(call, edits)
    refused: list[str] = []
    for name, value in arguments.keywords.items():
        others = {other: text for other, text in arguments.keywords.items() if other != name}
        if name and RULES[symbol](Arguments(arguments.positional, others)) is not None:
            refused.append(f"{name}={value}")
    return refused
