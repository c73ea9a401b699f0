"""Every apex symbol that scripts use, and how it fares here: the data that drives the check.

Modules of apex, notes and refusals are written here; which names the modules supply is read from the package itself.
"""

from __future__ import annotations

from typing import NamedTuple

from ampcompat._extensions import EXTENSIONS
from ampcompat.tools.check.findings import DIFFERS, UNSUPPORTED, WORKS
from ampcompat.tools.check.package_names import binds, exports


class Symbol(NamedTuple):
    """Verdict on a symbol, and what to know about it: the difference, or the native replacement."""

    verdict: str
    note: str = ""


def _works(parent: str, names: str) -> dict[str, Symbol]:
    return {f"{parent}.{name}": Symbol(WORKS) for name in names.split()}


MODULES = frozenset(
    {
        *EXTENSIONS,
        "apex",
        "apex.amp",
        "apex.amp._amp_state",
        "apex.amp._initialize",
        "apex.amp._process_optimizer",
        "apex.amp.frontend",
        "apex.amp.handle",
        "apex.amp.lists",
        "apex.amp.lists.functional_overrides",
        "apex.amp.lists.tensor_overrides",
        "apex.amp.lists.torch_overrides",
        "apex.amp.opt",
        "apex.amp.scaler",
        "apex.fp16_utils",
        "apex.multi_tensor_apply",
        "apex.normalization",
        "apex.normalization.fused_layer_norm",
        "apex.optimizers",
        "apex.parallel",
        "apex.parallel.LARC",
        "apex.parallel.distributed",
        "apex.amp.amp",
        "apex.amp.__version__",
        "apex.fp16_utils.fp16util",
        "apex.fp16_utils.fp16_optimizer",
        "apex.fp16_utils.loss_scaler",
        "apex.optimizers.fused_adagrad",
        "apex.optimizers.fused_adam",
        "apex.optimizers.fused_lamb",
        "apex.optimizers.fused_novograd",
        "apex.optimizers.fused_sgd",
        "apex.parallel.multiproc",
        "apex.parallel.optimized_sync_batchnorm",
        "apex.parallel.sync_batchnorm",
        "apex.testing.common_utils",
        "apex.contrib.clip_grad",
        "apex.contrib.clip_grad.clip_grad",
        "apex.contrib.optimizers",
        "apex.contrib.optimizers.fp16_optimizer",
        "apex.contrib.optimizers.fused_adam",
        "apex.contrib.optimizers.fused_lamb",
        "apex.contrib.optimizers.fused_sgd",
        "apex.contrib.xentropy",
        "apex.contrib.xentropy.softmax_xentropy",
        "apex.mlp",
        "apex.mlp.mlp",
        "apex._autocast_utils",
        "apex.amp.compat",
        "apex.amp.rnn_compat",
    }
)
"""Names under which an unknown attribute is an unknown symbol; anywhere else it belongs to the symbol before it."""

