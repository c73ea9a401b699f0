"""Name the top-level modules that apex's distribution has beside ``apex``."""

from typing import Final

EXTENSIONS: Final = ("amp_C", "apex_C", "fused_adam_cuda", "fused_layer_norm_cuda")

#: Extensions that apex had, too, and that are not supplied.
NOT_FOUND: Final = ("mlp_cuda", "syncbn", "fused_dense_cuda", "fused_lamb_cuda", "xentropy_cuda")
