"""apex's op lists as data: which ops run in which dtype at O1, by public torch name.

A name stands for the op however it is reached: ``softmax`` is ``torch.softmax``, ``Tensor.softmax`` and
``torch.nn.functional.softmax``; ``matmul`` is also ``@``, ``pow`` also ``**``. What is on no list follows native
autocast. :mod:`ampcompat.amp.overloads` maps the names to the ops torch dispatches.
"""

from typing import Final

HALF: Final = (
    # convolutions
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc"),
    # matrix products
    *("linear", "addmm", "addmv", "addr", "matmul", "mm", "mv", "bmm", "addbmm", "baddbmm", "prelu"),
    # recurrent layers and cells
    *("rnn_tanh", "rnn_relu", "gru", "lstm", "rnn_tanh_cell", "rnn_relu_cell", "gru_cell", "lstm_cell"),
)
"""Run in the half dtype in force."""

FLOAT: Final = (
    # pointwise
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal", "rsqrt", "sinh", "tan"),
    *("pow", "softplus", "gelu"),
    # reductions
    *("cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var", "renorm"),
    *("softmax", "log_softmax", "softmin"),
    # normalisation and resampling
    *("layer_norm", "group_norm", "local_response_norm", "normalize", "cosine_similarity"),
    *("interpolate", "grid_sample"),
    # losses
    *("cosine_embedding_loss", "cross_entropy", "ctc_loss", "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss"),
    *("kl_div", "l1_loss", "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss"),
    *("multilabel_soft_margin_loss", "nll_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss"),
    *("triplet_margin_loss", "triplet_margin_with_distance_loss", "binary_cross_entropy_with_logits"),
    # Tensor.cpu: what leaves for numpy leaves in float32
    "cpu",
)
"""Run in float32."""

PROMOTE: Final = (
    *("addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot", "add", "div", "mul", "sub"),
    *("eq", "equal", "ge", "gt", "le", "lt", "ne"),
)
"""Run in the widest dtype among the arguments."""

SEQUENCE_PROMOTE: Final = ("cat", "stack")
"""Run in the widest dtype among the members of their sequence."""

BANNED: Final = ("binary_cross_entropy",)
"""Refuse half arguments: in half, a probability near 1 gives a loss of inf."""

INPLACE_BANNED: Final = (
    *("acos_", "asin_", "cosh_", "erfinv_", "exp_", "expm1_", "log_", "log10_", "log2_", "reciprocal_", "rsqrt_"),
    *("sinh_", "tan_", "pow_", "cumprod_", "cumsum_", "renorm_"),
)
"""In-place forms of the float list: refuse a half left side, which cannot hold a float32 result."""

UNCAST: Final = ("log1p",)
"""On no list of apex, and run in the dtype they are given, as recorded from it; native CUDA autocast casts them."""

SHIELDED: Final = ("logsumexp", "matrix_exp")
"""On no list, but made inside torch of in-place steps that the lists forbid or widen: run whole, as they are given."""
