"""How each symbol of apex fares here: the data that drives the check.

Modules of apex and notes are written here; which names the modules supply is read from the package itself.
"""

from __future__ import annotations

from typing import NamedTuple

from ampcompat._extensions import EXTENSIONS
from ampcompat._replacements import NATIVE
from ampcompat.tools.check.findings import DIFFERS, UNSUPPORTED, WORKS
from ampcompat.tools.check.package_names import exports, names_of


class Symbol(NamedTuple):
    """Verdict on a symbol, and what to know about it: the difference, or the native replacement."""

    verdict: str
    note: str = ""


_MODULES_BELOW = {
    "apex": "_autocast_utils amp fp16_utils mlp multi_tensor_apply normalization optimizers parallel",
    "apex.amp": "__version__ _amp_state _initialize _process_optimizer amp compat frontend handle lists opt rnn_compat"
    " scaler utils",
    "apex.amp.lists": "functional_overrides tensor_overrides torch_overrides",
    "apex.contrib": "clip_grad optimizers xentropy",
    "apex.contrib.clip_grad": "clip_grad",
    "apex.contrib.optimizers": "fp16_optimizer fused_adam fused_lamb fused_sgd",
    "apex.contrib.xentropy": "softmax_xentropy",
    "apex.fp16_utils": "fp16_optimizer fp16util loss_scaler",
    "apex.mlp": "mlp",
    "apex.normalization": "fused_layer_norm",
    "apex.optimizers": "fused_adagrad fused_adam fused_lamb fused_novograd fused_sgd",
    "apex.parallel": "LARC distributed multiproc optimized_sync_batchnorm sync_batchnorm",
    "apex.testing": "common_utils",
}
MODULES = frozenset(
    {*EXTENSIONS, "apex", *(f"{parent}.{name}" for parent, names in _MODULES_BELOW.items() for name in names.split())}
)
"""Names under which an unknown attribute is an unknown symbol; anywhere else it belongs to the symbol before it."""


def _same(verdict: Symbol, *names: str) -> dict[str, Symbol]:
    return dict.fromkeys(names, verdict)


_SYNC_BATCH_NORM = Symbol(DIFFERS, "torch.nn.SyncBatchNorm underneath")
_MLP = Symbol(DIFFERS, "plain torch.nn.functional.linear and the activation, not one fused kernel")
_XENTROPY = Symbol(DIFFERS, "torch.nn.functional.cross_entropy underneath, not a kernel that works in place")
_AMP_STATE = "loss_scalers opt_properties handle verbosity allow_incoming_model_not_fp32 hard_override"

SYMBOLS: dict[str, Symbol] = {
    **{f"apex.{name}": Symbol(UNSUPPORTED, f"use {instead}") for name, instead in NATIVE.items()},
    **_same(Symbol(WORKS), *MODULES, "apex.__version__"),
    # Made when they are asked for, or torch's own, so that the source of the module does not tell of them.
    **_same(
        Symbol(WORKS), *(f"apex.amp._amp_state.{name}" for name in _AMP_STATE.split()), "apex.amp._DECORATOR_HANDLE"
    ),
    **_same(Symbol(WORKS), "apex.parallel.ReduceOp", "apex.contrib.clip_grad.clip_grad.clip_grad_norm_"),
    "apex.amp.register_float_function": Symbol(
        DIFFERS, "a registered class keeps its identity: its forward is wrapped, where apex replaced the class"
    ),
    "apex.amp.wrap": Symbol(UNSUPPORTED, "use amp.half_function, amp.float_function and amp.promote_function"),
    "apex.parallel.DistributedDataParallel": Symbol(
        DIFFERS, "it tolerates unused parameters with and without delay_allreduce; options of streams have no effect"
    ),
    **_same(_SYNC_BATCH_NORM, "apex.parallel.SyncBatchNorm", "apex.parallel.optimized_sync_batchnorm.SyncBatchNorm"),
    **_same(_MLP, "apex.mlp.MLP", "apex.mlp.mlp.MLP"),
    "apex.contrib": Symbol(UNSUPPORTED, "use the torch operation of the same purpose"),
    **_same(
        _XENTROPY,
        "apex.contrib.xentropy.SoftmaxCrossEntropyLoss",
        "apex.contrib.xentropy.softmax_xentropy.SoftmaxCrossEntropyLoss",
    ),
}
"""What the source of ampcompat does not tell. Every other name that its module of the same name has works."""


#: What ``initialize`` leaves on an optimizer, and scripts ask for by name. Files that never name apex do so, too.
ON_OPTIMIZERS = (
    "_amp_stash",
    "_amp_lazy_init",
    "_lazy_init_maybe_master_weights",
    "_master_params_to_model_params",
    "_prepare_amp_backward",
    "_post_amp_backward",
)


def verdict(name: str) -> Symbol:
    """The verdict on a dotted name: its own entry, or that of the longest known prefix.

    Below a module, a name without an entry works when ampcompat's module has it; below a class or function it is an
    attribute of that.
    """
    known = _known_part(name)
    if not known:
        return Symbol(UNSUPPORTED, "not a module of apex")
    if known == name or known not in MODULES:
        return SYMBOLS[known]
    attribute = name[len(known) + 1 :].partition(".")[0]
    if attribute in _supplied(known) or attribute.startswith("__"):  # every module has `__dict__`, `__file__`
        return Symbol(WORKS)
    return Symbol(UNSUPPORTED, f"{known} has no {attribute} that is provided here")


def is_symbol(name: str) -> bool:
    """Whether a dotted name is a module or a symbol of apex, not an attribute of one."""
    module, _, attribute = name.rpartition(".")
    return name in SYMBOLS or (module in MODULES and attribute in _supplied(module))


def names_in(module: str) -> set[str]:
    """The names of the symbols right below a module of apex."""
    listed = (symbol.rpartition(".") for symbol in SYMBOLS)
    return {name for parent, _, name in listed if parent == module} | _supplied(module)


def _supplied(module: str) -> frozenset[str]:
    """The names that ampcompat's module of the same name has; of :data:`EXTENSIONS` those that it exports."""
    if module in EXTENSIONS:
        return exports(f"ampcompat.{module}")
    return names_of(f"ampcompat{module.removeprefix('apex')}")


def canonical(name: str) -> str:
    """The symbol to report for a dotted name: cut after the longest known prefix, except below modules."""
    known = _known_part(name)
    if known == name or (known and known not in MODULES):
        return known
    attribute = name[len(known) :].lstrip(".").partition(".")[0]
    return f"{known}.{attribute}".lstrip(".")


def _known_part(name: str) -> str:
    """The longest beginning of a dotted name that has an entry; "" for none."""
    while name and name not in SYMBOLS:
        name = name.rpartition(".")[0]
    return name