SYMBOLS: dict[str, Symbol] = {
    **{module: Symbol(WORKS) for module in MODULES},
    "apex.__version__": Symbol(WORKS),
    **_works(
        "apex.amp",
        "initialize scale_loss master_params state_dict load_state_dict disable_casts half_function float_function "
        "promote_function register_half_function register_float_function register_promote_function init "
        "bfloat16_function register_bfloat16_function "
        "_DECORATOR_HANDLE model_param step_was_skipped sync_masters __version__",
    ),
    **_works("apex.amp.scaler", "LossScaler"),
    **_works("apex.amp.frontend", "Properties initialize"),
    **_works("apex.amp.handle", "scale_loss disable_casts AmpHandle NoOpHandle"),
    **_works("apex.amp.opt", "OptimWrapper"),
    **_works("apex.amp._initialize", "applier"),
    **_works(
        "apex.amp._amp_state",
        "_amp_state loss_scalers opt_properties handle verbosity allow_incoming_model_not_fp32 hard_override "
        "maybe_print master_params",
    ),
    "apex.amp.register_float_function": Symbol(
        DIFFERS, "a registered class keeps its identity: its forward is wrapped, where apex replaced the class"
    ),
    "apex.amp.wrap": Symbol(UNSUPPORTED, "use amp.half_function, amp.float_function and amp.promote_function"),
    **_works("apex.amp.lists", "functional_overrides torch_overrides tensor_overrides"),
    **_works("apex.amp.lists.functional_overrides", "MODULE FP16_FUNCS FP32_FUNCS BANNED_FUNCS"),
    **_works("apex.amp.lists.torch_overrides", "MODULE FP16_FUNCS FP32_FUNCS CASTS SEQUENCE_CASTS"),
    **_works("apex.amp.lists.tensor_overrides", "MODULE FP16_FUNCS FP32_FUNCS CASTS SEQUENCE_CASTS"),
    "apex.amp.utils": Symbol(DIFFERS, "internal helpers of apex; use torch.is_floating_point and Tensor.to"),
    "apex.parallel.DistributedDataParallel": Symbol(
        DIFFERS, "it tolerates unused parameters with and without delay_allreduce; options of streams have no effect"
    ),
    "apex.parallel.Reducer": Symbol(WORKS),
    "apex.parallel.SyncBatchNorm": Symbol(DIFFERS, "torch.nn.SyncBatchNorm underneath"),
    **_works("apex.parallel", "convert_syncbn_model create_syncbn_process_group multiproc ReduceOp"),
    "apex.parallel.LARC": Symbol(WORKS),
    "apex.parallel.LARC.LARC": Symbol(WORKS),
    **_works(
        "apex.parallel.distributed",
        "DistributedDataParallel Reducer apply_flat_dist_call flat_dist_call split_half_float_double",
    ),
    "apex.parallel.optimized_sync_batchnorm.SyncBatchNorm": Symbol(DIFFERS, "torch.nn.SyncBatchNorm underneath"),
    **_works(
        "apex.optimizers",
        "FusedAdam FusedSGD FusedLAMB FusedMixedPrecisionLamb FusedNovoGrad FusedAdagrad FP16_Optimizer",
    ),
    **_works(
        "apex.normalization",
        "FusedLayerNorm MixedFusedLayerNorm FusedRMSNorm MixedFusedRMSNorm",
    ),
    **_works(
        "apex.normalization.fused_layer_norm",
        "FusedLayerNorm MixedFusedLayerNorm FusedRMSNorm MixedFusedRMSNorm fused_layer_norm fused_layer_norm_affine "
        "FusedLayerNormAffineFunction "
        "mixed_dtype_fused_layer_norm_affine fused_rms_norm fused_rms_norm_affine mixed_dtype_fused_rms_norm_affine",
    ),
    **_works(
        "apex.fp16_utils",
        "BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads master_params_to_model_params "
        "tofp16 to_python_float clip_grad_norm convert_module convert_network FP16Model FP16_Optimizer LossScaler "
        "DynamicLossScaler",
    ),
    **_works("apex.multi_tensor_apply", "multi_tensor_applier MultiTensorApply"),
    "apex.reparameterization": Symbol(UNSUPPORTED, "use torch.nn.utils.parametrizations.weight_norm"),
    "apex.RNN": Symbol(UNSUPPORTED, "use torch.nn.LSTM, torch.nn.GRU or torch.nn.RNN"),
    "apex.mlp.MLP": Symbol(DIFFERS, "plain torch.nn.functional.linear and the activation, not one fused kernel"),
    "apex.mlp.mlp.MLP": Symbol(DIFFERS, "plain torch.nn.functional.linear and the activation, not one fused kernel"),
    "apex.fused_dense": Symbol(UNSUPPORTED, "use torch.nn.Linear"),
    "apex.transformer": Symbol(UNSUPPORTED, "use Megatron-Core, or torch.distributed.tensor.parallel"),
    "apex.pyprof": Symbol(UNSUPPORTED, "use torch.profiler"),
    "apex.contrib": Symbol(UNSUPPORTED, "use the torch operation of the same purpose"),
    **_works("apex.contrib.clip_grad.clip_grad", "clip_grad_norm_"),
    "apex.contrib.xentropy.softmax_xentropy.SoftmaxCrossEntropyLoss": Symbol(
        DIFFERS, "torch.nn.functional.cross_entropy underneath, not a kernel that works in place"
    ),
    "apex.contrib.xentropy.SoftmaxCrossEntropyLoss": Symbol(
        DIFFERS, "torch.nn.functional.cross_entropy underneath, not a kernel that works in place"
    ),
    "apex.contrib.multihead_attn": Symbol(UNSUPPORTED, "use torch.nn.MultiheadAttention"),
    "apex.contrib.fmha": Symbol(UNSUPPORTED, "use torch.nn.functional.scaled_dot_product_attention"),
    "apex.contrib.group_norm": Symbol(UNSUPPORTED, "use torch.nn.GroupNorm"),
    "apex.contrib.groupbn": Symbol(UNSUPPORTED, "use torch.nn.SyncBatchNorm"),
    "apex.contrib.layer_norm": Symbol(UNSUPPORTED, "use apex.normalization.FusedLayerNorm or torch.nn.LayerNorm"),
    **_works("apex.contrib.clip_grad", "clip_grad_norm_"),
    "apex.contrib.sparsity": Symbol(UNSUPPORTED, "use torch.ao.pruning"),
    "apex.contrib.focal_loss": Symbol(UNSUPPORTED, "use torchvision.ops.sigmoid_focal_loss"),
}


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

    Below a module, a name without an entry works when ampcompat's module of that name binds it, or exports it if it is
    one of :data:`EXTENSIONS`; below a class or function it is an attribute of that.
    """
    known = _known_part(name)
    if not known:
        return Symbol(UNSUPPORTED, "not a module of apex")
    if known == name or known not in MODULES:
        return SYMBOLS[known]
    attribute = name[len(known) + 1 :].partition(".")[0]
    if known in EXTENSIONS:
        is_supplied = attribute in exports(f"ampcompat.{known}")
    else:
        is_supplied = binds(f"ampcompat{known.removeprefix('apex')}", attribute)
    if is_supplied or attribute.startswith("__"):  # every module has `__dict__`, `__file__`
        return Symbol(WORKS)
    return Symbol(UNSUPPORTED, f"{known} has no {attribute} that is provided here")


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
