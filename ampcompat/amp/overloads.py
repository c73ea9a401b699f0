"""The op lists in the dispatcher's words: which aten overloads a public name stands for, and the rule each gets.

An op made of other ops needs a rule only where its own arithmetic would run in the wrong dtype; a rule on the innermost
op serves all ways in, ``torch.func.vmap`` included, which takes composite ops apart before any rule sees them.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import torch

from ampcompat import _torch
from ampcompat.amp import lists


class Rule(Enum):
    """What a rule does with the floating-point arguments of an op; float64 is left alone by each, as in torch."""

    HALF = "half"
    FLOAT = "float32"
    PROMOTE = "widest argument"
    LEFT = "left side"
    UNCAST = "as given"
    BANNED = "half refused"
    INPLACE_BANNED = "half left side refused"
    STATES = "half, weights cast by the ops inside"


# Public name -> aten overloads, where they are not simply aten::name. Names with nothing here to register are made of
# other listed ops (softmin) or have no op of their own (see `wrappers`).
ATEN: Final[dict[str, tuple[str, ...]]] = {
    **{name: (name, "convolution") for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d")},
    "conv_transpose2d": ("conv_transpose2d.input", "convolution"),
    "conv_transpose3d": ("conv_transpose3d.input", "convolution"),
    "prelu": ("prelu", "_prelu_kernel"),
    **{layer: (f"{layer}.input", f"{layer}.data") for layer in ("rnn_tanh", "rnn_relu", "gru", "lstm")},
    "pow": ("pow.Tensor_Tensor", "pow.Scalar", "pow.Tensor_Scalar"),
    "norm": (
        *("linalg_vector_norm", "norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dtype"),
        *("norm.ScalarOpt_dim_dtype", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim"),
        *("linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
    ),
    "prod": ("prod", "prod.dim_int"),
    "sum": ("sum", "sum.dim_IntList"),
    "std": ("std.correction",),
    "var": ("var.correction",),
    "softmax": ("softmax.int", "_softmax"),
    "log_softmax": ("log_softmax.int", "_log_softmax"),
    "softmin": (),
    "layer_norm": ("layer_norm", "native_layer_norm"),
    "group_norm": ("group_norm", "native_group_norm"),
    "local_response_norm": (),
    "normalize": (),
    "interpolate": (
        *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d"),
        *("_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d"),
        *("upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    ),
    "grid_sample": ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"),
    "cross_entropy": ("nll_loss_forward", "nll_loss2d_forward"),
    "nll_loss": ("nll_loss", "nll_loss2d"),
    "ctc_loss": ("ctc_loss.IntList", "ctc_loss.Tensor"),
    "gaussian_nll_loss": (),
    "multilabel_soft_margin_loss": (),
    "triplet_margin_with_distance_loss": (),
    "cpu": (),
    "bilinear": ("bilinear", "_trilinear"),
    "cross": ("cross", "linalg_cross"),
    # torch promotes these itself. It lets a 0-dim tensor widen nothing, where apex did; a rule that only cures this
    # would cost every addition of a model 5 microseconds and more.
    **dict.fromkeys(("add", "div", "mul", "sub", "eq", "ge", "gt", "le", "lt", "ne"), ()),
    "equal": (),
    "cat": (),
    "stack": (),
    **{name: (f"{name}.*",) for name in lists.INPLACE_BANNED},
}

# In-place forms of the half list: torch demands one dtype, so the others take that of the left side.
LEFT: Final = ("addmm_", "addmv_", "addr_", "addbmm_", "baddbmm_")

RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(lists.HALF, Rule.HALF),
    **dict.fromkeys(lists.FLOAT, Rule.FLOAT),
    **dict.fromkeys(lists.PROMOTE, Rule.PROMOTE),
    **dict.fromkeys(lists.SEQUENCE_PROMOTE, Rule.PROMOTE),
    **dict.fromkeys((*lists.UNCAST, *lists.SHIELDED), Rule.UNCAST),
    **dict.fromkeys(lists.BANNED, Rule.BANNED),
    **dict.fromkeys(lists.INPLACE_BANNED, Rule.INPLACE_BANNED),
    **dict.fromkeys(LEFT, Rule.LEFT),
    **dict.fromkeys(("rnn_tanh_cell", "rnn_relu_cell", "gru_cell", "lstm_cell"), Rule.STATES),
}


def native_is_enough(name: str, op: torch._ops.OpOverload, device_type: str, key: str) -> bool:
    """Whether native autocast on ``device_type`` already treats ``op``, reached by the public ``name``, as listed."""
    if name in lists.BANNED:
        return False  # native runs it in float32 (CPU) or refuses float32 too (CUDA)
    if name in lists.UNCAST:
        return not _torch.has_kernel(op, key)
    if name in lists.SHIELDED:
        return False
    if name == "grid_sample":
        return device_type == "cpu" and _torch.has_kernel(op, key)  # elsewhere native promotes
    if device_type == "cuda" and name in ("rnn_tanh", "rnn_relu", "gru", "lstm"):
        return True  # cast together with cuDNN's flat weight buffer, inside _cudnn_rnn
    return _torch.has_kernel(op, key)


def planned(device_type: str, key: str) -> dict[torch._ops.OpOverload, Rule]:
    """The rules that ``device_type`` needs beside native autocast's own, by overload."""
    plan: dict[torch._ops.OpOverload, Rule] = {}
    for name, rule in RULES.items():
        for aten in ATEN.get(name, (name,)):
            for op in _torch.aten_overloads(aten):
                if not native_is_enough(name, op, device_type, key):
                    plan[op] = rule
    return plan
