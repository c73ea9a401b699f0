"""Lists of ``torch``, as ``apex/amp/lists/torch_overrides.py`` named them."""

import torch

MODULE = torch

FP16_FUNCS = [
    # convolutions
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc"),
    # matrix products
    *("addmm", "addmv", "addr", "matmul", "mm", "mv", "bmm", "addbmm", "baddbmm", "prelu"),
    # recurrent layers and cells, which apex cast in rnn_compat
    *("rnn_tanh", "rnn_relu", "gru", "lstm", "rnn_tanh_cell", "rnn_relu_cell", "gru_cell", "lstm_cell"),
]

FP32_FUNCS = [
    # pointwise
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal", "rsqrt", "sinh", "tan"),
    "pow",
    # reductions
    *("cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var", "renorm"),
]

CASTS = [
    *("addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot", "add", "div", "mul"),
    *("eq", "equal", "ge", "gt", "le", "lt", "ne"),
]

SEQUENCE_CASTS = ["cat", "stack"]
